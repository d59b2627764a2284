"""`evaluate` end to end on a saved tiny target, and every way its input can be wrong."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dflash_train.errors import InputError
from dflash_train.speculate import answering
from dflash_train.speculate import evaluate as evaluation
from dflash_train.speculate.acceptance import summarise
from dflash_train.speculate.answering import Decoding, PromptDecoder, PromptResult, TurnResult
from dflash_train.speculate.decode import DecodeResult, Interrupted, Round, plain_decode, speculative_decode
from dflash_train.speculate.evaluate import EvaluateConfig, evaluate
from dflash_train.speculate.evaluation_tables import format_evaluation
from dflash_train.speculate.events import Decoded
from dflash_train.speculate.loading import load_drafter
from dflash_train.speculate.prompts import Prompt
from dflash_train.speculate.sampling import Sampling
from dflash_train.stage1_target.target import load_target, stop_token_ids
from dflash_train.stage1_target.target_config import TargetConfig
from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig


def save_drafter(drafter: Drafter, folder: Path, **changes: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**drafter.config.to_json("float32"), **changes}))
    save_file(drafter.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=[2, 5],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(
        DrafterConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=400,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            max_position_embeddings=128,
            block_size=4,
            mask_token_id=3,
            target_layer_ids=(0, 2),
            num_target_layers=4,
            initializer_range=0.3,
        ),
        seed=1,
    )


@pytest.fixture
def config(target_folder: Path, drafter: Drafter, tmp_path: Path) -> EvaluateConfig:
    prompts = tmp_path / "prompts.jsonl"
    questions = ["What is the capital of France?", "Count from one to ten.", "a b " * 60]  # the last one is too long
    rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluateConfig(
        target=TargetConfig(name=str(target_folder), dtype="float32"),
        drafter=save_drafter(drafter, tmp_path / "drafter"),
        prompts=(str(prompts),),
        max_new_tokens=12,
        device="cpu",
    )


def render(result: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(format_evaluation(result))
    return console.export_text()


def test_report_of_a_random_drafter(config: EvaluateConfig) -> None:
    events: list[Decoded | str] = []
    result = evaluate(config, events.append)
    seen = [event for event in events if isinstance(event, Decoded)]
    assert [(event.num_prompts, event.num_all) for event in seen] == [(1, 2), (2, 2)]
    assert seen[-1].acceptance_length == result["acceptance_length"]
    assert seen[-1].num_tokens == result["speculative"]["num_tokens"]
    assert json.loads(json.dumps(result)) == result
    assert (result["num_prompts"], result["num_skipped_prompts"], result["block_size"]) == (2, 1, 4)
    assert result["lossless"] is True
    assert result["differences"] == []
    assert result["num_equal"] == 2
    assert 1 <= result["acceptance_length"] <= 4
    assert sum(result["histogram"]) == result["num_rounds"]
    assert result["speculative"]["num_tokens"] == result["plain"]["num_tokens"]
    assert result["speedup"] > 0
    assert (result["dtype"], result["device"]) == ("float32", "cpu")
    text = render(result)
    assert "Output equals plain greedy decoding on all 2 prompts." in text
    assert f"{result['acceptance_length']:.2f}" in text


def test_a_replay_has_the_rounds_of_decoding_and_no_speeds(config: EvaluateConfig, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, ["What?", "And then?"], ["One question."], ["Count from one to ten.", "Again."])
    config = replace(config, prompts=(prompts, *config.prompts), block_size=3)
    decoded = evaluate(config)
    assert (decoded["method"], decoded["batch_size"]) == ("decoding", None)
    events: list[Decoded | str] = []
    result = evaluate(replace(config, replay=True, batch_size=2), events.append)
    seen = [event.num_prompts for event in events if isinstance(event, Decoded)]
    assert seen == [2, 4, 5]
    assert (result["method"], result["batch_size"]) == ("replay", 2)
    assert result["num_answers"] == 7
    for name in ("plain", "speedup", "num_equal", "differences", "lossless", "reference"):
        assert result[name] is None
    speeds = {"prefill_seconds": None, "decode_seconds": None, "tokens_per_second": None}
    assert result["speculative"] == {**decoded["speculative"], **speeds}
    other = {"plain", "speedup", "num_equal", "differences", "lossless", "method", "batch_size", "speculative"}
    other |= {"acceptance_length_over_anchors"}
    assert result.keys() == decoded.keys()
    for key in result.keys() - other - {"data_sets"}:
        assert result[key] == decoded[key], key
    assert [entry["histogram"] for entry in result["data_sets"]] == [x["histogram"] for x in decoded["data_sets"]]
    text = render(result)
    assert "replay of the target's own greedy answers" in text
    anchors = result["acceptance_length_over_anchors"]
    assert anchors >= 1 and f"mean over anchors  {anchors:.2f}" in text
    assert "plain decoding " not in text


def test_several_processes_share_the_batches_of_a_replay(config: EvaluateConfig, tmp_path: Path) -> None:
    from dflash_train.machine.devices import parse_devices

    config = replace(config, replay=True)
    result = evaluate(config, None, parse_devices("cpu:2"))
    assert result["num_processes"] == 2
    assert comparable(result) == comparable(evaluate(config))


def test_without_plain_decoding_there_is_no_speedup(config: EvaluateConfig) -> None:
    result = evaluate(replace(config, compare_plain=False, max_prompts=1, block_size=2))
    assert (result["plain"], result["speedup"], result["lossless"], result["block_size"]) == (None, None, None, 2)
    assert "Not compared with plain greedy decoding." in render(result)


def test_a_larger_block_than_the_drafters_is_warned_of(config: EvaluateConfig) -> None:
    def warnings(block_size: int) -> list[str]:
        events: list[Decoded | str] = []
        evaluate(replace(config, compare_plain=False, max_prompts=1, block_size=block_size), events.append)
        return [event for event in events if isinstance(event, str) and event.startswith("warning: ")]

    assert warnings(4) == []
    [warning] = warnings(5)
    assert warning.startswith("warning: --block-size 5 is more than the 4 that the drafter was trained with, ")


def test_a_wrong_output_is_reported(config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(*arguments: Any, **settings: Any) -> Any:
        result = speculative_decode(*arguments, **settings)
        result.token_ids[1] = (result.token_ids[1] + 1) % 400
        return result

    monkeypatch.setattr(answering, "speculative_decode", corrupted)
    result = evaluate(config)
    assert result["lossless"] is False
    assert result["differences"][0]["position"] == 1
    text = " ".join(render(result).split())
    assert "differs from plain greedy decoding on 2 of 2 prompts, 2 of them not explained by rounding" in text
    assert "First: prompt 0, new token 1" in text


def test_the_prompt_is_put_under_the_chat_template(
    config: EvaluateConfig, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[int]] = []

    def watched(target: Any, prompt: Sequence[int], *arguments: Any, **settings: Any) -> Any:
        seen.append(prompt)
        return plain_decode(target, prompt, *arguments, **settings)

    monkeypatch.setattr(answering, "plain_decode", watched)
    evaluate(config)
    expected = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(seen[0]) == expected


def test_all_turns_are_asked_in_the_mode_of_thinking_that_is_given(
    config: EvaluateConfig, target_folder: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking, asked, answer = tmp_path / "thinking", list[str](), answering.Asking.answer
    shutil.copytree(target_folder, thinking)
    template = thinking / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking %}Think.{% endif %}")

    def watched(self: Any, result: Any) -> None:
        asked.append(tiny_tokenizer.decode(self.token_ids))
        answer(self, result)

    monkeypatch.setattr(answering.Asking, "answer", watched)
    config = replace(config, target=replace(config.target, name=str(thinking)), max_new_tokens=4, compare_plain=False)
    config = replace(config, prompts=(write_prompts(tmp_path, ["What?", "And?"]),))
    for enable in (False, True):
        for replayed in (False, True):
            asked.clear()
            evaluate(replace(config, chat_template_arguments={"enable_thinking": enable}, replay=replayed))
            assert [text.endswith("assistant\nThink.") for text in asked] == [enable] * 2, asked


def test_stop_tokens_come_from_all_configs(config: EvaluateConfig) -> None:
    target = load_target(config.target, (0, 2), "cpu")
    assert stop_token_ids(target) == (2, 5)


def test_a_run_folder_gives_its_newest_checkpoint(drafter: Drafter, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("step-00000009", "step-00000100"):
        save_drafter(drafter, run / "checkpoints" / step)
        drafter = Drafter(drafter.config, seed=2)
    (run / "checkpoints" / ".tmp-step-00000200").mkdir()
    loaded = load_drafter(run, "cpu", torch.float32)
    assert torch.equal(loaded.fc.weight, Drafter(drafter.config, seed=2).fc.weight)
    assert not loaded.training
    assert load_drafter(run, "cpu", torch.bfloat16).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden_size 48, the target has 32"),
        ({"vocab_size": 401}, "vocab_size 401, the target has 400"),
        ({"num_target_layers": 5}, "num_target_layers 5, the target has 4"),
        (
            {"dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 3]}},
            "target_layer_ids up to 3, the target allows at most 2",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused_before_loading(
    changes: dict[str, Any], message: str, config: EvaluateConfig, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_target(*arguments: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(evaluation, "load_target", load_target)
    save_drafter(drafter, config.drafter, **changes)
    with pytest.raises(InputError, match=f"The drafter does not fit the target: .*{message}"):
        evaluate(config)


def test_weights_that_do_not_fit_are_listed(config: EvaluateConfig, drafter: Drafter, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {**drafter.state_dict(), "conv.weight": torch.zeros(2)}
    del tensors["norm.weight"]
    save_file(tensors, config.drafter / "model.safetensors")
    with pytest.raises(InputError, match=r"conv.weight .*norm.weight"):
        load_drafter(config.drafter, "cpu", torch.float32)


def test_weights_that_are_no_numbers_are_refused(config: EvaluateConfig, drafter: Drafter) -> None:
    with torch.no_grad():
        drafter.fc.weight[0, 0] = torch.nan
    save_drafter(drafter, config.drafter)
    with pytest.raises(InputError, match=r"drafter has weights that are not finite in torch.float32: fc.weight; take"):
        evaluate(config)


def test_folders_that_hold_no_drafter_are_refused(config: EvaluateConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        load_drafter(tmp_path / "missing", "cpu", torch.float32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"lacks config.json and model.safetensors"):
        load_drafter(tmp_path / "empty", "cpu", torch.float32)
    (tmp_path / "empty" / "checkpoints").mkdir()
    with pytest.raises(InputError, match="has no checkpoint yet"):
        load_drafter(tmp_path / "empty", "cpu", torch.float32)
    for text, message in (
        ("{", "is no JSON"),
        ("[]", "no JSON object"),
        ("{}", "no dflash_config"),
        ('{"speculators_model_type": "dflash"}', "is in the speculators format.* give the drafter in z-lab's format"),
    ):
        (config.drafter / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            evaluate(config)


def test_values_out_of_range_are_refused(config: EvaluateConfig) -> None:
    with pytest.raises(InputError, match="--block-size is 1, but at least 2 is needed"):
        replace(config, block_size=1)
    with pytest.raises(InputError, match="--max-new-tokens is 0"):
        replace(config, max_new_tokens=0)
    with pytest.raises(InputError, match="--top-p is 0, but must be more than 0 and at most 1"):
        replace(config, temperature=0.7, top_p=0)
    with pytest.raises(InputError, match="--batch-size is 0"):
        replace(config, batch_size=0)
    with pytest.raises(InputError, match="--replay follows the target's greedy answers, which --temperature 0.7 does"):
        replace(config, replay=True, temperature=0.7)
    with pytest.raises(InputError, match="--replay decodes nothing that --reference could compare"):
        replace(config, replay=True, reference=True)
    with pytest.raises(InputError, match="None of the 3 prompts .* leaves room for the new tokens"):
        evaluate(replace(config, max_new_tokens=500))
    with pytest.raises(InputError, match="'gpu' is unknown to torch"):
        replace(config, device="gpu").resolve_device()
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="'cuda:0' does not exist here"):
            replace(config, device="cuda:0").resolve_device()


def test_a_loaded_drafter_is_checked_against_the_loaded_target(
    make_tiny_target: Callable[[str], Any], drafter: Drafter
) -> None:
    with pytest.raises(InputError, match="vocab_size 400, the target has 11"):
        PromptDecoder(make_tiny_target("llama"), drafter, Decoding())


def test_a_target_that_loses_its_state_is_refused_before_a_prompt_is_decoded(
    forgetful_target: Any, make_tiny_drafter: Callable[..., Drafter]
) -> None:
    with pytest.raises(InputError, match="lose their state when several tokens are read at once"):
        PromptDecoder(forgetful_target, make_tiny_drafter(forgetful_target), Decoding())


def test_a_stop_ends_decoding_without_the_drafter_too(
    config: EvaluateConfig, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = PromptDecoder(load_target(config.target, (0, 2), "cpu"), drafter.eval(), Decoding(max_new_tokens=12))

    def watched(*arguments: Any, **settings: Any) -> Any:
        result = speculative_decode(*arguments, **settings)
        decoder.stop = lambda: True
        return result

    monkeypatch.setattr(answering, "speculative_decode", watched)
    with pytest.raises(Interrupted):
        decoder.run(0, Prompt("data", [[{"role": "user", "content": "?"}]], None, [7, 8, 9]))


def write_prompts(folder: Path, *conversations: list[str]) -> str:
    path = folder / "turns.jsonl"
    path.write_text("".join(json.dumps({"turns": questions}) + "\n" for questions in conversations))
    return str(path)


def comparable(result: dict[str, Any]) -> Any:
    """A report without times, and without what says where it was measured."""
    left_out = {"prefill_seconds", "decode_seconds", "tokens_per_second", "speedup", "num_processes", "threads"}
    if isinstance(result, dict):
        return {key: comparable(value) for key, value in result.items() if key not in left_out}
    return [comparable(item) for item in result] if isinstance(result, list) else result


def test_the_answer_of_the_first_turn_goes_into_the_second(
    config: EvaluateConfig, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[int]] = []

    def watched(target: Any, drafter: Any, prompt: Sequence[int], *arguments: Any, **settings: Any) -> Any:
        seen.append(prompt)
        result = speculative_decode(target, drafter, prompt, *arguments, **settings)
        result.token_ids = [*tiny_tokenizer("Paris")["input_ids"], 3, 2]  # of some targets special tokens mark thinking
        result.stopped = True
        return result

    monkeypatch.setattr(answering, "speculative_decode", watched)
    prompts = write_prompts(tmp_path, ["What?", "And then?"], ["One question."])
    result = evaluate(replace(config, prompts=(prompts,), compare_plain=False))
    assert (result["num_prompts"], result["num_answers"]) == (2, 3)
    user, assistant, end = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
    second = f"{user}What?{end}{assistant}Paris<|mask|>{end}{user}And then?{end}{assistant}"
    assert tiny_tokenizer.decode(seen[1]) == second
    assert len(seen) == 3
    monkeypatch.undo()
    result = evaluate(replace(config, prompts=(prompts,), max_turns=1))
    assert result["num_answers"] == 2
    assert "on all 2 prompts" in render(result)


def test_answers_end_at_a_stop_token_with_and_without_the_drafter(
    config: EvaluateConfig, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = load_target(config.target, (0, 2), "cpu"), Prompt("data", [[]], None, [7, 8, 9])
    answer = plain_decode(target, prompt.token_ids, 12).token_ids
    stop = answer[3]
    monkeypatch.setattr(answering, "stop_token_ids", lambda target: (stop,))
    [turn] = PromptDecoder(target, drafter.eval(), Decoding(max_new_tokens=12)).run(0, prompt).turns
    assert turn.plain is not None
    for result in (turn.speculative, turn.plain):
        assert (result.token_ids, result.stopped) == (answer[: answer.index(stop) + 1], True)


def test_a_turn_that_leaves_no_room_ends_the_prompt(config: EvaluateConfig, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, ["What?", "a b " * 60])
    for replayed in (False, True):
        result = evaluate(replace(config, prompts=(prompts,), compare_plain=False, replay=replayed))
        assert (result["num_prompts"], result["num_answers"]) == (1, 1)


def test_prompts_are_of_the_split_that_is_asked_for(config: EvaluateConfig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, number in (("train", 1), ("test", 2)):
        Path(write_prompts(folder, *[["What?"], ["How?"]][:number])).rename(folder / f"{name}.jsonl")
    config = replace(config, prompts=(str(folder),), compare_plain=False, max_new_tokens=2)
    assert [evaluate(replace(config, split=split))["num_prompts"] for split in ("train", "test")] == [1, 2]


def test_data_sets_stand_apart_and_together(config: EvaluateConfig, tmp_path: Path) -> None:
    gsm8k = tmp_path / "copy.jsonl"
    gsm8k.write_text(json.dumps({"question": "How many?"}) + "\n")
    result = evaluate(replace(config, prompts=(*config.prompts, f"gsm8k={gsm8k}"), compare_plain=False))
    assert [entry["num_prompts"] for entry in result["data_sets"]] == [2, 1]
    assert sum(entry["num_rounds"] for entry in result["data_sets"]) == result["num_rounds"]
    text = render(result)
    assert "By data set" in text
    assert "gsm8k" in text


def test_several_processes_give_the_numbers_of_one_even_if_one_dies(
    config: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, of which the first to give a result is killed; what it had begun goes to the other."""
    from dflash_train.machine.devices import parse_devices
    from dflash_train.machine.launch import ProcessGroup

    prompts = write_prompts(tmp_path, *(["What is", "and", "why"][:n] for n in (1, 3, 2)), ["Count."])
    config = replace(config, prompts=(prompts,), temperature=0.8, max_turns=3, max_new_tokens=8)
    alone = evaluate(config)
    killed: list[int] = []
    wait = ProcessGroup.wait

    def kill_once(self: ProcessGroup, timeout: float) -> Any:
        events = wait(self, timeout)
        for process, message in events:
            if isinstance(message, list) and not killed:  # results of a unit
                killed.append(process.pid)
                process.popen.kill()
        return events

    monkeypatch.setattr(ProcessGroup, "wait", kill_once)
    events: list[Decoded | str] = []
    shared = evaluate(config, events.append, parse_devices("cpu:2"))
    assert "was killed by SIGKILL" in shared["failures"][0]
    assert comparable({**shared, "failures": []}) == comparable(alone)
    assert (alone["num_processes"], shared["num_processes"], shared["num_answers"]) == (1, 2, 7)
    assert f"2 workers will load {config.target.name}" in events
    assert sum(isinstance(event, Decoded) for event in events) == 4
    assert "2 processes, each on cpu" in render(shared)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"lossless": True, "reference": {"num_equal": 2, "differences": [], "same": True}}, 0),
        ({"lossless": False, "differences": []}, 1),
        ({"reference": {"num_equal": 2, "differences": [], "same": False}}, 1),
        ({"failures": ["a worker was killed by SIGKILL"]}, 1),
        ({"interrupted": True, "failures": ["a worker was killed by SIGKILL"]}, 130),
    ],
    ids=["all well", "all equal", "unequal", "unlike z-lab's", "a dead worker", "stopped"],
)
def test_the_exit_status_says_whether_the_number_holds(
    changes: dict[str, Any], status: int, config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from dflash_train.cli import main

    result = evaluate(replace(config, compare_plain=False, max_prompts=1, max_new_tokens=2))
    monkeypatch.setattr(evaluation, "evaluate", lambda *arguments: {**result, **changes})
    words = ["evaluate", "--target", config.target.name, "--drafter", str(config.drafter)]
    ran = CliRunner().invoke(main, [*words, "--data", config.prompts[0], "--gpus", "cpu", "--json"])
    assert ran.exit_code == status, ran.output
    assert ("killed by SIGKILL" in ran.stderr) is bool(changes.get("failures"))


@pytest.mark.parametrize("devices", ["here", "cpu:1"])
def test_a_signal_leaves_the_result_of_the_finished_prompts(
    devices: str, config: EvaluateConfig, tmp_path: Path
) -> None:
    import os
    import signal

    from dflash_train.machine.devices import parse_devices

    def stop(event: Decoded | str) -> None:
        if isinstance(event, Decoded) and event.num_prompts == 2:
            os.kill(os.getpid(), signal.SIGINT)

    config = replace(
        config,
        prompts=(write_prompts(tmp_path, ["a"], ["b"], *[[f"c{number}"] for number in range(30)]),),
        compare_plain=False,
    )
    result = evaluate(config, stop, () if devices == "here" else parse_devices(devices))
    assert result["interrupted"]
    assert 2 <= result["num_prompts"] < 32
    assert result["num_planned_prompts"] == 32
    assert f"Stopped after {result['num_prompts']} of 32 prompts" in render(result)


def test_at_a_temperature_speeds_are_compared_and_texts_are_not(config: EvaluateConfig) -> None:
    result = evaluate(replace(config, temperature=0.7, top_p=0.9, top_k=50, seed=3))
    assert (result["lossless"], result["differences"]) == (None, None)
    assert result["speedup"] > 0
    text = render(result)
    assert "0.7, top-p 0.9, top-k 50  (rejection sampling, seed 3)" in text
    assert "their distribution is the target's own" in text


def test_answers_are_drawn_with_the_sampling_and_the_seed_that_are_asked_for(
    config: EvaluateConfig, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, Sequence[int], list[int]]] = []

    def watched_plain(target: Any, prompt: Sequence[int], *arguments: Any, **settings: Any) -> Any:
        result = plain_decode(target, prompt, *arguments, **settings)
        drawn.append(("plain", prompt, result.token_ids))
        return result

    def watched_speculative(target: Any, drafter: Any, prompt: Sequence[int], *arguments: Any, **settings: Any) -> Any:
        result = speculative_decode(target, drafter, prompt, *arguments, **settings)
        drawn.append(("speculative", prompt, result.token_ids))
        return result

    monkeypatch.setattr(answering, "plain_decode", watched_plain)
    monkeypatch.setattr(answering, "speculative_decode", watched_speculative)
    evaluate(replace(config, max_prompts=1, temperature=0.9, top_k=50, seed=3))
    target, stop_ids = load_target(config.target, (0, 2), "cpu"), (2, 5)

    def expected(way: str, prompt: Sequence[int], **settings: Any) -> list[int]:
        if way == "plain":
            return plain_decode(target, prompt, 12, stop_ids, **settings).token_ids
        return speculative_decode(target, drafter.eval(), prompt, 12, stop_ids, **settings).token_ids

    sampling = Sampling(temperature=0.9, top_k=50)
    assert [way for way, _, _ in drawn] == ["speculative", "plain"]
    for way, prompt, token_ids in drawn:
        assert token_ids == expected(way, prompt, sampling=sampling, seed=3)
        assert token_ids != expected(way, prompt, sampling=sampling, seed=0)
        assert token_ids != expected(way, prompt, seed=3)


