"""What can be said about compiled.py without a GPU: the CPU path, the number of graphs.

flex_attention has no backward on the CPU; where gradients are needed its device check is neutralised and the backend is
aot_eager, which computes densely. test_compiled_gpu.py has the real kernels.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from dflash_train.errors import InputError
from dflash_train.stage2_drafter import compiled as compiled_module
from dflash_train.stage2_drafter.compiled import CompiledDrafter, compiled_graphs
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.flex_door import flex_attention_door, forbid_dense_flex

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

SLIDING = {"layer_types": ("sliding_attention", "full_attention", "full_attention"), "sliding_window": 6}
S, A = 128, 32


@pytest.fixture
def make_compiled(make_config: Any) -> Any:
    def make(row_tokens: int = S, num_anchors: int = A, activation_checkpointing: bool = False, **changes: Any) -> Any:
        drafter = Drafter(make_config(initializer_range=0.1, **changes), seed=2)
        return CompiledDrafter(
            drafter,
            device="cpu",
            row_tokens=row_tokens,
            num_anchors=num_anchors,
            activation_checkpointing=activation_checkpointing,
        )

    return make


@pytest.fixture
def rows(make_config: Any, make_row: Any) -> Any:
    """Rows of the fixed shape, with other documents and anchors each."""
    config = make_config()
    return [make_row(config, (50, 40 - n, 30 + n), S, A, seed=n) for n in range(4)]


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns a CPU drafter into one that takes the CUDA path, with the given backend; undone afterwards."""
    undo, made = [], []
    monkeypatch.setattr(compiled_module, "forbid_dense_flex", lambda: undo.append(forbid_dense_flex()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    real_compile = torch.compile

    def turn(drafter: Any, backend: Any = "inductor") -> Any:
        def compile_with(function: Any, **options: Any) -> Any:
            return real_compile(function, backend=backend, **options)

        vars(compile_with)["__signature__"] = inspect.signature(real_compile)
        drafter.uses_flex = True
        made.append(drafter)
        if str(backend).startswith("aot_eager"):
            monkeypatch.setattr(compiled_module, "forbid_dense_flex", lambda: None)
            monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(torch, "compile", compile_with)
        drafter._compile()
        monkeypatch.setattr(torch, "compile", real_compile)
        return drafter

    torch._dynamo.reset()
    yield turn
    for drafter in made:
        drafter.close()
    torch._functorch.config.activation_memory_budget = 1.0
    for function in undo:
        function()
    torch._dynamo.reset()


# --- the CPU path ------------------------------------------------------------------------------------------------


def test_cpu_path_is_dense_and_says_so(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    assert compiled.compute_dtype == torch.float32
    assert compiled.expected_graphs(evaluation=True) == 0
    before = compiled_graphs()
    compiled.warm_up(lambda: compiled(*rows[0].inputs()).square().sum().backward(), lambda: compiled(*rows[1].inputs()))
    assert compiled_graphs() == before and compiled.recompilations() == 0
    assert compiled.summary() == "dense attention in fp32 on the CPU, nothing compiled: for tests and small runs"
    hidden = compiled(*rows[2].inputs())
    assert hidden.shape == (A * 4, 32) and hidden.dtype == torch.float32 and hidden.requires_grad


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 1}, SLIDING | {"is_causal": True}])
def test_all_slots_but_the_first_are_those_of_the_whole_drafter(make_compiled: Any, rows: Any, changes: Any) -> None:
    compiled = make_compiled(**changes)
    features, positions, noise, noise_positions, start, anchor = rows[1].inputs()
    drafter = compiled.drafter
    attends = [compiled._mask(kind, start, anchor) for kind in compiled.layer_kinds]
    places = (positions[None], noise_positions.reshape(1, -1))
    whole = drafter(drafter.project_context(features[None]), noise[None], *places, attends).view(A, 4, 32)
    hidden = compiled(features, positions, noise, noise_positions, start, anchor).view(A, 4, 32)
    torch.testing.assert_close(hidden[:, 1:], whole[:, 1:], atol=1e-6, rtol=1e-5)
    assert not hidden[:, 0].any() and whole[:, 0].any()


def test_cpu_path_refuses_sizes_that_need_gigabytes(make_compiled: Any) -> None:
    with pytest.raises(InputError, match=r"1024 anchors of 4 tokens in rows of 32768 need a dense .* of 0.6 GiB"):
        make_compiled(row_tokens=32768, num_anchors=1024)


