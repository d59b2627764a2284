"""The frozen target: load it, tap its decoder layers, stop after the last tap.

A forward for stage 1 needs the residual stream after a few layers and nothing above them, so hooks hand the
tapped layers' outputs on and the hook of the last tap ends the forward. Rows are padded on the right and no
attention mask is given: under causal attention a real token never sees padding, so the fast causal kernel applies
(measured on one H200, random Qwen3-8B, 8 x 2048 tokens: 33,372 tokens/s against 28,544 with a padding mask and all
hidden states).

Shapes: B batch, T tokens, H hidden size, L tapped target layers, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.probe import probe_target
from dflash_train.stage1_target.quantization import check_quantization
from dflash_train.stage1_target.slow_paths import missing_kernels
from dflash_train.stage1_target.target_config import (
    TargetConfig,
    check_target_layer_ids,
    from_pretrained,
    load_model_config,
    load_tokenizer,
    model_class,
    text_config,
)
from dflash_train.stage1_target.target_files import TargetFiles

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class _LastTapReached(Exception):
    """Ends a forward after the last tapped layer."""


@dataclass(kw_only=True, eq=False)
class Target:
    """A loaded, frozen causal language model with tapped decoder layers."""

    config: TargetConfig
    """How it was loaded."""
    model: Any
    """The full causal language model of transformers, in evaluation mode, without gradients."""
    decoder: nn.Module
    """The text model inside `model` that owns the decoder layers."""
    tokenizer: Any
    """Its tokenizer, chat template included."""
    model_config: Any
    """The transformers config."""
    target_layer_ids: tuple[int, ...]
    """Tapped layers, z-lab's numbering."""
    layers: nn.ModuleList
    """All decoder layers."""
    hidden_size: int
    """H."""
    vocab_size: int
    """V, rows of the embedding table."""
    device: torch.device
    """Where the weights are."""
    dtype: torch.dtype
    """What the weights were loaded as."""
    embed_tokens: Tensor
    """[V, H], the raw embedding table."""
    lm_head: Tensor | None
    """[V, H], or None where the head is the embedding table."""
    embedding_scale: float
    """What the model multiplies table rows by before its first layer; 1.0 where that is no plain factor."""
    logit_scale: float
    """What it multiplies `final_norm_output @ head.T` by."""
    logit_softcap: float | None
    """Logits are softcap * tanh(logits / softcap) where this is set."""

    @property
    def num_target_layers(self) -> int:
        """Number of decoder layers, tapped or not."""
        return len(self.layers)

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Run token_ids, int64 [B, T], up to the last tap: [B, T, L * H] in the model's dtype, tapped layers in order.

        Rows shorter than T are padded on the right with any token id; the states there mean nothing.
        """
        num_layers, hidden_size = len(self.target_layer_ids), self.hidden_size
        states = torch.empty(*token_ids.shape, num_layers * hidden_size, dtype=self.dtype, device=self.device)

        def tap(layer: int, output: Tensor) -> None:
            states[..., layer * hidden_size : (layer + 1) * hidden_size].copy_(output)

        self.run_taps(token_ids, tap)
        return states

    def run_taps(self, token_ids: Tensor, tap: Callable[[int, Tensor], None]) -> None:
        """Run token_ids as `hidden_states` does and call tap(number of the tap, its output [B, T, H]) at each tapped layer.

        The output may be overwritten by the next layer: what is to stay must be copied before tap returns.
        """

        def hook_of(number: int) -> Any:
            def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
                tap(number, output if isinstance(output, torch.Tensor) else output[0])
                if number == len(self.target_layer_ids) - 1:
                    raise _LastTapReached

            return hook

        handles = [
            self.layers[i].register_forward_hook(hook_of(number)) for number, i in enumerate(self.target_layer_ids)
        ]
        try:
            with torch.no_grad(), _rows_are_not_packed():
                self.decoder(input_ids=token_ids.to(self.device, non_blocking=True), use_cache=False)
        except _LastTapReached:
            return
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("the forward ended before the last tapped layer ran")


@contextlib.contextmanager
def _rows_are_not_packed() -> Iterator[None]:
    """Keep transformers from looking for packed sequences in the positions, which are always 0 ... T - 1 here.

    It asks the GPU whether there are any, at the start of each forward, and so waits for the batch before to end.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    search = getattr(masking_utils, name, None)
    if search is None:  # another version of transformers
        yield
        return
    setattr(masking_utils, name, lambda *_arguments, **_keywords: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, search)


