"""The one door to flex_attention, and the locks that keep it from running dense.

flex_attention computes a dense attention matrix, silently, whenever it is not compiled (276 GB at our sizes, and the end
of the run that this project replaces). Two locks stand before that: `flex_attention_door` raises unless it is being
traced, which catches every way back to eager code; `forbid_dense_flex` replaces the operator's dense kernels, which
catches the backends `eager` and `aot_eager`, where tracing does happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_DENSE_FLEX = (
    "flex_attention was about to run dense, with the whole attention matrix in memory: it was {how}. "
    "Nothing may do that; unset TORCHDYNAMO_DISABLE and keep torch.compile's backend at inductor."
)


def flex_attention_door(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """The only way to flex_attention: raises RuntimeError unless torch.compile is tracing it.

    Traced, the test is a constant and costs nothing; in every fallback to eager code it really runs.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(_DENSE_FLEX.format(how="called without being compiled"))
    out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def forbid_dense_flex() -> Callable[[], None]:
    """Replace flex_attention's dense kernels by one that raises, in this process; returns the undo.

    Compiled CUDA and CPU kernels do not go through them. They are private to torch, so a version that moved them is
    refused: a lock that is silently absent is worse than none.
    """
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention as forward_operator
    from torch._higher_order_ops.flex_attention import flex_attention_backward as backward_operator

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(_DENSE_FLEX.format(how="compiled with a backend that does not fuse it"))

    operators: list[Any] = [forward_operator, backward_operator]
    key: Any = DispatchKey.CompositeExplicitAutograd
    saved: list[Any] = []
    for operator in operators:
        if key not in getattr(operator, "py_kernels", {}):
            raise RuntimeError(
                f"torch {torch.__version__} keeps flex_attention's dense kernels elsewhere than 2.11 to 2.13 do, so "
                "they cannot be locked; use one of those versions."
            )
        saved.append(operator.py_kernels[key])
    for operator in operators:
        operator.py_kernels[key] = refuse
        getattr(operator, "_dispatch_cache", {}).clear()  # may remember the dense kernel from an earlier eager call

    def undo() -> None:
        for operator, kernel in zip(operators, saved, strict=True):
            operator.py_kernels[key] = kernel
            getattr(operator, "_dispatch_cache", {}).clear()

    return undo