def test_frozen_inputs_get_no_gradient(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    features, positions, noise, *rest = rows[0].inputs()
    noise.requires_grad_()
    compiled(features, positions, noise, *rest).sum().backward()
    assert noise.grad is None and features.grad is None
    assert all(parameter.grad is not None for parameter in compiled.drafter.parameters())


def test_warm_up_changes_no_weight_and_leaves_no_gradient(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    before = {name: p.clone() for name, p in compiled.drafter.named_parameters()}
    modes = []

    def evaluate() -> None:
        modes.append(torch.is_grad_enabled())
        assert not compiled(*rows[1].inputs()).requires_grad

    compiled.warm_up(lambda: compiled(*rows[0].inputs()).sum().backward(), evaluate)
    assert modes == [False]
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in compiled.drafter.named_parameters())


def test_warm_up_that_trains_is_refused(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    optimizer = torch.optim.SGD(compiled.drafter.parameters(), lr=0.1)

    def step() -> Any:
        compiled(*rows[0].inputs()).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="changed a weight"):
        compiled.warm_up(step)


def test_warm_up_without_a_backward_is_refused(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    with pytest.raises(RuntimeError, match="left no gradient"):
        compiled.warm_up(lambda: compiled(*rows[0].inputs()))


# --- who may call, with what -------------------------------------------------------------------------------------


def test_other_threads_are_refused(make_compiled: Any, rows: Any) -> None:
    compiled, errors = make_compiled(), []

    def call() -> None:
        try:
            compiled(*rows[0].inputs())
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="loader")
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread 'loader'" in errors[0]


def test_inference_mode_is_refused(make_compiled: Any, rows: Any) -> None:
    inputs = rows[0].inputs()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="use torch.no_grad"):
        make_compiled()(*inputs)


def test_other_shapes_and_types_are_refused(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    features, positions, noise, noise_positions, start, anchor = rows[0].inputs()
    with pytest.raises(ValueError, match=r"compiled for .* = \(128, 128, 32, 32\) but got .* \(127, 128, 32, 32\)"):
        compiled(features[1:], positions[1:], noise, noise_positions, start, anchor)
    with pytest.raises(ValueError, match="start and anchor are torch.int64 and torch.int32"):
        compiled(features, positions, noise, noise_positions, start.long(), anchor)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"row_tokens": 100}, "A row has 100 tokens; on a GPU choose a multiple of 128, such as 128"),
        ({"num_anchors": 33}, "make 132 noise tokens; .* choose a multiple of 32 anchors, such as 64"),
        ({"head_dim": 8}, "head_dim of the drafter is 8; flex_attention on a GPU needs at least 16"),
    ],
)
def test_sizes_that_flex_attention_cannot_tile_are_refused(make_compiled: Any, sizes: Any, message: str) -> None:
    compiled = make_compiled(**sizes)
    with pytest.raises(InputError, match=message):
        compiled._check_flex_sizes()


def test_the_first_step_needs_a_warm_up(make_compiled: Any, rows: Any) -> None:
    compiled = make_compiled()
    compiled.uses_flex = True
    with pytest.raises(RuntimeError, match="call warm_up before"):
        compiled(*rows[0].inputs())


FORBIDDEN = r"Detected recompile when torch\.compile stance is 'fail_on_recompile'"

