"""A batch whose states are not those of its samples alone stops the run; rounding does not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.extract import ExtractConfig, extract
from dflash_train.stage1_target.forward import pad_right
from dflash_train.stage1_target.samples import DataConfig
from dflash_train.stage1_target.self_check import NUM_COPIES, SelfCheck, has_experts, limits, self_check
from dflash_train.stage1_target.target import Target, load_target
from dflash_train.stage1_target.target_config import TargetConfig

torch.set_num_threads(1)
SCALE = torch.linspace(0.5, 2.0, 2 * 32)


def load(folder: Path, dtype: str = "float32") -> Target:
    return load_target(TargetConfig(name=str(folder), dtype=dtype), (1, 2), "cpu")


def ragged(lengths: tuple[int, ...] = (50, 41, 33, 17)) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 300, length).astype(np.int32) for length in lengths]


def check(target: Target, samples: list[Any], batch_states: Any = None) -> SelfCheck:
    result = self_check(target, samples, SCALE, pad_right, batch_states)
    assert result is not None
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixture_of_experts", "linear_attention", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_target_passes(tiny_target: Callable[..., Path], kind: str, dtype: str) -> None:
    target = load(tiny_target(kind), dtype)
    result = check(target, ragged())
    result.stop_if_wrong()
    assert (result.num_samples, result.num_rows, len(result.found)) == (3, 4, 2)
    assert has_experts(target) == (kind in ("mixture_of_experts", "linear_attention"))
    assert str(result).startswith("layer ")


def test_no_rounding_at_all_passes_by_the_floor(tiny_target: Callable[..., Path]) -> None:
    result = check(load(tiny_target("llama")), ragged((9, 9)))
    assert max(result.found) < 1e-5 and set(result.allowed) == {1e-4}
    result.stop_if_wrong()


def test_single_tokens_are_left_out(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))
    assert check(target, ragged((9, 1, 1))).num_samples == 1
    assert self_check(target, ragged((1, 1)), SCALE, pad_right) is None


def test_a_few_tokens_that_take_another_expert_pass(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("mixture_of_experts"))

    def flipped(token_ids: torch.Tensor) -> torch.Tensor:
        states = target.hidden_states(token_ids)
        states[:, ::4] *= 1.3  # every fourth token
        return states

    check(target, ragged(), flipped).stop_if_wrong()


@pytest.mark.parametrize(("kind", "passes"), [("mixture_of_experts", True), ("llama", False)])
def test_with_experts_the_median_may_go_as_far_as_nine_tenths_of_the_tokens_of_unpadded_runs(
    tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str, passes: bool
) -> None:
    """Where a fifth of the tokens take another expert between two unpadded runs, most of a batch may differ by less."""
    target = load(tiny_target(kind))
    honest = Target.hidden_states

    def flipped(self: Target, token_ids: torch.Tensor) -> torch.Tensor:
        states = honest(self, token_ids)
        if len(states) == NUM_COPIES:
            states[:, ::5] *= 1.3
        elif len(states) > 1:
            states[:, ::4] *= 1.2
            states[:, 1::4] *= 1.2
            states[:, 2::4] *= 1.2
        return states

    monkeypatch.setattr(Target, "hidden_states", flipped)
    result = check(target, ragged())
    assert min(result.found) == pytest.approx(0.2, rel=0.05)
    if passes:
        result.stop_if_wrong()
        assert max(result.allowed) == pytest.approx(0.3, rel=0.05)
    else:
        with pytest.raises(InputError, match="depend on the batch"):
            result.stop_if_wrong()


def row_alone(states: Any) -> Any:
    """A target whose batches mix rows: each row gets a little of the one before."""
    return 0.9 * states + 0.1 * states.roll(1, dims=0)


def all_tokens_seen(states: Any) -> Any:
    """A target whose tokens see what comes after them, padding too."""
    return states + 0.3 * states.mean(dim=1, keepdim=True)


def scaled_by_batch(states: Any) -> Any:
    """A target that is wrong for every batch size but one, padded or not."""
    return states * (1.0 if len(states) == 1 else 1.5)


def later_rows_wrong(states: Any) -> Any:
    return torch.cat([states[:1], 1.3 * states[1:]])


@pytest.mark.parametrize("spoil", [row_alone, all_tokens_seen, scaled_by_batch, later_rows_wrong])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_wrong_for_batches_is_stopped(
    tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, spoil: Any, dtype: str
) -> None:
    target = load(tiny_target("llama"), dtype)
    honest = Target.hidden_states
    monkeypatch.setattr(Target, "hidden_states", lambda self, ids: spoil(honest(self, ids)))
    with pytest.raises(InputError, match=r"in layer [12], 3 samples in a padded batch of 4 differ by .* is allowed"):
        check(target, ragged()).stop_if_wrong()


@pytest.mark.parametrize("spoil", [row_alone, all_tokens_seen, later_rows_wrong])
def test_a_target_with_experts_that_is_wrong_for_batches_is_stopped(
    tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    target = load(tiny_target("mixture_of_experts"))
    honest = Target.hidden_states
    monkeypatch.setattr(Target, "hidden_states", lambda self, ids: spoil(honest(self, ids)))
    with pytest.raises(InputError, match="depend on the batch"):
        check(target, ragged()).stop_if_wrong()


def test_left_padding_is_stopped(tiny_target: Callable[..., Path]) -> None:
    """The rows as another trainer would lay them out, read as if they began at the left."""
    target = load(tiny_target("llama"))

    def padded_left(token_ids: torch.Tensor) -> torch.Tensor:
        moved = [row.roll(int((row == 0).sum())) for row in token_ids]
        states = target.hidden_states(torch.stack(moved))
        return torch.stack([s.roll(-int((row == 0).sum()), dims=0) for s, row in zip(states, token_ids, strict=True)])

    with pytest.raises(InputError, match="depend on the batch"):
        check(target, ragged(), padded_left).stop_if_wrong()


def test_states_finite_in_a_batch_alone_are_stopped(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))

    def overflowing(token_ids: torch.Tensor) -> torch.Tensor:
        states = target.hidden_states(token_ids)
        states[:, 3:, 40] = torch.inf
        return states

    with pytest.raises(InputError, match="in layer 2, .* differ by inf"):
        check(target, ragged(), overflowing).stop_if_wrong()


def test_a_target_that_is_never_finite_is_left_to_quarantine(
    tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(tiny_target("llama"))
    monkeypatch.setattr(Target, "hidden_states", lambda self, ids: torch.full((*ids.shape, 64), torch.nan))
    check(target, ragged()).stop_if_wrong()


def test_a_batch_too_large_for_the_memory_is_checked_in_part(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))

    def small(token_ids: torch.Tensor) -> torch.Tensor:
        if len(token_ids) > 2:
            raise torch.OutOfMemoryError
        return target.hidden_states(token_ids)

    assert check(target, ragged(), small).num_rows == 2

    def none(token_ids: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    assert self_check(target, ragged(), SCALE, pad_right, none) is None


def test_an_error_counts_in_units_of_its_channels_scale(tiny_target: Callable[..., Path]) -> None:
    """What is much of a channel of ones is nothing of one that is 10,000 everywhere."""
    target, channel = load(tiny_target("llama")), 40  # of the second tapped layer

    def one_channel_off(token_ids: torch.Tensor) -> torch.Tensor:
        states = target.hidden_states(token_ids)
        states[..., channel] += 1.0
        return states

    ones = torch.ones(2 * 32)
    large = ones.index_fill(0, torch.tensor([channel]), 1e4)
    seen, unseen = (self_check(target, ragged(), scale, pad_right, one_channel_off) for scale in (ones, large))
    assert seen is not None and unseen is not None
    assert seen.found[1] > 0.1 and unseen.found[1] < 1e-3
    assert seen.found[0] == pytest.approx(unseen.found[0]), "the other layer is as it was"
    unseen.stop_if_wrong()


def test_limits_follow_the_dtype(tiny_target: Callable[..., Path]) -> None:
    target = load(tiny_target("llama"))
    assert limits(target, routed=False) == (1e-4, 0.01) and limits(target, routed=True) == (1e-4, 0.5)
    assert limits(load(tiny_target("llama"), "bfloat16"), routed=False) == (4 / 128, 0.25)


BROKEN_MODEL = """
import torch
from transformers import LlamaForCausalLM


class BrokenForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].register_forward_hook(self.mix)

    @staticmethod
    def mix(_module, _arguments, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        mixed = states + 0.2 * states.mean(1, keepdim=True) * (len(states) > 1)
        return mixed if isinstance(output, torch.Tensor) else (mixed, *output[1:])
"""


def test_an_extract_of_a_broken_target_stores_nothing(
    tiny_target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # read by the worker, where the code is imported
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in tiny_target("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "modeling_broken.py").write_text(BROKEN_MODEL)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_broken.BrokenForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    data = tmp_path / "rows.jsonl"
    rows = [
        [{"role": "user", "content": f"one {n}"}, {"role": "assistant", "content": "two " * n}] for n in range(1, 9)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    wanted = ExtractConfig(
        target=TargetConfig(name=str(folder), trust_remote_code=True),
        data=DataConfig(source=str(data)),
        store=tmp_path / "store",
        devices="cpu",
        num_taps=2,
        sample_cache=tmp_path / "cache",
    )
    with pytest.raises(InputError, match=r"in layer [12], .* with --batch-tokens 1"):
        extract(wanted)
    assert isinstance(wanted.store, Path) and not wanted.store.exists(), "its channel scale would be of wrong states"
    result = extract(replace(wanted, batch_tokens=1))
    assert (result.outcome, result.num_stored) == ("finished", 8)
