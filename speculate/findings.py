"""What `dflash check` finds: lines that are ok, a warning or an error, each with its way out; the engines that it asks for."""

from __future__ import annotations

from dflash_train.machine.preflight import Check

__all__ = ["ENGINES", "Check", "error", "ok", "warning"]

ENGINES = ("sglang", "vllm", "z-lab")
"""Readers of z-lab's format; z-lab is PyPI's `dflash`, which reads it with transformers."""


def ok(name: str, text: str) -> Check:
    """All is well."""
    return Check(name, "ok", text)


def warning(name: str, text: str, way_out: str) -> Check:
    """It will work, perhaps worse than it could."""
    return Check(name, "warning", text, way_out)


def error(name: str, text: str, way_out: str) -> Check:
    """An engine would refuse the drafter or, worse, misread it."""
    return Check(name, "error", text, way_out)