# --- the compiled path -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, graphs", [({}, 6), (SLIDING, 8), ({"is_causal": True}, 6)])
def test_one_graph_serves_all_layers_of_a_kind_and_new_anchors_make_none(
    make_compiled: Any, rows: Any, flex_on_cpu: Any, changes: Any, graphs: int
) -> None:
    dense = make_compiled(**changes)
    compiled = flex_on_cpu(make_compiled(**changes), backend="aot_eager")
    weights = torch.randn(A * 4, 32, generator=torch.Generator().manual_seed(0))

    def step(drafter: Any, row: Any) -> Any:
        hidden = drafter(*row.inputs())
        (hidden * weights).sum().backward()
        gradients = [p.grad for p in drafter.drafter.parameters()]
        drafter.drafter.zero_grad()
        return hidden.detach(), gradients

    def warm_step() -> None:
        (compiled(*rows[0].inputs()) * weights).sum().backward()

    assert compiled.expected_graphs(evaluation=True) == graphs
    compiled.warm_up(warm_step, lambda: compiled(*rows[0].inputs()))
    for row in rows:
        hidden, gradients = step(compiled, row)
        expected, expected_gradients = step(dense, row)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            assert (gradient - wanted).norm() <= 2e-6 * wanted.norm() + 1e-6
        with torch.no_grad():
            compiled(*row.inputs())
    assert compiled.summary().startswith(f"compiled {graphs} graphs in ")
    assert compiled.closing_line(8) == f"{compiled.summary()}, 0 recompilations in 8 steps"
    torch.compiler.set_stance("default")
    torch.compile(lambda x: x + 3, backend="aot_eager")(torch.ones(2))
    assert compiled.closing_line(1) == f"{compiled.summary()}, 1 recompilation in 1 step"
    torch.compiler.set_stance("fail_on_recompile")
    with pytest.raises(RuntimeError, match=FORBIDDEN):
        torch.compile(lambda x: x + 2, backend="aot_eager")(torch.ones(2))


@pytest.mark.parametrize("evaluates", [False, True])
def test_evaluation_before_training_is_refused_before_the_warm_up_and_compiles_nothing_after_it(
    make_compiled: Any, rows: Any, flex_on_cpu: Any, evaluates: bool
) -> None:
    """Under no_grad a drafter has graphs of its own: made at warm-up, or not at all."""
    compiled = flex_on_cpu(make_compiled(num_hidden_layers=1), backend="aot_eager")
    graphs = compiled_graphs()
    with torch.no_grad(), pytest.raises(RuntimeError, match="call warm_up before"):
        compiled(*rows[0].inputs())
    assert compiled_graphs() == graphs

    def evaluate() -> Tensor:
        hidden: Tensor = compiled(*rows[2].inputs())
        return hidden

    compiled.warm_up(lambda: compiled(*rows[0].inputs()).sum().backward(), evaluate if evaluates else None)
    with torch.no_grad():  # the first call after the warm-up, as the evaluation at step 0 is
        if evaluates:
            assert not evaluate().requires_grad
        else:
            with pytest.raises(RuntimeError, match=FORBIDDEN):
                evaluate()
    compiled(*rows[1].inputs()).sum().backward()
    assert compiled.recompilations() == 0


def kept_for_backward(compiled: Any, row: Any) -> tuple[int, Tensor, list[Tensor]]:
    """One step: bytes of activations that autograd keeps, parameters and inputs apart; output and gradients."""
    kept: dict[int, int] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in compiled.drafter.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = compiled(*row.inputs())
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = [parameter.grad for parameter in compiled.drafter.parameters()]
    compiled.drafter.zero_grad()
    return sum(kept.values()), hidden.detach(), gradients


def test_checkpointed_layers_give_the_same_gradients_and_keep_less(make_compiled: Any, rows: Any) -> None:
    plain, checkpointed = (make_compiled(activation_checkpointing=given) for given in (False, True))
    much, hidden, gradients = kept_for_backward(plain, rows[1])
    little, same_hidden, same_gradients = kept_for_backward(checkpointed, rows[1])
    assert torch.equal(hidden, same_hidden)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
    assert little < much / 3


def test_compiled_layers_are_checkpointed_inside_their_graphs(make_compiled: Any, rows: Any, flex_on_cpu: Any) -> None:
    results = []
    for given in (False, True):
        torch._dynamo.reset()
        compiled = flex_on_cpu(make_compiled(activation_checkpointing=given), backend="aot_eager_decomp_partition")
        compiled.warm_up(lambda drafter=compiled: drafter(*rows[0].inputs()).sum().backward())
        results.append(kept_for_backward(compiled, rows[1]))
        assert compiled.recompilations() == 0
        compiled.close()
    (much, hidden, gradients), (little, same_hidden, same_gradients) = results
    torch.testing.assert_close(same_hidden, hidden, atol=1e-6, rtol=1e-6)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        assert (gradient - same).norm() <= 2e-6 * gradient.norm() + 1e-6
    assert little < much / 2