def test_prompts_of_the_training_data_are_left_out_and_named(
    config: EvaluateConfig, drafter: Drafter, tmp_path: Path
) -> None:
    import numpy as np

    from dflash_train.stage1_target.conversations import first_turn_group

    notes: list[Any] = []
    evaluate(replace(config, compare_plain=False), notes.append)
    assert "is not checked" in notes[0]
    group = first_turn_group([{"role": "user", "content": "Count from one to ten."}])
    (config.drafter / "trainer").mkdir()
    np.save(config.drafter / "trainer" / "groups.npy", np.array([group, 5], dtype=np.int64))
    notes.clear()
    result = evaluate(replace(config, compare_plain=False), notes.append)
    assert "1 prompt of the data are in" in notes[0]
    assert "«Count from one to ten.»" in notes[0]
    assert (result["num_prompts"], result["trained_prompts"]) == (1, {"checked": True, "found": 1, "left_out": True})
    assert "1 that were trained on are left out" in render(result)
    result = evaluate(replace(config, compare_plain=False, allow_trained_prompts=True), notes.append)
    assert (result["num_prompts"], result["trained_prompts"]["left_out"]) == (2, False)
    assert any("flatters the drafter" in note for note in notes if isinstance(note, str))
    (config.drafter / "trainer" / "groups.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match=r"groups.npy cannot be read"):
        evaluate(config)


def test_the_command_warns_of_prompts_that_were_regenerated_in_another_way(
    config: EvaluateConfig, target_folder: Path
) -> None:
    from click.testing import CliRunner

    from dflash_train.cli import main
    from dflash_train.stage1_target.generation import settings_path
    from dflash_train.stage1_target.regenerate import RegenerateConfig, make_settings

    prompts = Path(config.prompts[0])
    made = make_settings(
        RegenerateConfig(
            target=config.target,
            source="questions.jsonl",
            output=prompts,
            chat_template_arguments={"enable_thinking": False},
        ),
        None,
    )
    settings_path(prompts).write_text(json.dumps(made.__dict__))
    words = ["evaluate", "--target", str(target_folder), "--drafter", str(config.drafter), "--data", str(prompts)]
    words += ["--gpus", "cpu", "--max-new-tokens", "2", "--no-plain", "--json"]
    text = """were regenerated with --chat-template-arguments '{"enable_thinking": false}', not '{}'"""
    for arguments, warned in (([], True), (["--chat-template-arguments", '{"enable_thinking": false}'], False)):
        result = CliRunner().invoke(main, [*words, *arguments])
        assert result.exit_code == 0, result.output
        assert (text in " ".join(result.stderr.split())) is warned


def test_prompts_that_were_regenerated_with_another_template_or_revision_are_warned_of(config: EvaluateConfig) -> None:
    from dflash_train.stage1_target.generation import settings_path
    from dflash_train.stage1_target.regenerate import RegenerateConfig, make_settings
    from dflash_train.stage1_target.target_config import load_tokenizer
    from dflash_train.stage1_target.tokenization import hash_chat_template

    prompts, notes = Path(config.prompts[0]), list[Any]()
    asked = RegenerateConfig(target=config.target, source="questions.jsonl", output=prompts)
    own = hash_chat_template(load_tokenizer(config.target))
    for made_with in ("0" * 16, own, None):
        notes.clear()
        settings_path(prompts).write_text(json.dumps(make_settings(asked, None, made_with).__dict__))
        evaluate(replace(config, compare_plain=False, max_new_tokens=2), notes.append)
        warned = [note for note in notes if isinstance(note, str) and "regenerated" in note]
        assert len(warned) == (made_with == "0" * 16)
        assert all(f"another chat template than this target's (hash {made_with}, here {own})" in one for one in warned)
    notes.clear()
    made = make_settings(replace(asked, target=replace(config.target, revision="v1")), None)
    settings_path(prompts).write_text(json.dumps(made.__dict__))
    evaluate(
        replace(config, target=replace(config.target, revision="v2"), max_new_tokens=2, compare_plain=False),
        notes.append,
    )
    assert any("by revision 'v1' of the target, not by 'v2'" in note for note in notes if isinstance(note, str))


def test_settings_beside_the_copy_of_a_benchmark_are_compared_too(config: EvaluateConfig, tmp_path: Path) -> None:
    from dflash_train.stage1_target.generation import settings_path
    from dflash_train.stage1_target.regenerate import RegenerateConfig, make_settings

    copy, notes = tmp_path / "copy.jsonl", list[Any]()
    copy.write_text(json.dumps({"question": "How many?"}) + "\n")
    arguments = {"enable_thinking": False}
    made = RegenerateConfig(target=config.target, source="q.jsonl", output=copy, chat_template_arguments=arguments)
    settings_path(copy).write_text(json.dumps(make_settings(made, None).__dict__))
    evaluate(replace(config, prompts=(f"gsm8k={copy}",), compare_plain=False, max_new_tokens=2), notes.append)
    assert sum("answers in copy.jsonl were regenerated with --chat-template-arg" in note for note in notes[:-1]) == 1


@pytest.fixture
def two_data_sets(config: EvaluateConfig) -> dict[str, Any]:
    """A report with known numbers of two files of one name."""

    def answered(index: int, source: str, plain_seconds: float, *rounds: Round) -> PromptResult:
        token_ids = [0] * (1 + sum(round_.num_produced for round_ in rounds))
        speculative = DecodeResult(token_ids=token_ids, rounds=list(rounds), decode_seconds=2.0)
        plain = DecodeResult(token_ids=token_ids, decode_seconds=plain_seconds)
        turn = TurnResult(num_prompt_tokens=5, speculative=speculative, plain=plain)
        return PromptResult(index=index, source=source, turns=[turn])

    one = answered(0, "one/test.jsonl", 4.0, Round(3, 3, 4), Round(3, 0, 1), Round(3, 3, 4))
    two = answered(1, "two/test.jsonl", 6.0, Round(3, 0, 1))
    more = answered(2, "two/test.jsonl", 6.0, Round(3, 1, 2), Round(2, 0, 1))
    head = evaluate(replace(config, compare_plain=False, max_prompts=1, max_new_tokens=2))
    return {**head, "num_planned_prompts": 3, **summarise([one, two, more], block_size=4)}


def test_the_tables_have_the_numbers_of_each_data_set_and_position(two_data_sets: dict[str, Any]) -> None:
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in render(two_data_sets).splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) > 1}
    assert rows == {
        # prompts, acceptance length, over answers, first draft right, tokens/s, plain, speed-up
        "one/test.jsonl": ["1", "3.00", "3.00", "66.7%", "4.5", "2.2", "2.00"],
        "two/test.jsonl": ["2", "1.33", "1.25", "33.3%", "1.0", "0.3", "3.00"],
        # drafted, accepted, if reached, of drafted, rounds of this length
        "anchor": ["", "", "", "", "3"],
        "1": ["6", "3", "50.0%", "50.0%", "1"],
        "2": ["6", "2", "66.7%", "33.3%", "0"],
        "3": ["5", "2", "100.0%", "40.0%", "2"],
    }


