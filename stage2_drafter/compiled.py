"""The drafter compiled once, with proof that it stays so: flex_attention on CUDA, a dense mask through SDPA on the CPU.

On CUDA three functions are compiled with `torch.compile(fullgraph=True, dynamic=False)`: the projection of the context, a
layer, which is an argument, so that all layers share its code, and the last layer with the last norm, which leave out
slot 0 as soon as no other slot looks at it: the anchor's token is known and nothing is predicted there. The block mask is counted from its
intervals by kernels of our own (`mask_kernel`), which need no compiler. Every shape is fixed when the object is made.
`warm_up` runs one whole training step and one evaluation step of the caller, compares the number of compiled graphs with
the number that follows from the layers, and then sets torch's stance `fail_on_recompile`, which is process-wide: from
there on a compile raises. flex_door.py keeps flex_attention from ever running dense.

torch's compiler keeps global state, so only the main thread may pass (reference: pytorch issues 126024, 168042).

Shapes: S context tokens of a row, A anchors, K block size, Q = A · K noise tokens, F features per token, H hidden size.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.blocks import TILE, dense_block_mask
from dflash_train.stage2_drafter.drafter import Attend, Drafter, DrafterLayer, Product
from dflash_train.stage2_drafter.flex_door import flex_attention_door, forbid_dense_flex
from dflash_train.stage2_drafter.fp8 import check_fp8, fp8_linear
from dflash_train.units import format_count

log = logging.getLogger(__name__)

MIN_HEAD_DIM = 16
"""Smallest head that flex_attention's Triton kernels take."""
MAX_DENSE_CELLS = 2**27
"""Largest dense mask on the CPU, in cells: SDPA widens it to fp32, so 0.5 GiB."""

LayerKind = tuple[int | None, bool]
"""(sliding window, causal inside the block): layers of one kind share a mask and a graph."""


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _run_layer(
    layer: DrafterLayer,
    noise: Tensor,
    context: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: BlockMask | Attend,
    product: Product,
) -> Tensor:
    out: Tensor = layer(noise, context, cos, sin, _attend_under(mask), product)
    return out


def _run_last_layer(
    layer: DrafterLayer,
    norm: nn.Module,
    block_size: int,
    noise: Tensor,
    context: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: BlockMask | Attend,
    product: Product,
) -> Tensor:
    """The last layer and the last norm: [1,Q,H], zero in slot 0, which is left out once the other slots have seen it."""
    attended = layer.attended(noise, context, cos, sin, _attend_under(mask), product)
    (_, heads, _, head_dim), hidden_size = attended.shape, noise.shape[-1]
    attended = attended.reshape(1, heads, -1, block_size, head_dim)[:, :, :, 1:].flatten(2, 3)
    noise = noise.reshape(1, -1, block_size, hidden_size)[:, :, 1:].flatten(1, 2)
    states = norm(layer.finish(noise, attended, product)).view(1, -1, block_size - 1, hidden_size)
    return F.pad(states, (0, 0, 1, 0)).flatten(1, 2)


def _attend_under(mask: BlockMask | Attend) -> Attend:
    if not isinstance(mask, BlockMask):
        return mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention_door(q, k, v, mask)

    return attend


def _run_context(fc: nn.Linear, norm: nn.Module, features: Tensor) -> Tensor:
    out: Tensor = norm(fc(features))
    return out


