"""The target with its cache, able to forget tokens: what verification in speculative decoding needs.

A block of K tokens is run in one forward, then only its first n are kept. Attention layers are cropped (by a negative
count, the one spelling that transformers supports for sliding windows). Every other layer is treated as recurrent:
its state is a sum over all tokens, so no crop can undo one. (On transformers' hybrid targets `crop` succeeds and leaves
the state wrong: huggingface/transformers #49036, z-lab/dflash #172.) Such layers are copied before the block; after a
partial accept the copy is put back and the kept tokens are run again. That is lossless, and costs one more forward a
partly accepted round.

Shapes: T tokens, K block size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dflash_train.errors import InputError
from dflash_train.stage1_target.recurrence import CACHE_ARGUMENTS, cache_argument, is_cropped, is_recurrent


class TargetCache:
    """A causal language model and the cache of the tokens it has read."""

    def __init__(self, model: nn.Module, *, rewindable: bool = False) -> None:
        """`rewindable` allows `run_block` and `keep`; without it the cache is the plainest and fastest one.

        Raises InputError where the model takes no cache.
        """
        from transformers import DynamicCache

        parameters, name = inspect.signature(model.forward).parameters, cache_argument(model)
        if name is None:
            raise InputError(
                f"{type(model).__name__}.forward takes none of {', '.join(CACHE_ARGUMENTS)}, so decoding cannot keep a "
                "cache; evaluate with a target that transformers itself implements."
            )
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self._arguments: dict[str, Any] = {name: self.cache, "use_cache": True}
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._rewindable = rewindable
        self._copied = [i for i, layer in enumerate(self.cache.layers) if not is_cropped(layer)] if rewindable else []
        self._copies: dict[int, Any] = {}
        self._block: Tensor | None = None
        if rewindable:
            for layer in self.cache.layers:
                # A sliding layer drops keys older than its window at once unless told to wait for `crop`.
                if is_cropped(layer) and hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer's state cannot be cropped."""
        return is_recurrent(self.model)

    def run(self, token_ids: Tensor) -> Tensor:
        """Read token_ids int64 [1, T] for good; logits [1, 1, V] of the last of them."""
        logits: Tensor = self.model(token_ids, **self._arguments, **self._last_only).logits[:, -1:]
        if self._rewindable:
            self._crop(0)  # lets sliding layers forget what is out of their window
        return logits

    def run_block(self, token_ids: Tensor) -> Tensor:
        """Read token_ids int64 [1, K] until `keep` says how many stay; logits [1, K, V] of all of them."""
        assert self._rewindable and self._block is None
        self._copies = {i: _copy_layer(self.cache.layers[i]) for i in self._copied}
        self._block = token_ids
        logits: Tensor = self.model(token_ids, **self._arguments).logits
        return logits

    def keep(self, num_tokens: int) -> None:
        """Forget the tokens of the last block after its first `num_tokens`."""
        assert self._block is not None and 1 <= num_tokens <= self._block.shape[1]
        block, self._block = self._block, None
        num_rejected = block.shape[1] - num_tokens
        copies, self._copies = self._copies, {}
        if not copies or not num_rejected:
            self._crop(num_rejected)
            return
        self._crop(block.shape[1])
        for index, layer in copies.items():
            self.cache.layers[index] = layer
        self.run(block[:, :num_tokens])

    def _crop(self, num_tokens: int) -> None:
        for layer in self.cache.layers:
            if is_cropped(layer):
                layer.crop(-num_tokens)


def check_continuation(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    """Raise InputError if a recurrent target cannot read a block after what its cache holds.

    Some keep a cache of their own kind. Others start from an empty state whenever they read more than one token, which
    makes every verification wrong without a word. Nine tokens are read at once, and as five and four; in the last
    logits rounding makes a difference of 1e-6 to 1e-3 (fp32) or 1e-2 (bf16) of their spread, a lost state 0.1 to 1
    (tiny random targets of nine kinds, transformers 5.17 and 5.24).
    """
    if not TargetCache(model).is_recurrent:
        return
    token_ids = (torch.arange(9, device=device)[None] * 7919 + 11) % vocab_size
    with torch.inference_mode():
        parts = TargetCache(model)
        try:
            parts.run(token_ids[:, :5])
        except ValueError as error:
            raise InputError(
                f"{type(model).__name__} does not take transformers' DynamicCache ({error}), so rejected tokens cannot "
                "be undone; this target can be trained for, but not evaluated here."
            ) from error
        continued = parts.run(token_ids[:, 5:]).float()
        whole = TargetCache(model).run(token_ids).float()
    difference = float((whole - continued).abs().max() / whole.std().clamp_min(1e-30))
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.float32 else 1e-1
    if not difference <= tolerance:
        raise InputError(
            f"The recurrent layers of {type(model).__name__} lose their state when several tokens are read at once "
            f"(logits differ by {difference:.2g} of their spread, at most {tolerance:g} is rounding), so a block cannot "
            "be verified; install the newest transformers and the kernels that this target asks for."
        )


def _copy_layer(layer: Any) -> Any:
    """A copy that shares no tensor with `layer`. copy.deepcopy would copy the whole storage behind each view."""
    twin = copy.copy(layer)
    try:
        vars(twin).update({name: _copy_value(value) for name, value in vars(layer).items()})
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"The cache layer {type(layer).__name__} can neither be cropped nor copied ({error}), so rejected tokens "
            "cannot be undone; this target can be trained for, but not evaluated here."
        ) from error
    return twin


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copy_value(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_value(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    return copy.deepcopy(value)