def test_the_picture_has_a_curve_of_each_data_set_and_the_lengths_of_rounds(
    two_data_sets: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    from dflash_train.speculate.plots import plot_acceptance

    figures, savefig = list[Any](), Figure.savefig

    def watched(self: Figure, *arguments: Any, **settings: Any) -> None:
        figures.append(self)
        savefig(self, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", watched)
    plot_acceptance(two_data_sets, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    accepted, lengths = figures[0].axes
    curves = {line.get_label(): [round(float(y), 3) for y in line.get_ydata()] for line in accepted.lines}
    assert curves == {
        "one/test.jsonl: 3.00": [1.0, 0.667, 0.667, 0.667],
        "two/test.jsonl: 1.33": [1.0, 0.333, 0.0, 0.0],
        "all: 2.17": [1.0, 0.5, 0.333, 0.4],
    }
    assert all(list(line.get_xdata()) == [0, 1, 2, 3] for line in accepted.lines)
    bars = [(round(bar.get_x() + bar.get_width() / 2), bar.get_height()) for bar in lengths.patches]
    assert bars == [(1, 3), (2, 1), (3, 0), (4, 2)]
    assert [line.get_label() for line in lengths.lines] == ["mean: 2.17"]
    assert list(lengths.lines[0].get_xdata()) == [two_data_sets["acceptance_length"]] * 2
    plot_acceptance({**two_data_sets, "data_sets": two_data_sets["data_sets"][:1]}, tmp_path / "one.png")
    assert [line.get_label() for line in figures[1].axes[0].lines] == ["test.jsonl: 2.17"]


def test_the_reference_is_z_labs_package(config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Path(__file__).parents[1] / ".oracle"
    if not (oracle / "dflash").is_dir():
        pytest.skip("needs z-lab's dflash 0.1.0 in tests/.oracle")
    monkeypatch.syspath_prepend(str(oracle))
    result = evaluate(replace(config, reference=True, compare_plain=False, block_size=3))
    assert result["reference"] == {"num_equal": 2, "differences": [], "same": True}
    assert "Output equals that of z-lab's package on all 2 prompts." in render(result)
    monkeypatch.setattr("dflash_train.speculate.zlab.ZlabDrafter.decode", lambda *arguments: [7] * 12)
    result = evaluate(replace(config, reference=True, compare_plain=False))
    assert result["reference"]["same"] is False
    assert "differs from that of z-lab's package on 2 of 2 prompts" in " ".join(render(result).split())


def test_a_recurrent_target_is_not_compared_with_the_reference(
    config: EvaluateConfig, drafter: Drafter, tiny_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "check_reference", lambda: None)
    monkeypatch.setattr(evaluation, "ZlabDrafter", lambda *arguments: object())
    save_drafter(drafter, config.drafter, num_target_layers=5)
    config = replace(config, target=replace(config.target, name=str(tiny_target("linear_attention"))))
    with pytest.raises(InputError, match="--reference cannot be compared on a target with recurrent layers"):
        evaluate(replace(config, reference=True))


def test_a_reference_that_cannot_be_had_is_refused(config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--reference compares token by token, which --temperature 0.5 leaves"):
        replace(config, reference=True, temperature=0.5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps --target zlab dflash==0.1.0"):
        evaluate(replace(config, reference=True))
