"""Training measures the real acceptance length: what `dflash evaluate` gives for the checkpoint, with nothing compiled."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.speculate import gap
from dflash_train.speculate.check import CheckConfig, check_drafter
from dflash_train.speculate.decode import plain_decode
from dflash_train.speculate.evaluate import EvaluateConfig, evaluate
from dflash_train.speculate.gap import Evidence
from dflash_train.speculate.replay import ReadAnswer, draft_everywhere
from dflash_train.speculate.training import RealAcceptance, target_config
from dflash_train.stage1_target.conversations import first_turn_group
from dflash_train.stage1_target.identity import build_manifest, frozen_target
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_tokenizer
from dflash_train.stage2_drafter.checkpoint import export_tensors, read_groups, record_evaluation
from dflash_train.stage2_drafter.collectives import Rank
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.preparation import PreparedRun, prepare_run
from dflash_train.stage2_drafter.rank import run_rank
from dflash_train.stage2_drafter.report import write_report
from dflash_train.stage2_drafter.run_checkpoints import best_checkpoint, list_checkpoints
from dflash_train.stage2_drafter.run_folder import read_metrics
from dflash_train.stage2_drafter.train import train
from dflash_train.stage2_drafter.trainer import Trainer
from dflash_train.store.calibration import Calibration
from dflash_train.store.creation import create_store
from dflash_train.store.encoding import make_encoding
from dflash_train.store.segment import SegmentWriter

QUESTIONS = [f"question {number} of ten" for number in range(10)]


def write_prompts(path: Path, questions: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return str(path)


def write_store(
    path: Path,
    target_folder: Path,
    *,
    layers: tuple[int, ...] = (1, 2),
    own_answers: bool = True,
    modes: Sequence[dict[str, Any]] = ({},),
) -> Path:
    """A store of a target over ten conversations that it answered itself, in a segment a mode of thinking.

    layers: those whose states are stored as 1 and 2. Answers that are not its own are random.
    """
    target = load_target(TargetConfig(name=str(target_folder)), (1, 2), "cpu")
    encoding = make_encoding("bf16", 2, target.hidden_size)
    calibration = Calibration.from_arrays(np.ones(encoding.num_states, np.float32))
    create_store(path, build_manifest(target, encoding, calibration.hash), calibration, frozen_target(target))
    generation, draw = [{"temperature": 0.0}] if own_answers else [], np.random.default_rng(0)
    for part, mode in enumerate(modes):
        writer = SegmentWriter(
            path, encoding, {"settings": {"chat_template_arguments": mode}, "generation": generation}
        )
        for number, question in list(enumerate(QUESTIONS))[part :: len(modes)]:
            message = [{"role": "user", "content": question}]
            text = target.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **mode)
            prompt = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = plain_decode(target, prompt, 24).token_ids if own_answers else draw.integers(4, 400, 24)
            row = np.array([*prompt, *answer], np.int32)
            states = replace(target, target_layer_ids=layers).hidden_states(torch.from_numpy(row).long()[None])[0]
            features, _ = encoding.encode(states, calibration)
            mask = (np.arange(len(row)) >= len(prompt)).astype(np.uint8)
            writer.append(number + 1, first_turn_group(message), row, mask, features.numpy().view(np.uint16), None)
        writer.commit()
    return path


@pytest.fixture(scope="module")
def store(tiny_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "s.zarr", tiny_target("llama"))


@pytest.fixture
def make_config(store: Path, tiny_target: Callable[..., Path], tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(**options: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "devices": "cpu",
            "num_layers": 1,
            "block_size": 4,
            "mask_token": "<|mask|>",
            "row_tokens": 128,
            "anchors": 32,
            "rows_per_step": 1,
            "steps": 4,
            "holdout": 0.2,
            "evaluate_every": 2,
            "save_every": 2,
            "evaluate_target": str(tiny_target("llama")),
            "evaluate_prompts": write_prompts(tmp_path / "prompts.jsonl", ["What is new?", "And", QUESTIONS[0]]),
            "evaluate_new_tokens": 8,
        }
        return TrainConfig(**({"store": store, "run": tmp_path / "run"} | values | options))

    return make


def run_here(
    config: TrainConfig,
    measurement: RealAcceptance | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[str]:
    lines: list[str] = []
    run_rank(config, 0, 1, "cpu", "", lines.append, stop_requested, measurement=measurement or RealAcceptance())
    return lines


class Scripted(RealAcceptance):
    """These real acceptance lengths, one a measurement; one that a stop comes into is none."""

    def __init__(self, *lengths: float) -> None:
        super().__init__()
        self.lengths = list(lengths)
        self.stops: list[Callable[[], bool]] = []

    def measure(self, *arguments: Any) -> dict[str, Any]:
        self.stops.append(arguments[5])
        if arguments[5]():
            return {}
        values = {"real_prompts": 1, "real_rounds": 1, "real_seconds": 0.0}
        return {"real_acceptance_length": self.lengths.pop(0), **values}


def drafter_tensors(run: PreparedRun) -> dict[str, torch.Tensor]:
    """An untrained drafter, as a checkpoint would hold it."""
    trainer = Trainer(run, Rank(), lambda line: None, lambda: False)
    return export_tensors(dict(trainer.named), run.reader.encoding, run.reader.calibration)


def test_the_real_number_stands_beside_the_estimate_and_is_that_of_evaluate(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path]
) -> None:
    config = make_config()
    [line] = RealAcceptance().check(prepare_run(config))
    assert "decoded with" in line
    lines = run_here(config)
    evaluations = read_metrics(config.run, "evaluation")
    assert [entry["step"] for entry in evaluations] == [0, 2, 4]
    assert all({"acceptance_length", "real_acceptance_length"} <= entry.keys() for entry in evaluations)
    said = next(line for line in lines if line.startswith("held out at step 4"))
    assert f"estimated acceptance length {evaluations[-1]['acceptance_length']:.3f}" in said
    assert f"real acceptance length {evaluations[-1]['real_acceptance_length']:.3f} (" in said
    [loaded] = [line for line in lines if line.startswith("loaded ")]
    assert re.search(
        rf"every evaluation decodes \d+ prompts?, at most {config.evaluate_new_tokens} tokens each$", loaded
    )
    for entry, checkpoint in zip(evaluations[1:], list_checkpoints(config.run), strict=True):
        result = evaluate(
            EvaluateConfig(
                target=TargetConfig(name=str(tiny_target("llama"))),
                drafter=checkpoint.path,
                prompts=(str(config.evaluate_prompts),),
                max_prompts=8,
                max_turns=1,
                max_new_tokens=8,
                compare_plain=False,
                device="cpu",
            )
        )
        assert result["acceptance_length"] == entry["real_acceptance_length"]
        assert (result["num_prompts"], result["num_rounds"]) == (entry["real_prompts"], entry["real_rounds"])
        assert [one["cumulative"] for one in result["positions"]] == entry["real_accepted"]
    page = write_report(config.run).read_text()
    assert "real decoding in training" in page
    assert "real acceptance" in page


def test_the_estimate_is_the_acceptance_length_of_greedy_decoding_on_the_targets_own_answers(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path]
) -> None:
    """Rounds walked over the held-out answers, against drafts of the replay's code and a plain loop."""
    config = make_config(steps=60, anchors=96, holdout=0.4, evaluate_target=None, evaluate_prompts=None)
    run_rank(config, 0, 1, "cpu", "", lambda line: None, lambda: False)
    run = prepare_run(config)
    target = load_target(TargetConfig(name=str(tiny_target("llama"))), (1, 2), "cpu")
    drafter = Drafter(run.drafter_config, seed=None)
    drafter.load_state_dict(list_checkpoints(config.run)[-1].masters())
    drafter.requires_grad_(False)
    at_anchors: list[int] = []
    rounds = produced = 0
    for index in np.flatnonzero(run.held_out()):
        sample = run.reader.read(int(index))
        first = int(sample.loss_mask.argmax())
        ids = sample.token_ids.tolist()
        features = torch.from_numpy(sample.features.view(np.int16)).view(torch.bfloat16).float()
        answer = ReadAnswer(prompt_ids=ids[:first], answer_ids=ids[first:], features=features, target_layer_ids=(1, 2))
        drafts = draft_everywhere(target, drafter, answer, 1000, config.block_size)
        gains = []
        for place, drafted in enumerate(drafts):
            following = ids[first + place + 1 :]
            gain = 0
            while gain < min(len(drafted), len(following)) and drafted[gain] == following[gain]:
                gain += 1
            gains.append(min(gain + 1, len(following)))
        at_anchors += gains
        place = 0
        while place < len(gains):
            rounds, produced, place = rounds + 1, produced + gains[place], place + gains[place]
    found = read_metrics(config.run, "evaluation")[-1]
    assert len(at_anchors) == 23 * run.held_out().sum(), "an anchor at every token but the last"
    assert (found["rounds"], found["acceptance_length"]) == (rounds, pytest.approx(produced / rounds))
    assert found["acceptance_length_over_anchors"] == pytest.approx(sum(at_anchors) / len(at_anchors))
    assert found["acceptance_length"] > 1.1


