"""The target's decoder layers compiled: the same states in less time, with every graph known before the first batch.

Norms, rotary embedding, gate and residual sums of a layer become a few fused kernels (random Qwen3-8B, bf16, one H200, 8
x 2048 tokens: 38.9 K tokens/s against 33.4 K). One function runs every layer, the layer being an argument, so layers of
one kind share a graph; sizes are symbolic, so batches need no buckets and no more padding than without. Two graphs a
kind: torch treats a batch of one row as a constant. Warm-up runs both in the main thread, and shapes unlike those they
were traced with; then nothing is ever compiled again: a batch that has no graph runs uncompiled, and the log says so.

Off by default: it takes 6 to 20 s at the start of every worker (8B, one H200), which pays from a million or two of tokens
a GPU on, and rounds differently: states differ from the uncompiled ones by bfloat16 noise.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch

from dflash_train.stage1_target.target import Target

logger = logging.getLogger(__name__)

WARM_UP_ROWS = 6
"""Rows of the batch that is traced: any number but 1, which torch takes for a constant."""
SMALLEST = 9
"""Fewest tokens of its rows; a target that has no memory for these runs uncompiled."""


def compile_layers(target: Target, batch_tokens: int, max_tokens: int, backend: str = "inductor") -> int:
    """Compile the layers up to the last tap and warm them up; return the number of graphs, 0 if it could not be done.

    A target whose layers cannot be traced whole, or that is spread over devices by hooks, goes on uncompiled, and the
    log says why.
    """
    layers = list(target.layers)[: target.target_layer_ids[-1] + 1]
    if any(hasattr(layer, "_hf_hook") for layer in layers):
        logger.warning("The target's layers lie on several devices; they run uncompiled.")
        return 0
    compiled = torch.compile(_run_layer, fullgraph=True, dynamic=True, backend=backend)
    began, before = time.perf_counter(), _num_graphs()
    shapes: set[tuple[int, ...]] = set()  # that have no graph
    for layer in layers:
        layer.forward = partial(_run_compiled, compiled, shapes, layer)
    num_tokens = max(SMALLEST, min(max_tokens, batch_tokens // WARM_UP_ROWS))
    try:
        while not _warm_up(target, num_tokens):
            num_tokens = max(SMALLEST, num_tokens // 2)
    except Exception as error:  # noqa: BLE001 - what a compiler raises has as many types as it has parts
        for layer in layers:
            del layer.forward
        torch.compiler.reset()
        reason = " ".join(str(error).split())[:300]
        logger.warning("The target could not be compiled and runs uncompiled: %s: %s", type(error).__name__, reason)
        return 0
    num_graphs = _num_graphs() - before
    logger.info(
        "Compiled %d graphs for %d layers of the target in %.0f s; nothing is compiled from here on.",
        num_graphs,
        len(layers),
        time.perf_counter() - began,
    )
    torch.compiler.set_stance("fail_on_recompile")
    return num_graphs


def _warm_up(target: Target, num_tokens: int) -> bool:
    """Run batches of several rows and of one; False where memory did not suffice. Raises what tracing raises."""
    # the first of each kind is traced, the others, unlike it, show whether its graph is good for all shapes
    try:
        for rows, tokens in ((WARM_UP_ROWS, num_tokens - 1), (2, 8), (1, num_tokens), (1, 5), (3, 7)):
            target.run_taps(torch.zeros((rows, tokens), dtype=torch.int64), lambda _layer, _states: None)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
    except torch.OutOfMemoryError:
        if num_tokens == SMALLEST:
            raise
    else:
        return True
    torch.cuda.empty_cache()
    return False


def _run_compiled(compiled: Any, shapes: set[tuple[int, ...]], layer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run a layer by its graph; uncompiled, with a warning the first time, where torch would have to make another."""
    try:
        return compiled(layer, *arguments, **keywords)
    except RuntimeError as error:
        if "recompile" not in str(error):
            raise
    states = arguments[0] if arguments else keywords["hidden_states"]
    shape = tuple(states.shape)
    if shape not in shapes:
        shapes.add(shape)
        logger.warning("No graph fits states %s, %s; such batches run uncompiled.", list(shape), states.dtype)
    return _run_layer(layer, *arguments, **keywords)


def _run_layer(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    return type(layer).forward(layer, *arguments, **keywords)


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
