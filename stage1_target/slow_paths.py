"""What makes a target slow without an error: one sentence each with the cost and the fix, for preflight and extract.

preflight asks before anything is imported, from the target's small files; extract asks again with the config and the
tokenizer that it loaded, and a worker with the model itself, which alone knows what transformers fell back to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dflash_train.errors import InputError
from dflash_train.machine.preflight import Check
from dflash_train.stage1_target.target_files import TargetFiles

if TYPE_CHECKING:
    from dflash_train.stage1_target.target import Target

KERNELS, TOKENIZER, WEIGHTS, ATTENTION = "fast kernels", "tokenizer", "weights", "attention"


@dataclass(frozen=True)
class SlowPath:
    """One fast path that is missing."""

    name: str
    """What it is of: one of KERNELS, TOKENIZER, WEIGHTS, ATTENTION."""
    text: str
    """What was found and what it costs, in a sentence."""
    way_out: str
    """The fix, as a command or a sentence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text} {self.way_out}"


def missing_kernels(files: TargetFiles, has_module: Callable[[str], bool] | None = None) -> SlowPath | None:
    """Layers whose fast code is in packages that are not installed; matters on a GPU alone, the CPU has none."""
    installed = has_module or (lambda module: find_spec(module) is not None)
    missing = [package for module, package in files.fast_kernels() if not installed(module)]
    if not missing:
        return None
    return SlowPath(
        KERNELS,
        f"{files.name} has {files.layers_with_kernels()} layers{_share_of_layers(files)}, which run in plain torch, many "
        f"times slower, without {' and '.join(missing)}.",
        f"pip install {' '.join(missing)}",
    )


def _share_of_layers(files: TargetFiles) -> str:
    """« (36 of 48)», where the config lists its layers."""
    config = {**files.config, **(files.config.get("text_config") or {})}
    for name in ("layer_types", "layers_block_type"):
        if isinstance(kinds := config.get(name), list):
            fast = [kind for kind in map(str, kinds) if any(word in kind for word in ("linear", "mamba", "conv"))]
            return f" ({len(fast)} of {len(kinds)})" if fast else ""
    return ""


def slow_tokenizer(files: TargetFiles) -> SlowPath | None:
    """A tokenizer without its implementation in Rust."""
    if files.has_fast_tokenizer is not False:
        return None
    return SlowPath(
        TOKENIZER,
        f"{files.name} has no tokenizer.json; unless transformers can convert its tokenizer, it runs in Python, one row "
        "after the other and many times slower, and cannot mark the answers.",
        "Convert it once with AutoTokenizer and save_pretrained, or give data with input_ids and loss_mask.",
    )


def check_target(files: TargetFiles, num_gpus: int, has_module: Callable[[str], bool] | None = None) -> list[Check]:
    """Are the fast kernels of the target's layers installed, and has it a fast tokenizer?"""
    if files.problem is not None:
        return [Check("target", files.severity, f"{files.problem}.", files.way_out)]
    slow = missing_kernels(files, has_module) if num_gpus else None
    if slow is None:
        checks = [Check(KERNELS, "ok", f"{files.name} needs none that is missing.")]
    else:
        checks = [Check(KERNELS, "warning", slow.text, slow.way_out)]
    if (slow := slow_tokenizer(files)) is not None:
        checks.append(Check(TOKENIZER, "warning", slow.text, slow.way_out))
    elif files.has_fast_tokenizer:
        checks.append(Check(TOKENIZER, "ok", "it has a fast implementation."))
    return checks


def slow_weights(dtype: str) -> SlowPath | None:
    """Weights of 4 bytes on a GPU, for every such target but those that overflow otherwise."""
    if dtype != "float32":
        return None
    return SlowPath(
        WEIGHTS,
        "the weights are float32 on a GPU: twice the memory of bfloat16, and matrix products without its tensor cores "
        "(H100 data sheet: 67 against 989 TFLOP/s).",
        "Leave --dtype at auto, unless this target overflows in bfloat16.",
    )


def slow_paths_of_files(files: TargetFiles, on_gpu: bool, dtype: str) -> list[SlowPath]:
    """All that small files and options tell."""
    found = [slow_tokenizer(files)]
    if on_gpu:
        found += [missing_kernels(files), slow_weights(dtype)]
    return [slow for slow in found if slow is not None]


def slow_paths_of_model(target: Target) -> list[SlowPath]:
    """What only the loaded model tells: its attention, and the dtype that its weights really have."""
    found: list[SlowPath] = []
    config = target.model_config.get_text_config(decoder=True)
    implementation: Any = getattr(getattr(target.decoder, "config", config), "_attn_implementation", None)
    if implementation == "eager" and getattr(config, "num_attention_heads", None):
        cause, way_out = "fell back to", "Take a version of transformers whose class of this target supports sdpa"
        if getattr(target.model, "_supports_sdpa", False):
            cause, way_out = "is told by its config to take", "Remove attn_implementation from its config.json"
        found.append(
            SlowPath(
                ATTENTION,
                f"{type(target.model).__name__} {cause} eager attention: every layer writes all scores, memory and "
                "time grow with the square of the length, and long samples run several times slower.",
                f"{way_out}, and lower --batch-tokens.",
            )
        )
    if target.device.type == "cuda":
        sizes: dict[str, int] = {}
        for parameter in target.model.parameters():
            sizes[str(parameter.dtype)] = sizes.get(str(parameter.dtype), 0) + parameter.numel()
        slow = slow_weights("float32" if max(sizes, key=lambda name: sizes[name]) == "torch.float32" else "")
        found += [] if slow is None else [slow]
    return found


def refused(found: Sequence[SlowPath]) -> InputError:
    """The error of --require-fast-kernels, with all of them."""
    return InputError("\n".join([*map(str, found), "Nothing was stored, because of --require-fast-kernels."]))