def find_decoder(model: Any, model_config: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The text model and its decoder layers: the outermost ModuleList of num_hidden_layers modules. Raises InputError."""
    num_layers = int(text_config(model_config).num_hidden_layers)
    decoder = model.get_decoder()
    found = [
        (name.count("."), name.rsplit(".", 1)[-1] not in ("layers", "h", "blocks"), name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise InputError(
            f"No list of {num_layers} decoder layers was found in {type(decoder).__name__}; "
            "a causal language model of transformers with a plain stack of decoder layers is wanted."
        )
    return decoder, min(found, key=lambda entry: entry[:3])[3]


def load_target(
    config: TargetConfig, target_layer_ids: Sequence[int], device: torch.device | str, num_devices: int = 1
) -> Target:
    """Load the target onto `device` and check with one short forward that its layers and head are what we take them for.

    With num_devices of 2 and more, its layers are spread evenly over the first so many GPUs and run in turn; the states
    still come out on the first. Raises InputError where the layers cannot be found or tapped, weights are missing, the
    head has a bias, or the target does not fit.
    """
    device = torch.device(device)
    dtype = config.resolve_dtype(device)
    model_config = load_model_config(config)
    layer_ids = check_target_layer_ids(target_layer_ids, int(text_config(model_config).num_hidden_layers))
    keywords: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if config.is_gguf:
        import transformers

        if hasattr(transformers, "GgufConfig"):  # otherwise unpacking is what it does anyway
            keywords["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        keywords["use_safetensors"] = True  # never a pickle, which could run code
    check_quantization(config, model_config)
    if num_devices > 1:
        keywords["device_map"] = "balanced"
    elif device.type == "cuda" and importlib.util.find_spec("accelerate") is not None:
        keywords["device_map"] = {"": device}  # straight to the GPU, without a copy of the model in host memory
    model, loading = from_pretrained(model_class(model_config, config), config, "weights", **keywords)
    missing = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise InputError(
            f"The target {config.name!r} lacks {len(missing)} of its weights ({', '.join(missing[:3])}), "
            "which would be random; take a complete checkpoint."
        )
    if num_devices > 1:
        _refuse_offload(config, model, num_devices)
        model.eval()
    elif not config.is_gguf and getattr(model_config, "quantization_config", None) is not None:
        model.eval()  # quantised modules know where they belong
    else:
        model.to(device).eval()
    if (quantization := getattr(model_config, "quantization_config", None)) is not None:
        model.config.quantization_config = quantization  # gone where transformers unpacked the weights
    model.requires_grad_(False)
    _warn_of_slow_layers(model_config, device)
    return make_target(config, model, load_tokenizer(config), layer_ids)


def _refuse_offload(config: TargetConfig, model: Any, num_devices: int) -> None:
    """Raise InputError where accelerate put layers into host memory or onto the disk."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if places & {"cpu", "disk"}:
        raise InputError(
            f"The target {config.name!r} does not fit into the free memory of {num_devices} GPUs; give it more with "
            "--gpus-per-target, or take a quantised checkpoint."
        )


def make_target(config: TargetConfig, model: Any, tokenizer: Any, target_layer_ids: Sequence[int]) -> Target:
    """Wrap a model that is already loaded; checks as load_target does."""
    decoder, layers = find_decoder(model, model.config)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or embedding is None:
        raise InputError(f"The target {config.name!r} has no language-model head or no embedding table.")
    if getattr(head, "bias", None) is not None:
        raise InputError(
            f"The head of the target {config.name!r} has a bias, which no DFlash engine applies to a drafter; "
            "take a target whose head has none."
        )
    try:
        probe = probe_target(model, decoder, layers)
    except ImportError as error:  # kernels of quantised layers are looked for when they first run
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"The layers of the target {config.name!r} cannot run: {reason}. Install what it names, or take an unquantised "
            "checkpoint."
        ) from error
    tied = head.weight is embedding.weight or head.weight.data_ptr() == embedding.weight.data_ptr()
    return Target(
        config=config,
        model=model,
        decoder=decoder,
        tokenizer=tokenizer,
        model_config=model.config,
        target_layer_ids=check_target_layer_ids(target_layer_ids, len(layers)),
        layers=layers,
        hidden_size=embedding.weight.shape[1],
        vocab_size=embedding.weight.shape[0],
        device=embedding.weight.device,
        dtype=embedding.weight.dtype,
        embed_tokens=embedding.weight,
        lm_head=None if tied else head.weight,
        embedding_scale=probe.embedding_scale,
        logit_scale=probe.logit_scale,
        logit_softcap=probe.logit_softcap,
    )


def stop_token_ids(target: Target) -> tuple[int, ...]:
    """The ids that end an answer: those of the generation config, of the model config and the tokenizer's eos."""
    sources = (
        getattr(target.model, "generation_config", None),
        text_config(target.model_config),
        target.tokenizer,
    )
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _warn_of_slow_layers(model_config: Any, device: torch.device) -> None:
    """Say so where a hybrid target will crawl because the kernels of its linear-attention layers are missing."""
    slow = missing_kernels(TargetFiles(name="the target", config=model_config.to_dict()))
    if device.type == "cuda" and slow is not None:
        logger.warning("%s", slow)