def test_training_shuts_the_second_lock_too(make_compiled: Any, flex_on_cpu: Any) -> None:
    """Behind the door, which only tells whether something traces: test_flex_door.py has both locks alone."""
    q, k = torch.randn(1, 2, 16, 16), torch.randn(1, 1, 32, 16)
    mask = flex_module.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 32, device="cpu")
    flex_on_cpu(make_compiled())
    with pytest.raises(RuntimeError, match="about to run dense, .* compiled with a backend that does not fuse it"):
        torch.compile(flex_attention_door, backend="aot_eager", fullgraph=True)(q, k, k, mask)


def test_a_graph_too_few_is_refused(
    make_compiled: Any, rows: Any, flex_on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier drafter compiled is not counted, and may be of another precision."""
    monkeypatch.setattr(compiled_module, "_with_own_code", lambda function: function)
    warm_up(flex_on_cpu(make_compiled(num_hidden_layers=1), backend="aot_eager"), rows[0])
    torch.compiler.set_stance("default")
    second = flex_on_cpu(make_compiled(num_hidden_layers=1), backend="aot_eager")
    with pytest.raises(RuntimeError, match="compiled 0 graphs where 2 were expected"):
        warm_up(second, rows[0])


def test_drafters_of_one_process_share_no_graph(make_compiled: Any, rows: Any, flex_on_cpu: Any) -> None:
    for _ in range(2):  # of the same shapes, which is as alike as bf16 and fp8 are
        compiled = flex_on_cpu(make_compiled(), backend="aot_eager")
        compiled.warm_up(lambda drafter=compiled: drafter(*rows[0].inputs()).sum().backward())
        assert compiled.recompilations() == 0
        torch.compiler.set_stance("default")


DENSE = "flex_attention was about to run dense, .* called without being compiled.* unset TORCHDYNAMO_DISABLE"


def warm_up(compiled: Any, row: Any) -> None:
    compiled.warm_up(lambda: compiled(*row.inputs()).sum().backward())


def test_drafter_is_refused_where_torch_runs_eager(make_compiled: Any, rows: Any, flex_on_cpu: Any) -> None:
    """Before the warm-up, and in mid-run, where the graphs are there and are not used."""
    compiled = flex_on_cpu(make_compiled(num_hidden_layers=1), backend="aot_eager")
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=DENSE):
        warm_up(compiled, rows[0])
    assert not compiled._warm and all(parameter.grad is None for parameter in compiled.parameters())
    warm_up(compiled, rows[0])
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=DENSE):
        compiled(*rows[1].inputs())
    compiled(*rows[1].inputs()).sum().backward()
    assert compiled.recompilations() == 0


def test_drafter_is_refused_in_a_process_without_dynamo(
    make_compiled: Any, rows: Any, flex_on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    compiled = flex_on_cpu(make_compiled())
    with pytest.raises(RuntimeError, match=DENSE):
        warm_up(compiled, rows[0])


def test_drafter_is_refused_where_compiling_fails_and_the_failure_is_suppressed(
    make_compiled: Any, rows: Any, flex_on_cpu: Any
) -> None:
    """The whole graph or none: torch says what failed; without that, the door would refuse the eager code."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("this backend cannot")

    compiled = flex_on_cpu(make_compiled(), backend=broken)
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(Exception, match="this backend cannot"):
        warm_up(compiled, rows[0])


def test_a_graph_too_many_is_named(make_compiled: Any, rows: Any, flex_on_cpu: Any) -> None:
    compiled = flex_on_cpu(make_compiled(num_hidden_layers=1), backend="aot_eager")
    extra = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)

    def step() -> Any:
        extra(torch.ones(3))
        compiled(*rows[0].inputs()).sum().backward()

    with pytest.raises(RuntimeError, match=r"compiled 3 graphs where 2 were expected: .*_run_last_layer"):
        compiled.warm_up(step)


@pytest.mark.slow
def test_inductor_forward_equals_the_dense_mask_with_both_locks_on(
    make_compiled: Any, rows: Any, flex_on_cpu: Any
) -> None:
    """The real fused kernel, as far as the CPU has one: forward only."""
    dense = make_compiled(**SLIDING)
    compiled = flex_on_cpu(make_compiled(**SLIDING))
    for drafter in (dense, compiled):
        drafter.drafter.requires_grad_(False)
    compiled._warming = True
    with torch.no_grad():
        for row in rows:
            torch.testing.assert_close(compiled(*row.inputs()), dense(*row.inputs()), atol=2e-5, rtol=1e-5)