def test_measuring_changes_nothing_in_the_training(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    measured = make_config()
    run_here(measured)
    plain = make_config(evaluate_target=None, evaluate_prompts=None, run=tmp_path / "plain")
    run_rank(plain, 0, 1, "cpu", "", lambda line: None, lambda: False)
    one, two = list_checkpoints(measured.run)[-1].masters(), list_checkpoints(plain.run)[-1].masters()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_first_of_two_ranks_measures_in_its_own_process(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(devices="cpu:2", steps=2)
    lines: list[str] = []
    result = train(config, lines.append, measurement=RealAcceptance())
    assert result.evaluation is not None
    assert result.evaluation["real_prompts"] == 2
    assert sum(line.startswith("real acceptance length: 2 prompts of") for line in lines) == 1
    assert sum("real acceptance length" in line for line in lines if line.startswith("held out at step")) == 2


def test_nothing_is_compiled_under_the_stance_of_a_training(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the target itself asks for torch.compile; and what was compiled before still runs after it."""
    from torch._dynamo.utils import counters

    asked: list[int] = []

    @torch.compile(backend="eager")
    def double(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    load = load_target

    def load_compiling(*arguments: Any) -> Any:
        target = load(*arguments)

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            asked.append(1)
            return torch.compile(lambda states: states * 1, backend="eager")(output)

        target.model.get_input_embeddings().register_forward_hook(hook)
        return target

    monkeypatch.setattr("dflash_train.speculate.training.load_target", load_compiling)
    double(torch.ones(3))
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.set_stance("fail_on_recompile")
    try:
        run_here(make_config(steps=2))
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            double(torch.ones(3, dtype=torch.float64))  # the stance is what it was
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()
    assert asked
    assert counters["stats"]["unique_graphs"] == graphs


def test_best_is_chosen_by_the_real_number(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=6, keep=1)
    run_here(config, Scripted(1.0, 2.0, 3.0, 1.5))
    assert [checkpoint.step for checkpoint in list_checkpoints(config.run)] == [4, 6]
    estimates = {entry["step"]: entry["acceptance_length"] for entry in read_metrics(config.run, "evaluation")}
    assert max(estimates, key=lambda step: estimates[step]) != 4, "the estimate would choose another"
    best = best_checkpoint(config.run)
    assert best is not None
    assert best.step == 4


def test_a_stop_at_a_save_keeps_the_checkpoint_from_being_the_best_until_the_next_start_alone(
    make_config: Callable[..., TrainConfig],
) -> None:
    config = make_config(steps=6, keep=1)
    answers = iter([False, False, True])  # to the first measurement and to two steps
    run_here(config, Scripted(1.0), lambda: next(answers))
    [stopped] = list_checkpoints(config.run)
    assert (stopped.step, stopped.state().evaluation) == (2, None)
    run_here(config, Scripted(3.0, 2.0, 1.5))
    assert [checkpoint.step for checkpoint in list_checkpoints(config.run)] == [2, 6]
    best, evaluations = best_checkpoint(config.run), read_metrics(config.run, "evaluation")
    assert best is not None and best.step == 2
    assert [entry["step"] for entry in evaluations] == [0, 2, 4, 6]
    assert evaluations[1] == {"kind": "evaluation", "step": 2, **(best.state().evaluation or {})}


def test_a_stop_in_a_measurement_ends_the_run_there_and_the_next_start_measures_again(
    make_config: Callable[..., TrainConfig],
) -> None:
    config = make_config(steps=6, keep=1)
    measurement = Scripted(1.0)

    def stop_requested() -> bool:
        return len(measurement.stops) == 2

    run_here(config, measurement, stop_requested)
    assert measurement.stops == [stop_requested] * 2
    [stopped] = list_checkpoints(config.run)
    estimate = stopped.state().evaluation or {}
    assert stopped.step == 2 and "acceptance_length" in estimate and "real_acceptance_length" not in estimate
    run_here(config, Scripted(), lambda: True)  # and again: nothing new is known
    assert list_checkpoints(config.run) == [stopped] and stopped.state().evaluation == estimate
    run_here(config, Scripted(3.0, 2.0, 1.5))
    best, evaluations = best_checkpoint(config.run), read_metrics(config.run, "evaluation")
    assert best == stopped and (stopped.state().evaluation or {})["real_acceptance_length"] == 3.0
    assert [(entry["step"], entry["real_acceptance_length"]) for entry in evaluations[1:]] == [
        (2, 3.0),
        (4, 2.0),
        (6, 1.5),
    ]


def test_without_held_out_rows_the_real_number_stands_alone(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(holdout=0.0, steps=2)
    lines = run_here(config)
    assert any(line.startswith("held out at step 2: real acceptance length") for line in lines)
    assert "acceptance_length" not in read_metrics(config.run, "evaluation")[-1]
    groups = read_groups(list_checkpoints(config.run)[-1].path)
    assert groups is not None
    later = prepare_run(make_config(run=config.run / "later", init_from=config.run, holdout=0.5))
    assert set(later.training_groups().tolist()) == set(groups.tolist()), (
        "what its first weights were trained on counts"
    )
    assert set(groups.tolist()) == {first_turn_group([{"role": "user", "content": text}]) for text in QUESTIONS}
    assert read_metrics(config.run, "evaluation")[-1]["real_prompts"] == 2  # «question 0» was trained on


def test_a_gap_prints_once_what_was_checked(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config()
    run = prepare_run(config)
    tensors = drafter_tensors(run)
    lines: list[str] = []
    measurement = RealAcceptance()
    for _ in range(2):
        measurement.measure(run, tensors, torch.device("cpu"), 3.9, lines.append, lambda: False)
    assert sum("the usual causes, and what was checked" in line for line in lines) == 1
    found = {line.split(": ")[1]: line.split(": ")[0].strip() for line in lines if line.startswith("  ")}
    assert list(found) == [
        "target",
        "stored states",
        "target states",
        "train/serve parity",
        "rotary positions",
        "mask token",
        "chat template and thinking",
        "own answers",
        "training data",
        "held-out prompts",
    ]
    assert {name for name, status in found.items() if status != "ok"} == {"held-out prompts"}
    assert any("100% of the answers' tokens are the target's first choice" in line for line in lines)
    assert measurement.measure(run, tensors, torch.device("cpu"), 1.0, lines.append, lambda: True) == {}


def gather(config: TrainConfig) -> Evidence:
    """What a measurement of an untrained drafter knows."""
    run, measurement = prepare_run(config), RealAcceptance()
    tensors = drafter_tensors(run)
    measurement.measure(run, tensors, torch.device("cpu"), None, lambda line: None, lambda: False)
    assert measurement._decoder is not None
    return Evidence(run, measurement._decoder, measurement._prompts, measurement._num_trained, tensors)


def found_in(evidence: Evidence, estimate: float = 3.9) -> dict[str, tuple[str, str]]:
    """Status and text of each line but for the held-out prompts, which no random drafter answers as estimated."""
    checks: dict[str, tuple[str, str]] = {
        check.name: (check.status, check.text) for check in gap._checks(evidence, estimate)
    }
    del checks["held-out prompts"]
    return checks


@pytest.fixture
def evidence(make_config: Callable[..., TrainConfig]) -> Evidence:
    return gather(make_config())


def red(evidence: Evidence) -> dict[str, tuple[str, str]]:
    return {name: found for name, found in found_in(evidence).items() if found[0] != "ok"}


def test_states_of_another_layer_in_the_store_are_seen(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    shifted = write_store(tmp_path / "shifted.zarr", tiny_target("llama"), layers=(0, 1))
    [(name, (status, text))] = red(gather(make_config(store=shifted))).items()
    assert (name, status) == ("stored states", "error")
    assert re.match(r"layer [12] of a stored sample differs by \d+\.\d% from this target's \(5\.\d% would be", text)


def test_answers_that_are_not_the_targets_own_are_seen(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    others = write_store(tmp_path / "others.zarr", tiny_target("llama"), own_answers=False)
    [(name, (status, text))] = red(gather(make_config(store=others))).items()
    assert (name, status) == ("own answers", "warning")
    assert re.match(r"\d% of the answers' tokens are the target's first choice \(not regenerated\)", text)


@pytest.mark.parametrize(("first", "share"), [(0, "100%"), (1, "0%")])
def test_supervised_tokens_alone_count_as_answers(
    first: int, share: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of answers in which the target's own choice and a token that it never gives take turns."""
    read = evidence.run.reader.read

    def mixed(index: int) -> Any:
        sample = read(index)
        token_ids, start = sample.token_ids.copy(), int(sample.loss_mask.argmax())
        for place in range(start, len(token_ids)):
            own = place % 2 == start % 2
            before = token_ids[:place].tolist()
            token_ids[place] = plain_decode(evidence.decoder.target, before, 1).token_ids[0] if own else 7
        loss_mask = np.zeros_like(sample.loss_mask)
        loss_mask[start + first :: 2] = 1
        return replace(sample, token_ids=token_ids, loss_mask=loss_mask)

    monkeypatch.setattr(evidence.run.reader, "read", mixed)
    assert gap._own_text(evidence).text.startswith(f"{share} of the answers' tokens")


def test_modes_of_thinking_that_differ_are_seen_and_prompts_are_asked_in_the_newest(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    thinking, mode = tmp_path / "thinking", {"enable_thinking": True}
    shutil.copytree(tiny_target("llama"), thinking)
    template = thinking / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking %}Think.{% endif %}")
    mixed = write_store(tmp_path / "mixed.zarr", thinking, modes=({}, mode))
    evidence = gather(make_config(store=mixed, evaluate_target=str(thinking)))
    [(name, (status, text))] = red(evidence).items()
    assert (name, status) == ("chat template and thinking", "warning")
    assert text == f"segments were extracted with {mode} and with {{}}; the prompts take the first."
    for prompt in evidence.prompts:
        assert evidence.decoder.target.tokenizer.decode(prompt.token_ids).endswith("assistant\nThink.")


def test_a_mask_token_that_stands_in_samples_or_prompts_is_seen(evidence: Evidence) -> None:
    config, unused = evidence.run.drafter_config, 399
    for token, count in ((1, 8), (unused, 1)):  # <|im_start|>, twice in each of two samples and two prompts
        asked = [*evidence.prompts[0].token_ids, unused]
        other = replace(
            evidence,
            run=replace(evidence.run, drafter_config=replace(config, mask_token_id=token)),
            prompts=[replace(evidence.prompts[0], token_ids=asked), *evidence.prompts[1:]],
        )
        assert red(other)["mask token"] == ("error", f"{token} stands {count} times in text.")


def test_another_rotary_base_than_the_targets_is_seen(evidence: Evidence) -> None:
    other = replace(evidence.run, drafter_config=replace(evidence.run.drafter_config, rope_theta=5e5))
    assert red(replace(evidence, run=other)) == {
        "rotary positions": ("warning", "the drafter's base is 500,000, the target's 10,000.")
    }


def test_a_cache_that_changes_the_targets_states_is_seen(evidence: Evidence) -> None:
    def blur(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.5 if output.shape[1] == evidence.run.drafter_config.block_size else output

    handle = evidence.decoder.target.layers[1].register_forward_hook(blur)
    try:
        [(name, (status, text))] = red(evidence).items()
    finally:
        handle.remove()
    assert (name, status) == ("target states", "error")
    assert "differs by" in text and "between one forward and decoding with the cache" in text


def test_a_drafter_that_drafts_otherwise_than_it_trains_is_seen(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert red(evidence) == {}

    def see_less(self: Drafter, index: int, context: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        size, before = block.shape[1], context.shape[1]
        return torch.ones(size, before + size, dtype=torch.bool).tril(before)

    monkeypatch.setattr(Drafter, "_draft_mask", see_less)
    [(name, (status, text))] = red(evidence).items()
    assert (name, status) == ("train/serve parity", "error")
    assert "the logits of training and of drafting differ by" in text


def test_held_out_prompts_that_reach_the_estimate_clear_the_drafter(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = evidence.decoder.run_all([0], evidence.prompts)[0].turns[0].speculative.acceptance_lengths
    assert set(real) == {1}, "an untrained drafter gains the bonus token alone"
    assert gap._held_out_prompts(evidence, 1.17).status == "ok"
    asked, answer = list[str](), evidence.decoder.answer

    def watched(prompt: list[int]) -> Any:
        asked.append(evidence.decoder.target.tokenizer.decode(prompt))
        return answer(prompt)

    monkeypatch.setattr(evidence.decoder, "answer", watched)
    below = gap._held_out_prompts(evidence, 1.18)
    held_out = np.asarray(evidence.run.reader.samples["id"])[evidence.run.held_out()]
    for text, index in zip(asked, held_out, strict=True):
        assert text == f"<|im_start|>user\n{QUESTIONS[index - 1]}<|im_end|>\n<|im_start|>assistant\n"
    assert below.status == "warning" and "at --evaluate-new-tokens" in below.way_out
    assert "(1 that were are left out)" in gap._training_data(evidence).text


def test_a_check_and_a_measurement_that_are_out_of_memory_do_not_end_the_training(
    make_config: Callable[..., TrainConfig], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gap, "compare_samples", fail)
    assert red(evidence) == {"stored states": ("warning", "not checked: not enough device memory")}
    run, lines, measurement = prepare_run(make_config()), list[str](), RealAcceptance()
    with monkeypatch.context() as short:
        short.setattr("dflash_train.speculate.answering.speculative_decode", fail)
        measured = run, drafter_tensors(run), torch.device("cpu"), 3.9, lines.append, lambda: False
        assert measurement.measure(*measured) == {}
    assert lines[1:] == ["warning: no real acceptance length this time: not enough device memory beside the training"]
    assert measurement.measure(*measured)["real_prompts"] == 2
    monkeypatch.setattr("dflash_train.speculate.training.load_target", fail)
    with pytest.raises(
        InputError, match="does not fit beside the training on cpu; lower --row-tokens, or leave it out"
    ):
        RealAcceptance().measure(*measured)


def test_prompts_are_as_many_as_asked_for_and_are_dropped_once_they_are_trained_on(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = make_config()
    run = prepare_run(config)
    ids = np.asarray(run.reader.samples["id"])[run.held_out()]
    held_out = [QUESTIONS[index - 1] for index in sorted(ids)]
    prompts = write_prompts(tmp_path / "more.jsonl", ["What is new?", *held_out])
    config = replace(config, evaluate_prompts=prompts, evaluate_prompts_limit=2)
    run, lines, measurement = prepare_run(config), list[str](), RealAcceptance()
    rest = torch.device("cpu"), None, lines.append, lambda: False
    assert measurement.measure(run, drafter_tensors(run), *rest)["real_prompts"] == 2
    grown = prepare_run(replace(config, holdout=0.0))  # all is trained on
    assert measurement.measure(grown, drafter_tensors(grown), *rest)["real_prompts"] == 1
    assert lines[-1] == f"warning: no longer decoded, for they are trained on now: «{held_out[0]}»"
    assert measurement._num_trained == 1
    measurement._prompts = measurement._prompts[1:]
    assert measurement.measure(grown, drafter_tensors(grown), *rest) == {}


def test_first_turns_that_leave_room_for_the_answer_are_measured(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    path = tmp_path / "turns.jsonl"
    rows = [{"turns": [f"new question {'a ' * length}", "and more"]} for length in (0, 20, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(evaluate_prompts=str(path))
    tokenizer = load_tokenizer(TargetConfig(name=str(config.evaluate_target)))

    def lengths(config: TrainConfig) -> list[int]:
        prompts = RealAcceptance()._read_prompts(prepare_run(config), tokenizer).prompts
        assert all(len(prompt.turns) == 1 for prompt in prompts)
        return [len(prompt.token_ids) for prompt in prompts]

    whole = lengths(config)
    assert len(whole) == 3
    assert lengths(replace(config, evaluate_new_tokens=256 - whole[1])) == whole[:2]


def test_the_drafter_of_this_step_alone_is_measured_with_the_target_of_the_extraction(
    make_config: Callable[..., TrainConfig], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("decoded without the drafter")

    monkeypatch.setattr("dflash_train.speculate.answering.plain_decode", fail)
    run, measurement = evidence.run, RealAcceptance()
    for tensors in (evidence.tensors, {name: tensor * 2 for name, tensor in evidence.tensors.items()}):
        measurement.measure(run, tensors, torch.device("cpu"), None, lambda line: None, lambda: False)
        assert measurement._decoder is not None
        measured = measurement._decoder.drafter.state_dict()
        assert all(torch.equal(measured[name].bfloat16(), tensor.bfloat16()) for name, tensor in tensors.items())
    manifest = replace(run.reader.manifest, target_revision="v1", target_dtype="bfloat16")
    monkeypatch.setattr(run.reader, "manifest", manifest)
    for name, revision in ((manifest.target_name, "v1"), ("a/copy", None)):
        named = replace(run, config=replace(run.config, evaluate_target=name))
        assert target_config(named) == TargetConfig(name=name, revision=revision, dtype="bfloat16")


@pytest.mark.parametrize(("real", "explained"), [(2.56, False), (2.54, True)])
def test_a_gap_is_more_than_15_percent(
    real: float, explained: bool, make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = {"acceptance_length": real, "positions": [], "num_rounds": 1}
    monkeypatch.setattr("dflash_train.speculate.training.acceptance_statistics", lambda *_: statistics)
    monkeypatch.setattr("dflash_train.speculate.training.explain_gap", lambda *_: ["explained"])
    run, lines = prepare_run(make_config()), list[str]()
    RealAcceptance().measure(run, drafter_tensors(run), torch.device("cpu"), 3.0, lines.append, lambda: False)
    assert ("explained" in lines) is explained


def test_what_cannot_be_checked_does_not_end_the_training(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise InputError("its segment is gone.")

    run = prepare_run(make_config())
    monkeypatch.setattr(run.reader, "read", fail)
    lines: list[str] = []
    RealAcceptance().measure(run, drafter_tensors(run), torch.device("cpu"), 3.9, lines.append, lambda: False)
    assert any(line.startswith("  warning: own answers: not checked: its segment is gone.") for line in lines)
    assert any(line.startswith("  ok: train/serve parity") for line in lines)


def test_another_target_or_trained_prompts_are_refused_before_the_start(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    other_kind = prepare_run(make_config(evaluate_target=str(tiny_target("qwen3"))))
    stored = other_kind.reader.manifest.target_config_hash
    with pytest.raises(
        InputError,
        match=f"is not the target of .*target_config_hash: found '(?!{stored}).*', wanted '{stored}'.*Give the",
    ):
        RealAcceptance().check(other_kind)
    other_weights = prepare_run(make_config(evaluate_target=str(tiny_target("llama", seed=1))))
    measurement = RealAcceptance()
    measurement.check(other_weights)  # config and tokenizer are the same
    stored = other_weights.reader.manifest.weights_fingerprint
    with pytest.raises(InputError, match=f"is not the target of .*weights_fingerprint: found .*, wanted '{stored}'"):
        measurement.measure(other_weights, {}, torch.device("cpu"), None, lambda line: None, lambda: False)
    with pytest.raises(InputError, match="All prompts of .* are in the drafter's training data"):
        prompts = write_prompts(tmp_path / "trained.jsonl", QUESTIONS)
        RealAcceptance().check(prepare_run(make_config(evaluate_prompts=prompts, holdout=0.0)))
    with pytest.raises(InputError, match="--evaluate-target needs --evaluate-prompts; give both or neither"):
        make_config(evaluate_prompts=None)


def test_evaluate_names_another_template_or_mode_than_the_drafter_was_trained_with(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(steps=2, evaluate_target=None, evaluate_prompts=None)
    run_rank(config, 0, 1, "cpu", "", lambda line: None, lambda: False)
    prompts = write_prompts(tmp_path / "asked.jsonl", ["What is new?"])

    def warnings(target: Path, drafter: Path = config.run, **arguments: Any) -> list[str]:
        notes: list[Any] = []
        wanted = EvaluateConfig(
            target=TargetConfig(name=str(target)),
            drafter=drafter,
            prompts=(prompts,),
            max_new_tokens=2,
            chat_template_arguments=arguments,
            compare_plain=False,
            device="cpu",
        )
        evaluate(wanted, notes.append)
        return [note for note in notes if isinstance(note, str) and note.startswith("warning: the drafter")]

    assert warnings(tiny_target("llama")) == []
    [text] = warnings(tiny_target("llama"), enable_thinking=False)
    assert """extracted with --chat-template-arguments '{}', not '{"enable_thinking": false}'""" in text
    other = tmp_path / "other"
    shutil.copytree(tiny_target("llama"), other)
    template = other / "chat_template.jinja"
    template.write_text("Be brief." + template.read_text())
    [text] = warnings(other)
    assert "was trained on a target with another chat template than this one's" in text
    [text] = warnings(tiny_target("qwen3"))
    assert "another config" in text
    exported = tmp_path / "exported"
    exported.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(list_checkpoints(config.run)[-1].path / name, exported)
    assert warnings(other, exported, enable_thinking=False) == [], "an export has no record"


def test_all_that_take_the_newest_checkpoint_say_where_an_earlier_one_was_better(
    make_config: Callable[..., TrainConfig], tiny_target: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(steps=1, save_every=1, evaluate_target=None, evaluate_prompts=None)
    lines: list[str] = []
    train(config, report=lines.append)
    [first] = list_checkpoints(config.run)
    assert not any("is worse than" in line for line in lines)
    record_evaluation(first, {**(first.state().evaluation or {}), "acceptance_length": 9.0})
    train(replace(config, steps=2), report=lines.append)
    said = "step 2, is worse than step 1: held-out estimate 1."
    assert (
        lines[-1].startswith("warning: the newest checkpoint, ") and said in lines[-1] and str(first.path) in lines[-1]
    )
    next_run = make_config(
        run=tmp_path / "next", steps=1, init_from=config.run, evaluate_target=None, evaluate_prompts=None
    )
    run_rank(next_run, 0, 1, "cpu", "", lines.append, lambda: False)
    assert sum(said in line for line in lines) == 2, "of the run whose weights it starts with"
    target, notes = TargetConfig(name=str(tiny_target("llama"))), list[Any]()
    prompts = (write_prompts(tmp_path / "asked.jsonl", ["What is new?"]),)
    for drafter in (config.run, first.path):
        options = EvaluateConfig(target=target, drafter=drafter, prompts=prompts, max_new_tokens=2, compare_plain=False)
        evaluate(replace(options, device="cpu"), notes.append)
    assert sum(isinstance(note, str) and said in note for note in notes) == 1, "of the run, not of the checkpoint"
    checks = check_drafter(CheckConfig(target=target, drafter=config.run, parity=False, device="cpu"))["checks"]
    assert [check["status"] for check in checks if said in check["text"]] == ["warning"]
    exported = CliRunner().invoke(main, ["export", str(config.run), str(tmp_path / "exported")])
    assert exported.exit_code == 0 and said in exported.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_beside_a_compiled_training_nothing_is_compiled_again(
    make_config: Callable[..., TrainConfig], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A whole run in processes of its own; a recompilation would end it. About a minute on an H200."""
    import transformers

    folder = tmp_path / "target"
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(vocab_size=400, num_attention_heads=4, num_key_value_heads=2, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    sizes = {"rows_per_step": 4, "steps": 20, "evaluate_every": 10, "save_every": 10}
    measured = make_config(
        store=write_store(tmp_path / "wide.zarr", folder), devices="0", evaluate_target=str(folder), **sizes
    )
    lines: list[str] = []
    train(measured, lines.append, measurement=RealAcceptance())
    assert any(line.startswith("compiled ") and line.endswith(" 0 recompilations in 20 steps") for line in lines), lines
    assert any("beside the training" in line for line in lines), lines
    evaluations = read_metrics(measured.run, "evaluation")
    assert [entry["step"] for entry in evaluations] == [0, 10, 20]
    result = evaluate(
        EvaluateConfig(
            target=TargetConfig(name=str(folder), dtype="float32"),
            drafter=measured.run,
            prompts=(str(measured.evaluate_prompts),),
            max_turns=1,
            max_new_tokens=8,
            device="cuda",
        )
    )
    assert result["lossless"]
    for length in (result["acceptance_length"], *(entry["real_acceptance_length"] for entry in evaluations)):
        assert 1 <= length <= 4


def test_a_stop_while_the_causes_of_a_gap_are_looked_for_keeps_the_number(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, held_out_prompts = [False], gap._held_out_prompts

    def late(*arguments: Any) -> Any:
        stopped[0] = True
        return held_out_prompts(*arguments)

    monkeypatch.setattr(gap, "_held_out_prompts", late)
    run, lines = prepare_run(make_config()), list[str]()
    real = RealAcceptance()
    values = real.measure(run, drafter_tensors(run), torch.device("cpu"), 3.9, lines.append, lambda: stopped[0])
    assert values["real_acceptance_length"] >= 1
    monkeypatch.undo()
    real.measure(run, drafter_tensors(run), torch.device("cpu"), 3.9, lines.append, lambda: False)
    assert sum("usual causes" in line for line in lines) == 1, lines
