"""Which target, in which dtype and with which layers tapped; and what transformers reads of it besides its weights.

Everything that transformers loads comes through `from_pretrained`: in silence, and with one sentence for the many ways in
which a wrong name or a damaged folder shows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.target_files import LOCAL_PATH, nearest_model, read_target_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which model to load, and how."""

    name: str
    """Name on the Hugging Face hub, a local folder, or a local .gguf file."""
    revision: str | None = None
    """Commit, branch or tag on the hub; None is the newest."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16; auto is bfloat16 on CUDA and float32 on a CPU, where bfloat16 is slow."""
    trust_remote_code: bool = False
    """Whether model code from the hub may run; off, because it is somebody else's code."""

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r} but must be one of auto, {', '.join(DTYPES)}.")
        if self.is_gguf and not Path(self.name).is_file():
            raise InputError(f"The target {self.name!r} is no file; give the path of a local .gguf file.")

    @property
    def is_gguf(self) -> bool:
        """Whether `name` is a GGUF file."""
        return self.name.endswith(".gguf")

    def resolve_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype to load for `device`."""
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]

    def source(self) -> tuple[str, dict[str, Any]]:
        """What every `from_pretrained` gets: the name or folder, and the keywords that find the files."""
        if not self.is_gguf:
            return self.name, {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
        if missing:
            raise InputError(
                f"{self.name} is a GGUF file, which needs the package {' and '.join(missing)}; "
                "install the extra: pip install 'dflash-train[gguf]'."
            )
        return str(Path(self.name).parent), {"gguf_file": Path(self.name).name, "trust_remote_code": False}


def from_pretrained(auto_class: Any, config: TargetConfig, what: str, **keywords: Any) -> Any:
    """Call `auto_class.from_pretrained`, silently, and turn what a wrong name raises into one sentence."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, source = config.source()
    nearest = nearest_model(name)
    if LOCAL_PATH.match(name) and not Path(name).exists():
        near = "" if nearest is None else f" The nearest folder is {nearest!r}."
        raise InputError(f"The target {name!r} is not there; give a model's folder, or a name on the hub.{near}")
    if nearest is not None and (files := read_target_files(name, config.revision)).severity == "error":
        raise InputError(f"The target {files.problem}. {files.way_out}")
    # transformers draws the bar of a GGUF conversion whatever it is told
    silence = contextlib.redirect_stderr(io.StringIO()) if config.is_gguf else contextlib.nullcontext()
    try:
        with silence:
            return auto_class.from_pretrained(name, **source, **keywords)
    except Exception as error:  # a damaged file shows in as many ways as there are parsers; --debug shows which
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(
                f"The {what} of the target {config.name!r} do not fit into the memory of the device; give each copy more "
                "GPUs with dflash extract --gpus-per-target, or take a quantised checkpoint."
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        if "custom code" in str(error) and not config.trust_remote_code:
            reason, way_out = (
                "it brings code of its own",
                "Read that code, then give --trust-remote-code to let it run.",
            )
        else:
            if what == "weights" and "model.safetensors" in reason:
                reason += " (weights are read from safetensors alone: a pickle could run code)"
            reason = reason if len(reason) <= 200 else f"{reason[:200]} …"
            way_out = "Give a whole model folder, or a name on the hub that this machine can reach."
        raise InputError(
            f"Could not load the {what} of the target {config.name!r}: {reason.rstrip('.!')}. {way_out}"
        ) from error


def load_tokenizer(config: TargetConfig) -> Any:
    """Load the target's tokenizer, chat template included."""
    from transformers import AutoTokenizer

    return from_pretrained(AutoTokenizer, config, "tokenizer")


def load_model_config(config: TargetConfig) -> Any:
    """Load the transformers config, without weights; encoder-decoder models are refused."""
    from transformers import AutoConfig

    model_config = from_pretrained(AutoConfig, config, "config")
    if getattr(model_config, "is_encoder_decoder", False):
        raise InputError(f"The target {config.name!r} is an encoder-decoder model; a causal language model is wanted.")
    return model_config


def text_config(model_config: Any) -> Any:
    """The part of a transformers config that describes the language model (multimodal configs have several)."""
    return model_config.get_text_config(decoder=True)


def model_class(model_config: Any, config: TargetConfig) -> Any:
    """The transformers class that loads this config as a model with a language-model head."""
    import transformers

    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        remote = auto_class.__name__ in (getattr(model_config, "auto_map", None) or {}) and config.trust_remote_code
        if remote or type(model_config) in auto_class._model_mapping:
            return auto_class
    raise InputError(
        f"transformers {transformers.__version__} has no causal language model for the model type "
        f"{model_config.model_type!r} of {config.name!r}; take another target or another version of transformers."
    )


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Which layers to tap by z-lab's rule: evenly from layer 1 to layer num_target_layers - 3.

    Source: z-lab/dflash, build_target_layer_ids (36 layers, 5 taps: 1, 9, 17, 25, 33).
    """
    if num_taps < 1:
        raise InputError(f"The number of tapped layers is {num_taps} but must be at least 1.")
    if num_taps == 1:
        ids = [num_target_layers // 2]
    else:
        ids = [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    try:
        return check_target_layer_ids(ids, num_target_layers)
    except InputError:
        raise InputError(
            f"A target of {num_target_layers} layers has no {num_taps} taps by z-lab's rule; "
            "tap fewer with --num-taps, or name them with --target-layers."
        ) from None


def check_target_layer_ids(target_layer_ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    """Check layer ids in z-lab's numbering (0 is the first decoder layer): ascending, distinct, the last one left out.

    Raises InputError.
    """
    ids = tuple(target_layer_ids)
    shown = ",".join(map(str, ids))
    if not ids:
        raise InputError("No target layer is named; name at least one with --target-layers.")
    if list(ids) != sorted(set(ids)):
        raise InputError(f"The target layers {shown} are not ascending and distinct; sort them, each once.")
    if num_target_layers - 1 in ids:
        raise InputError(
            f"Target layer {num_target_layers - 1} is the last one, whose output engines cannot tap "
            "(transformers gives it after the final norm, SGLang not at all); "
            f"choose from 0 to {num_target_layers - 2}."
        )
    if ids[0] < 0 or ids[-1] >= num_target_layers:
        raise InputError(
            f"The target layers {shown} do not exist in a target of {num_target_layers} layers; "
            f"choose from 0 to {num_target_layers - 2}."
        )
    return ids
