"""flex_attention never runs dense: every way back to eager code, and every backend that does not fuse, raises."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from dflash_train.stage2_drafter.blocks import block_mask_mod
from dflash_train.stage2_drafter.flex_door import flex_attention_door, forbid_dense_flex

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def tiny_attention() -> Any:
    start, anchor = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    mask = flex_module.create_block_mask(block_mask_mod(start, anchor, 16, 4), None, None, 16, 32, device="cpu")
    q, k = torch.randn(1, 2, 16, 16), torch.randn(1, 1, 32, 16)
    return q, k, k.clone(), mask


def test_door_is_shut_for_eager_calls_and_for_every_way_back_to_eager_code() -> None:
    inputs = tiny_attention()
    with pytest.raises(RuntimeError, match="called without being compiled"):
        flex_attention_door(*inputs)
    compiled = torch.compile(flex_attention_door, fullgraph=True, dynamic=False)
    for stance in ("force_eager", "eager_on_recompile"):
        with torch.compiler.set_stance(stance), pytest.raises(RuntimeError, match="called without being compiled"):
            compiled(*inputs)


def test_door_is_shut_where_compiling_fails_and_the_failure_is_suppressed() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("this backend cannot")

    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(RuntimeError, match="without being compiled"):
        torch.compile(flex_attention_door, backend=broken, dynamic=False)(*tiny_attention())
    torch._dynamo.reset()


def test_door_is_shut_at_the_recompile_limit() -> None:
    """torch's default there is eager code with one line in a log; ours raises, with or without fullgraph."""
    torch._dynamo.reset()
    q, k, v, mask = tiny_attention()
    with torch._dynamo.config.patch(recompile_limit=1):
        for fullgraph, message in ((True, "Hard failure due to fullgraph"), (False, "called without being compiled")):
            compiled = torch.compile(flex_attention_door, backend="aot_eager", dynamic=False, fullgraph=fullgraph)
            compiled(q, k, v, mask)
            with pytest.raises(Exception, match=message):
                compiled(torch.randn(1, 4, 16, 16), k, v, mask)
            torch._dynamo.reset()


def test_door_is_shut_in_a_process_without_dynamo() -> None:
    script = (
        "import torch; from dflash_train.stage2_drafter.flex_door import flex_attention_door as door\n"
        "x = torch.randn(1, 1, 16, 16)\n"
        "torch.compile(door, fullgraph=True, dynamic=False)(x, x, x, None)"
    )
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "RuntimeError: flex_attention was about to run dense" in done.stderr
    assert "unset TORCHDYNAMO_DISABLE" in done.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_lock_stops_backends_that_do_not_fuse(backend: str) -> None:
    q, k, v, mask = inputs = tiny_attention()
    torch._dynamo.reset()
    expected = torch.compile(flex_attention_door, backend=backend, fullgraph=True)(*inputs)  # the danger is real
    undo = forbid_dense_flex()
    try:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="compiled with a backend that does not fuse it"):
            torch.compile(flex_attention_door, backend=backend, fullgraph=True)(*inputs)
        with pytest.raises(Exception, match="about to run dense"):
            flex_module.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    finally:
        undo()
    torch._dynamo.reset()
    again = torch.compile(flex_attention_door, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(again, expected)
    torch._dynamo.reset()
