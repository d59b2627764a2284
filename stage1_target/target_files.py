"""A target's small files, read without transformers: enough to tell whether its layers and tokenizer have fast code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

HUB_SECONDS = 10.0
LOCAL_PATH = re.compile(r"[./~]|[^/]*/[^/]*/")  # what cannot be org/name
LINEAR_ATTENTION = (("fla", "flash-linear-attention"), ("causal_conv1d", "causal-conv1d"))
MAMBA = (("mamba_ssm", "mamba-ssm"), ("causal_conv1d", "causal-conv1d"))
CONVOLUTION = (("causal_conv1d", "causal-conv1d"),)


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """What config.json and the list of files say of a target."""

    name: str
    """As given."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; empty where it was not looked at."""
    has_fast_tokenizer: bool | None = None
    """Whether a tokenizer.json is there; None where that is not known."""
    problem: str | None = None
    """Why the files could not be read."""
    severity: Literal["ok", "warning", "error"] = "ok"
    """How bad that is."""
    way_out: str = ""
    """What to do about it."""

    def layers_with_kernels(self) -> str:
        """The kind of layers that have fast code outside torch: «linear-attention», «Mamba», «convolution» or «»."""
        config = {**self.config, **(self.config.get("text_config") or {})}
        kinds = " ".join(map(str, [*_list(config.get("layer_types")), *_list(config.get("layers_block_type"))]))
        if "linear" in kinds or "linear_num_key_heads" in config or "linear_attn_config" in config:
            return "linear-attention"
        if "mamba" in kinds or "mamba" in str(config.get("model_type")) or any(k.startswith("mamba_") for k in config):
            return "Mamba"
        return "convolution" if "conv" in kinds else ""

    def fast_kernels(self) -> tuple[tuple[str, str], ...]:
        """Modules that the layers' fast code needs, as (module, package)."""
        return {"linear-attention": LINEAR_ATTENTION, "Mamba": MAMBA, "convolution": CONVOLUTION}.get(
            self.layers_with_kernels(), ()
        )


def read_target_files(name: str, revision: str | None = None, ask_hub: bool = False) -> TargetFiles:
    """Look at a local folder, at the hub's local cache, and, with `ask_hub`, at the hub itself.

    The hub is also asked, once, for org/name where a folder org holds models here: that is a misspelt folder or a target
    of the hub, and the hub's client would try an unreachable hub again for half a minute.
    """
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            return _error(name, f"{name!r} is no file", "Give the path of a local .gguf file.")
        return TargetFiles(name=name, problem=f"{name} is a GGUF file, looked at when it is loaded")
    if Path(name).is_dir():
        return _read(name, lambda file: Path(name) / file if (Path(name) / file).is_file() else None)
    return _read_hub(name, revision, ask_hub)


def nearest_model(name: str) -> str | None:
    """Of the models that lie in the folder of a path that is not there, the one whose name is most like it."""
    path = Path(name)
    if "/" not in name or path.exists():
        return None
    try:
        models = sorted(folder.name for folder in path.parent.iterdir() if (folder / "config.json").is_file())
    except OSError:  # no folder, or not ours to read
        return None
    wanted = path.name.casefold()
    likeness = {model: SequenceMatcher(None, wanted, model.casefold()).ratio() for model in models}
    return str(path.with_name(max(models, key=lambda model: likeness[model]))) if models else None


def _read_hub(name: str, revision: str | None, ask_hub: bool) -> TargetFiles:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    def cached(file: str) -> Path | None:
        path = try_to_load_from_cache(name, file, revision=revision)
        return Path(path) if isinstance(path, str) else None

    nearest = None if LOCAL_PATH.match(name) else nearest_model(name)
    try:
        if cached("config.json") is not None:
            return _read(name, cached, sure=False)
        if not ask_hub and nearest is None:
            return TargetFiles(
                name=name, problem=f"{name} is not in the hub's local cache, looked at when it is loaded"
            )
        siblings = HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS).siblings or []  # does not try again
        there = {sibling.rfilename for sibling in siblings}

        def find(file: str) -> Path | None:
            return Path(hf_hub_download(name, file, revision=revision)) if file in there else None

        files = _read(name, lambda file: find(file) if file == "config.json" else None)
        return files if files.problem else replace(files, has_fast_tokenizer="tokenizer.json" in there)
    except Exception as error:  # noqa: BLE001 - the hub's client raises its HTTP library's own, and that changes
        first = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        if not ask_hub and nearest is None:
            return TargetFiles(name=name, problem=f"{name} could not be looked at ({first})")
        way_out = "Check the name, the network, and your access (`hf auth whoami`)."
        way_out = way_out if nearest is None else f"The nearest folder is {nearest!r}. {way_out}"
        return _error(name, f"{name!r} is no folder here and could not be read from the hub ({first})", way_out)


def _read(name: str, find: Callable[[str], Path | None], sure: bool = True) -> TargetFiles:
    path = find("config.json")
    if path is None:
        return _error(name, f"{name!r} has no config.json", "Give a model's folder or its name on the hub.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return _error(name, f"{path} cannot be read ({error})", "Download the target again.")
    if not isinstance(config, dict):
        return _error(name, f"{path} is no JSON object", "Download the target again.")
    has = find("tokenizer.json") is not None
    return TargetFiles(name=name, config=config, has_fast_tokenizer=has if has or sure else None)


def _error(name: str, problem: str, way_out: str) -> TargetFiles:
    return TargetFiles(name=name, problem=problem, severity="error", way_out=way_out)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
