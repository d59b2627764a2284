"""Quantised targets: how a checkpoint's weights are quantised, and which packages transformers needs to load them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dflash_train.errors import InputError

if TYPE_CHECKING:
    from dflash_train.stage1_target.target_config import TargetConfig

PACKAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "awq": (("gptqmodel", "gptqmodel"), ("accelerate", "accelerate")),
    "bitsandbytes": (("bitsandbytes", "bitsandbytes"), ("accelerate", "accelerate")),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "fbgemm_fp8": (("fbgemm_gpu", "fbgemm-gpu"), ("accelerate", "accelerate")),
    "fp8": (("accelerate", "accelerate"),),
    "gptq": (("optimum", "optimum"), ("gptqmodel", "gptqmodel")),
    "hqq": (("hqq", "hqq"),),
    "mxfp4": (("accelerate", "accelerate"),),
    "torchao": (("torchao", "torchao"),),
}
"""Method → (module, package) that its loader in transformers 5.24 asks for; of other methods transformers' own words."""


def quantization_name(config: TargetConfig, model_config: Any) -> str | None:
    """How the checkpoint's weights are quantised: gguf, fp8, awq …, or None."""
    if config.is_gguf:
        return "gguf"
    settings = getattr(model_config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else vars(settings)
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # as old checkpoints have it
    return str(getattr(method, "value", method or ""))


def _is_known(method: str) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    # GGUF files are unpacked whatever the version says of them, and bitsandbytes stands there by number of bits
    return method in ("gguf", "bitsandbytes") or method in AUTO_QUANTIZATION_CONFIG_MAPPING


def check_quantization(
    config: TargetConfig, model_config: Any, has_module: Callable[[str], bool] | None = None
) -> None:
    """Raise InputError for a quantisation that transformers does not know, or whose packages are not installed.

    Of one that it does not know transformers warns, and loads the weights as if they were plain.
    """
    installed = has_module or (lambda module: find_spec(module) is not None)
    method = quantization_name(config, model_config)
    if method is not None and not _is_known(method):
        raise InputError(
            f"The weights of {config.name} are quantised by {method!r} by its config.json, which this transformers does not "
            "know: take a newer transformers, or an unquantised checkpoint; where its weights are plain, remove "
            "quantization_config from config.json."
        )
    missing = [package for module, package in PACKAGES.get(method or "", ()) if not installed(module)]
    if missing:
        raise InputError(
            f"The weights of {config.name} are quantised by {method}, which transformers loads with "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}, or take an unquantised checkpoint."
        )