class CompiledDrafter(nn.Module):
    """The training and evaluation forward of a drafter at fixed shapes; wrap this, not the drafter, in DDP.

    Parameters stay fp32; on CUDA the products run in `compute_dtype` under autocast, or in e4m3 (`fp8.fp8_linear`) with
    precision "fp8". Drafting tokens does not come here: `Drafter.draft` runs the plain layers.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        device: torch.device | str,
        row_tokens: int,
        num_anchors: int,
        compute_dtype: torch.dtype | None = None,
        precision: str = "bf16",
        activation_checkpointing: bool = False,
    ) -> None:
        """Move the drafter to `device`; row_tokens is S, num_anchors A; compute_dtype None: bf16 on CUDA, fp32 on CPU.

        activation_checkpointing: a layer keeps its inputs alone and computes the rest again in its backward graph. The
        compiler's partitioner does it: torch.utils.checkpoint around the compiled layer would call it, and its door, from
        autograd's thread.
        Raises InputError for sizes and a precision that the device cannot take. Compiles nothing yet.
        """
        super().__init__()
        self.device = torch.device(device)
        self.drafter = drafter.to(self.device)
        self.row_tokens, self.num_anchors = row_tokens, num_anchors
        self.activation_checkpointing = activation_checkpointing
        self.block_size = drafter.config.block_size
        self.uses_flex = self.device.type == "cuda"
        self.compute_dtype = compute_dtype or (torch.bfloat16 if self.uses_flex else torch.float32)
        self.layer_kinds: list[LayerKind] = [
            (drafter.config.layer_window(i), drafter.config.layer_is_causal(i))
            for i in range(drafter.config.num_hidden_layers)
        ]
        self._warm = self._warming = False
        self._warm_up_seconds = 0.0
        self._graphs_before = self._graphs_after = 0
        self._compiled_layer: Callable[..., Tensor] = _run_layer
        self._compiled_context: Callable[..., Tensor] = _run_context
        self._compiled_last_layer: Callable[..., Tensor] = _run_last_layer
        self._product: Product = F.linear
        if precision == "fp8":
            check_fp8(self.device, (p for p in drafter.layers.parameters() if p.ndim == 2))
            self._product = fp8_linear
        if self.uses_flex:
            self._check_flex_sizes()
            self._compile()
        else:
            self._check_dense_size()

    @property
    def num_noise_tokens(self) -> int:
        return self.num_anchors * self.block_size

    def _check_flex_sizes(self) -> None:
        if self.drafter.config.head_dim < MIN_HEAD_DIM:
            raise InputError(
                f"head_dim of the drafter is {self.drafter.config.head_dim}; flex_attention on a GPU needs at least "
                f"{MIN_HEAD_DIM}."
            )
        if self.row_tokens % TILE:
            raise InputError(
                f"A row has {self.row_tokens} tokens; on a GPU choose a multiple of {TILE}, such as "
                f"{-(-self.row_tokens // TILE) * TILE}."
            )
        if self.num_noise_tokens % TILE:
            step = TILE // math.gcd(TILE, self.block_size)
            raise InputError(
                f"{self.num_anchors} anchors of {self.block_size} tokens make {self.num_noise_tokens} noise tokens; on "
                f"a GPU they must be a multiple of {TILE}: choose a multiple of {step} anchors, such as "
                f"{-(-self.num_anchors // step) * step}."
            )

    def _check_dense_size(self) -> None:
        cells = self.num_noise_tokens * (self.row_tokens + self.num_noise_tokens)
        if cells > MAX_DENSE_CELLS:
            raise InputError(
                f"{self.num_anchors} anchors of {self.block_size} tokens in rows of {self.row_tokens} need a dense "
                f"attention mask of {cells * 4 / 2**30:.1f} GiB on the CPU; at most {MAX_DENSE_CELLS * 4 / 2**30:.1f} "
                "GiB are allowed. Use fewer anchors or shorter rows, or a GPU."
            )

    def _compile(self) -> None:
        forbid_dense_flex()
        # Per-thread settings since torch 2.12; forward and warm-up run in this thread or raise. DDP would cut the
        # graph of a layer at its bucket borders.
        torch._dynamo.config.optimize_ddp = False
        # The share of the activations that a graph may keep for its backward, inputs apart; read when it is compiled.
        torch._functorch.config.activation_memory_budget = 0.0 if self.activation_checkpointing else 1.0
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in torch 2.11
            options["recompile_limit"] = max(2, 2 * len(set(self.layer_kinds)))
        self._compiled_layer = torch.compile(_with_own_code(_run_layer), **options)
        self._compiled_context = torch.compile(_with_own_code(_run_context), **options)
        self._compiled_last_layer = torch.compile(_with_own_code(_run_last_layer), **options)

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        noise: Tensor,
        noise_positions: Tensor,
        start: Tensor,
        anchor: Tensor,
    ) -> Tensor:
        """Final states of all blocks of one row, [Q,H] in compute_dtype; those of slot 0 are zero.

        features [S,F]; context_positions int [S] in their documents; noise [Q,H], frozen embeddings of the blocks'
        tokens, already scaled; noise_positions int [A,K]; start, anchor int32 [A], sorted, dummies last.
        Gradients, or torch.no_grad() for evaluation; inference_mode would be one more graph and is refused.
        """
        self._check_call(features, noise, start, anchor)
        with_gradient = torch.is_grad_enabled()
        masks = {kind: self._mask(kind, start, anchor) for kind in dict.fromkeys(self.layer_kinds)}
        with self._autocast():
            features = features.to(self.compute_dtype)[None]
            context = self._compiled_context(self.drafter.fc, self.drafter.hidden_norm, features)
            positions = torch.cat((context_positions, noise_positions.reshape(-1)))
            cos, sin = self.drafter.rotary(positions[None])
            # The first layer's input requires a gradient as every other layer's does: one graph serves them all.
            states = noise.detach().to(self.compute_dtype)[None].requires_grad_(with_gradient)
            run, run_last = self._compiled_layer, self._compiled_last_layer
            if self.activation_checkpointing and with_gradient and not self.uses_flex:
                run, run_last = (partial(checkpoint, function, use_reentrant=False) for function in (run, run_last))
            *layers, last = self.drafter.layers
            *kinds, last_kind = self.layer_kinds
            for layer, kind in zip(layers, kinds, strict=True):
                states = run(layer, states, context, cos, sin, masks[kind], self._product)
            norm = self.drafter.norm
            out = run_last(last, norm, self.block_size, states, context, cos, sin, masks[last_kind], self._product)
            return out[0]

    def _check_call(self, features: Tensor, noise: Tensor, start: Tensor, anchor: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"The compiled drafter was called in thread {threading.current_thread().name!r}; torch's compiler is "
                "not thread-safe, so call it in the main thread of one process per GPU."
            )
        if torch.is_inference_mode_enabled():
            raise RuntimeError("The compiled drafter was called in inference_mode; use torch.no_grad().")
        found = (features.shape[0], noise.shape[0], start.shape[0], anchor.shape[0])
        wanted = (self.row_tokens, self.num_noise_tokens, self.num_anchors, self.num_anchors)
        if found != wanted:
            raise ValueError(
                f"The drafter is compiled for (S, Q, A, A) = {wanted} but got features, noise, start and anchor of "
                f"lengths {found}; pad the row."
            )
        if start.dtype != torch.int32 or anchor.dtype != torch.int32:
            raise ValueError(f"start and anchor are {start.dtype} and {anchor.dtype}; they must be int32.")
        if self.uses_flex and not (self._warm or self._warming):
            raise RuntimeError("The drafter has not been warmed up; call warm_up before the first step.")

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return torch.autocast(self.device.type, enabled=False)
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    @torch.no_grad()
    def _mask(self, kind: LayerKind, start: Tensor, anchor: Tensor) -> Any:
        """A BlockMask, or on the CPU a function that attends under the dense mask."""
        shape = (self.row_tokens, self.block_size, *kind)
        if self.uses_flex:
            from dflash_train.stage2_drafter.mask_kernel import fused_block_mask

            return fused_block_mask(start, anchor, *shape)
        return _dense_attend(dense_block_mask(start, anchor, *shape))

    def expected_graphs(self, *, evaluation: bool) -> int:
        """Graphs that warm-up must make: context, last layer, one a kind of the other layers, all twice with evaluation."""
        if not self.uses_flex:
            return 0
        return (len(set(self.layer_kinds[:-1])) + 2) * (2 if evaluation else 1)

    def warm_up(self, step: Callable[[], object], evaluate: Callable[[], object] | None = None) -> None:
        """Compile everything by one whole training step (forward and backward) and one evaluation step; then forbid it.

        `step` must leave the weights alone (no optimizer); its gradients are dropped here. `evaluate` runs under
        torch.no_grad(). Raises RuntimeError if a weight changed or another number of graphs than expected was made.
        """
        parameters = list(self.drafter.parameters())
        versions = [parameter._version for parameter in parameters]
        started = time.perf_counter()
        self._graphs_before = compiled_graphs()
        self._warming = True
        try:
            step()
            if all(parameter.grad is None for parameter in parameters if parameter.requires_grad):
                raise RuntimeError("The warm-up step left no gradient; it must run forward and backward.")
            if evaluate is not None:
                with torch.no_grad():
                    evaluate()
        finally:
            self._warming = False
            for parameter in parameters:
                parameter.grad = None
        if self.uses_flex:
            torch.cuda.synchronize(self.device)
        self._warm_up_seconds = time.perf_counter() - started
        if versions != [parameter._version for parameter in parameters]:
            raise RuntimeError("The warm-up changed a weight; it must not call the optimizer.")
        self._graphs_after = compiled_graphs()
        made, expected = self._graphs_after - self._graphs_before, self.expected_graphs(evaluation=evaluate is not None)
        if made != expected:
            raise RuntimeError(
                f"Warm-up compiled {made} graphs where {expected} were expected: {_compile_reasons()}. "
                "Something beside the drafter was compiled, or its layers do not share their code."
            )
        self._warm = True
        if self.uses_flex:
            torch.compiler.set_stance("fail_on_recompile")
        log.info(self.summary())

    def recompilations(self) -> int:
        """Graphs made since warm-up ended, anywhere in this process."""
        return compiled_graphs() - self._graphs_after if self._warm and self.uses_flex else 0

    def summary(self) -> str:
        """«compiled 3 graphs in 18 s»; on the CPU, that nothing is compiled."""
        if not self.uses_flex:
            return "dense attention in fp32 on the CPU, nothing compiled: for tests and small runs"
        if not self._warm:
            return "not compiled yet"
        return f"compiled {self._graphs_after - self._graphs_before} graphs in {self._warm_up_seconds:.0f} s"

    def closing_line(self, steps: int) -> str | None:
        """«compiled 3 graphs in 18 s, 0 recompilations in 400 steps», counted now; None where nothing was compiled."""
        if not (self.uses_flex and self._warm):
            return None
        again = format_count(self.recompilations(), "recompilation")
        return f"{self.summary()}, {again} in {format_count(steps, 'step')}"

    def close(self) -> None:
        """Let this process compile again (tests; a run keeps the stance until it ends)."""
        if self.uses_flex and self._warm:
            torch.compiler.set_stance("default")
        self._warm = False


def _dense_attend(mask: Tensor) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with a code object of its own, by which Dynamo keeps graphs.

    Otherwise two drafters in one process, such as bf16 and fp8 in a benchmark, would share some and count too few.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    own.__annotations__ = function.__annotations__
    return own


def _compile_reasons() -> str:
    """What was compiled, newest last, from torch's own records."""
    from torch._dynamo.utils import get_compilation_metrics

    records = []
    for record in get_compilation_metrics():
        reason = (getattr(record, "recompile_reason", None) or "first time").splitlines()[0].strip()
        if getattr(record, "co_name", None):
            records.append(f"{record.co_name} ({reason})")
    return "; ".join(records[-8:]) or "no record"
