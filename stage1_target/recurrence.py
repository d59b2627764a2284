"""Which targets carry a recurrent state, which no crop undoes and which padding before a prompt may change.

The layers of transformers' cache tell: attention keeps keys and values of each token, every other kind counts as
recurrent. So does a model that keeps its state in a way of its own (RWKV, xLSTM), since a wrong no goes unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # newest transformers first; the last is Mamba's
_CROPPED_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer")


def cache_argument(model: nn.Module) -> str | None:
    """What the model's forward calls transformers' cache; None where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def is_cropped(layer: Any) -> bool:
    """Whether `crop` undoes a token in this layer of a cache: attention of known kinds only, for the same reason."""
    return type(layer).__module__ == "transformers.cache_utils" and type(layer).__name__ in _CROPPED_LAYERS


def is_recurrent(model: nn.Module) -> bool:
    """Whether some layer of the model keeps a state that cannot be cropped, or one that transformers does not know."""
    from transformers import DynamicCache

    if cache_argument(model) is None or getattr(model, "_is_stateful", False):
        return True
    try:
        layers = DynamicCache(config=model.config).layers
    except (LookupError, AttributeError, TypeError):  # a config of other code's own, with kinds of layers of its own
        return True
    return not all(map(is_cropped, layers))


def share_padding(prompts: Iterable[T], length: Callable[[T], int], recurrent: bool) -> Iterator[list[T]]:
    """Prompts that may share a batch, the shortest first: all of them, of a recurrent target only equally long ones."""
    for _, group in groupby(sorted(prompts, key=length), key=lambda prompt: length(prompt) if recurrent else 0):
        yield list(group)
