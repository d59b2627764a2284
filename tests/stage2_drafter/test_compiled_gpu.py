"""flex_attention as it trains: Triton forward and backward, graphs, recompilations. About a minute on one H200."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from dflash_train.stage2_drafter.blocks import block_mask, dense_block_mask
from dflash_train.stage2_drafter.compiled import CompiledDrafter, compiled_graphs
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.flex_door import flex_attention_door

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("compiler_left_as_found"),
    pytest.mark.filterwarnings("ignore"),  # inductor's advice differs between torch versions
]

S, A = 512, 32
LENGTHS = (300, 3, 1, 170)
GEOMETRY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "block_size": 16,
}
SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 40}


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize(
    "dtype, window, causal, floor", [(torch.float32, 40, True, 2e-6), (torch.bfloat16, None, False, 4e-3)]
)
def test_triton_kernels_match_dense_attention(
    make_config: Any, make_row: Any, dtype: torch.dtype, window: int | None, causal: bool, floor: float
) -> None:
    """Forward and the three gradients against float64, no worse than dense attention in the same type."""
    row = make_row(make_config(**GEOMETRY), LENGTHS, S, A, seed=1)
    row.blocks.anchor[-3:] = row.blocks.start[-3:] = 0  # dummies
    start, anchor = (torch.from_numpy(array).cuda() for array in (row.blocks.start, row.blocks.anchor))
    queries, keys = A * 16, S + A * 16
    dense = dense_block_mask(start, anchor, S, 16, window, causal)
    tiles = block_mask(start, anchor, S, 16, window, causal)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, 64, device="cuda", dtype=dtype, generator=generator)

    inputs = (draw(6, queries), draw(2, keys), draw(2, keys))
    upstream = draw(6, queries)

    def run(attend: Any, dtype: torch.dtype) -> Any:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = attend(*leaves)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)

    door = torch.compile(flex_attention_door, fullgraph=True, dynamic=False)
    exact = run(dense_attention, torch.float64)
    twin = run(dense_attention, dtype)
    fused = run(lambda q, k, v: door(q, k, v, tiles), dtype)
    for name, value, same, reference in zip(("out", "dq", "dk", "dv"), fused, twin, exact, strict=True):
        allowed = max(2 * relative_error(same, reference), floor)
        assert relative_error(value, reference) <= allowed, name


def gradients_of(drafter: Any, row: Any, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = drafter(*row.inputs(str(drafter.device)))
    hidden.float().backward(upstream.to(hidden.device))
    gradients = {name: p.grad.cpu() for name, p in drafter.drafter.named_parameters()}
    drafter.drafter.zero_grad()
    return hidden.detach().float().cpu(), gradients


def make_drafter(config: Any, device: str, compute_dtype: Any = None) -> Any:
    return CompiledDrafter(
        Drafter(config, seed=4), device=device, row_tokens=S, num_anchors=A, compute_dtype=compute_dtype
    )


def test_fp32_drafter_equals_the_cpu_with_one_graph_a_kind_of_layer(make_config: Any, make_row: Any) -> None:
    config = make_config(initializer_range=0.1, **GEOMETRY, **SLIDING)
    rows = [make_row(config, LENGTHS, S, A, seed=n) for n in range(2)]
    compiled, dense = make_drafter(config, "cuda", torch.float32), make_drafter(config, "cpu")
    upstream = torch.randn(A * 16, 128, generator=torch.Generator().manual_seed(0))
    compiled.warm_up(lambda: compiled(*rows[0].inputs("cuda")).backward(upstream.cuda()))
    assert compiled.summary().startswith("compiled 4 graphs in "), "full and sliding, context and last layer"
    for row in rows:
        hidden, gradients = gradients_of(compiled, row, upstream)
        expected, expected_gradients = gradients_of(dense, row, upstream)
        assert relative_error(hidden, expected) < 1e-5
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected_gradients[name]) < 1e-4, name
    assert compiled.recompilations() == 0


def test_bf16_drafter_compiles_its_graphs_and_never_again(make_config: Any, make_row: Any) -> None:
    config = make_config(initializer_range=0.1, **GEOMETRY)
    rows = [make_row(config, (300 - 20 * n, 3, 1, 150 + 9 * n), S, A, seed=n) for n in range(6)]
    rows.append(make_row(config, LENGTHS, S, A, seed=9, supervised=0.0))  # dummies alone
    upstream = torch.randn(A * 16, 128, generator=torch.Generator().manual_seed(0))
    compiled, exact = make_drafter(config, "cuda"), make_drafter(config, "cpu")
    twin = make_drafter(config, "cuda")
    twin.uses_flex = False  # dense attention under the same autocast, nothing compiled
    for name in ("_compiled_context", "_compiled_layer", "_compiled_last_layer"):
        setattr(twin, name, getattr(exact, name))
    assert compiled.compute_dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="call warm_up before"):
        compiled(*rows[0].inputs("cuda"))
    before = {name: p.clone() for name, p in compiled.drafter.named_parameters()}
    compiled.warm_up(
        lambda: compiled(*rows[0].inputs("cuda")).float().backward(upstream.cuda()),
        lambda: compiled(*rows[1].inputs("cuda")),
    )
    graphs = compiled_graphs()
    assert compiled.summary().startswith("compiled 6 graphs in "), (
        "layer, last layer and context, twice with evaluation"
    )
    assert all(torch.equal(before[name], p) for name, p in compiled.drafter.named_parameters())

    for row in rows:
        hidden, gradients = gradients_of(compiled, row, upstream)
        with torch.no_grad():  # another graph, fused otherwise: the same numbers up to rounding
            evaluated = compiled(*row.inputs("cuda")).float().cpu()
        expected, expected_gradients = gradients_of(exact, row, upstream)
        same, same_gradients = gradients_of(twin, row, upstream)
        for states in (hidden, evaluated):
            assert states.isfinite().all()
            assert relative_error(states, expected) <= 2 * relative_error(same, expected) + 1e-3
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, "masters and their gradients stay fp32"
            if row is rows[-1] and name in ("fc.weight", "hidden_norm.weight"):
                assert not gradient.any(), "dummies see no context"
                continue
            wanted = expected_gradients[name]
            allowed = 2 * relative_error(same_gradients[name], wanted) + 1e-3
            assert relative_error(gradient, wanted) <= allowed, name
    assert compiled_graphs() == graphs
    assert (compiled.closing_line(9) or "").endswith(" s, 0 recompilations in 9 steps")

    features, positions, *rest = rows[0].inputs("cuda")
    with pytest.raises(ValueError, match="pad the row"):
        compiled(features[:-128], positions[:-128], *rest)
    with pytest.raises(RuntimeError, match=r"Detected recompile when torch\.compile stance is 'fail_on_recompile'"):
        torch.compile(lambda x: x + 2)(positions)
    q, k = (torch.randn(1, 2, length, 32, device="cuda") for length in (128, 128))
    with (
        torch.compiler.set_stance("default"),  # which alone would refuse it
        pytest.raises(RuntimeError, match="about to run dense, .* compiled with a backend that does not fuse it"),
    ):
        flex_attention(q, k, k)


def test_checkpointed_layers_keep_less_and_give_the_same_gradients(make_config: Any, make_row: Any) -> None:
    config = make_config(initializer_range=0.1, **GEOMETRY)
    row, results = make_row(config, LENGTHS, S, A, seed=1), []
    inputs = row.inputs("cuda")
    upstream = torch.randn(A * 16, 128, generator=torch.Generator().manual_seed(0)).cuda()

    def step(drafter: Any) -> None:
        drafter(*inputs).float().backward(upstream)

    for given in (False, True):
        torch._dynamo.reset()
        compiled = CompiledDrafter(
            Drafter(config, seed=4), device="cuda", row_tokens=S, num_anchors=A, activation_checkpointing=given
        )
        compiled.warm_up(partial(step, compiled))
        assert compiled.summary().startswith("compiled 3 graphs in "), "layer, last layer and context"
        before = torch.cuda.memory_allocated()
        hidden = compiled(*inputs)
        kept = torch.cuda.memory_allocated() - before
        hidden.float().backward(upstream)
        gradients = {name: p.grad for name, p in compiled.drafter.named_parameters() if p.grad is not None}
        assert compiled.recompilations() == 0
        compiled.close()
        results.append((kept, hidden.detach().float(), gradients))
    (much, hidden, gradients), (little, same_hidden, same_gradients) = results
    assert little < 0.6 * much, f"{little} of {much} bytes kept"
    assert relative_error(same_hidden, hidden) < 4e-3
    for name, gradient in gradients.items():
        assert relative_error(same_gradients[name], gradient) < 1e-2, name
