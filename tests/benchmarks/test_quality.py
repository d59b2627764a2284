"""The quality benchmark: which runs a plan means, what a cut leaves to do, and when a difference counts as a pass."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_train.benchmarks import peer_training, quality, quality_data, quality_facts, quality_plan, quality_table
from dflash_train.benchmarks.random_target import make_target
from dflash_train.store.reader import StoreReader

SETTINGS = {"lr": 0.002}


def line(variant: str, seed: int, length: float, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "variant": variant,
        "seed": seed,
        "steps": 10,
        "settings": SETTINGS,
        "acceptance_length": length,
        "training_loss": 3.0,
        "held_out": {"accuracy": [0.5, 0.25], "acceptance_length": length},
        "bytes": {"features": 5760 if variant.startswith("bf16") else 580},
        "rows": {"hash": f"rows-{seed}", "as_planned": True, "samples": 7, "supervised_tokens": 1234, "passes": 8.44},
        "device": "cpu",
        "versions": {"torch": "2"},
        "date": "2026-11-30T00:00:00",
    }
    return values | more


def test_plans_share_runs_and_take_whole_seeds_in_turn() -> None:
    runs = quality_plan.expand(("encodings", "recipe", "precision"), (0, 1))
    assert len(runs) == len({(variant.name, seed) for variant, seed in runs})
    seeds = [seed for _, seed in runs]
    assert seeds == sorted(seeds) and seeds.count(0) == seeds.count(1) == 7 + 9 + 1
    assert [variant.name for variant, _ in runs][:2] == ["bf16", "bf16-as-tapped"]
    assert [variant.name for variant, _ in quality_plan.expand(("recipe",), (5,), ("dpace",))] == ["dpace"]
    with pytest.raises(SystemExit, match="bf15: no variants of these plans"):
        quality_plan.expand(("recipe",), (5,), ("bf15",))


def test_every_variant_of_a_table_is_run_by_a_plan() -> None:
    planned = {variant.name for plan in quality_plan.PLANS.values() for variant in plan}
    tabled = {name for variants in quality_table.RECIPES.values() for name in variants}
    assert tabled | set(quality_table.ENCODINGS) | {"fp8"} <= planned <= quality_table.MEANINGS.keys()


def test_only_finished_runs_with_the_same_settings_are_skipped(tmp_path: Path) -> None:
    runs = quality_plan.expand(("precision",), (0, 1))
    path = tmp_path / "results.jsonl"
    lines = [line("int8", 0, 2.0), line("fp8", 0, 2.0, steps=20), line("fp8", 1, 2.0, settings={"lr": 0.1})]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines) + '{"variant": "int8", "se')
    left = quality_plan.missing(runs, quality_table.read_results(path), 10, SETTINGS)
    assert [(variant.name, seed) for variant, seed in left] == [("fp8", 0), ("int8", 1), ("fp8", 1)]


def test_a_line_takes_the_place_of_one_that_a_kill_tore(tmp_path: Path) -> None:
    path, lines = tmp_path / "results.jsonl", [line("int8", seed, 2.0) for seed in range(3)]
    quality_table.append_result(path, lines[0])
    with path.open("a") as file:
        file.write(json.dumps(lines[1])[:40])
    assert quality_table.read_results(path) == lines[:1]
    for entry in lines[1:]:
        quality_table.append_result(path, entry)
    assert quality_table.read_results(path) == lines


class NoCommands(quality.Benchmark):
    """All commands do nothing; an evaluation measured no round."""

    def dflash(self, log: Path, *words: object) -> None:
        if words[0] == "evaluate":
            Path(str(words[words.index("--output") + 1])).write_text(json.dumps({"acceptance_length": None}))

    def _line(
        self, variant: quality_plan.Variant, seed: int, run: Path, log: Path, report: dict[str, Any]
    ) -> dict[str, Any]:
        return report


def make_benchmark(folder: Path) -> quality.Benchmark:
    data = folder / "data.jsonl"
    data.write_text("")
    words = (
        f"--target T --data {data} --held-out {data} --folder {folder}/work --results {folder}/results.jsonl --gpus cpu"
    )
    return NoCommands(quality.make_parser().parse_args([*words.split(), "--plan", "encodings"]))


def test_a_run_without_a_round_is_a_failure_and_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = make_benchmark(tmp_path)
    monkeypatch.setattr(benchmark, "_compile_cache", lambda variant: tmp_path / "none")
    with pytest.raises(quality.Failed, match="int8, seed 0: no round was measured"):
        benchmark.run(quality_plan.Variant("int8", "int8"), 0)
    assert not (tmp_path / "results.jsonl").exists()


def test_questions_that_some_variant_is_trained_on_are_refused(tmp_path: Path) -> None:
    """Else its acceptance length would be of other prompts than the other variants'."""

    def write(name: str, *questions: str) -> Path:
        turns = [[{"role": "user", "content": question}] for question in questions]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        return path

    for data, original in ((("One?", " Two? "), ("Three?",)), (("One?",), ("Three?", "Two?"))):
        benchmark = make_benchmark(tmp_path)
        benchmark.options.held_out = write("held", "Two?", "Four?")
        benchmark.options.data, benchmark.options.original = write("answers", *data), write("theirs", *original)
        wrong = "answers" if len(data) == 2 else "theirs"
        with pytest.raises(SystemExit, match=rf"^1 questions of .*held.jsonl are in .*{wrong}.jsonl too: leave them"):
            benchmark.execute()
        assert benchmark._held is not None
        benchmark._held.close()


def test_all_variants_are_evaluated_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, asked = make_benchmark(tmp_path), list[list[str]]()
    monkeypatch.setattr(benchmark, "_compile_cache", lambda variant: tmp_path / "none")
    monkeypatch.setattr(benchmark, "call", lambda *arguments: 0)
    benchmark.options.held_out = tmp_path / "held.jsonl"
    dflash = benchmark.dflash

    def watched(log: Path, *words: object) -> None:
        if words[0] == "evaluate":
            own = {words.index(name) + 1 for name in ("--drafter", "--output")}
            asked.append([str(word) for place, word in enumerate(words) if place not in own])
        dflash(log, *words)

    monkeypatch.setattr(benchmark, "dflash", watched)
    for variant in {variant.name: variant for plan in quality_plan.PLANS.values() for variant in plan}.values():
        with pytest.raises(quality.Failed, match="no round"):
            benchmark.run(variant, 0)
    assert len(asked) > 15 and all(words == asked[0] for words in asked)
    assert asked[0][asked[0].index("--data") + 1] == str(benchmark.options.held_out)


def test_a_peer_runs_on_the_gpu_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_train.machine.devices._gpu_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    benchmark, called = make_benchmark(tmp_path), list[dict[str, str]]()
    benchmark.options.gpus, benchmark.on_cpu = "1", False

    def call(log: Path, words: Any, environment: dict[str, str] | None = None) -> int:
        called.append(environment or {})
        return 0

    monkeypatch.setattr(benchmark, "call", call)
    benchmark._train_peer(quality_plan.PLANS["peer"][2], 0, tmp_path / "run", tmp_path / "log")
    assert called[0]["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_a_line_has_the_graphs_of_ours_and_of_the_peers_and_whether_torchs_limit_was_passed() -> None:
    ours = "step 10\ncompiled 6 graphs in 31 s, 0 recompilations in 2,500 steps\n"
    facts = {"graphs": 6, "compile_seconds": 31, "recompilations": 0, "recompile_limit_passed": None}
    assert quality_facts.compile_facts(ours) == facts
    once = "compiled 1 graph in 31 s, 1 recompilation in 1 step\n"
    assert quality_facts.compile_facts(once) == {**facts, "graphs": 1, "recompilations": 1}
    assert set(quality_facts.compile_facts("nothing compiled").values()) == {None}
    assert peer_training.closing_line({"steps": 2500, "seconds": 99.6, "ms_per_step": None, "graphs": 0}).endswith(
        "2,500 steps in 100 s, median 0.0 ms, 0 graphs compiled. Measure it by:"
    )
    result = {"steps": 2500, "seconds": 99.6, "ms_per_step": 31.25, "graphs": 17}
    facts = {"graphs": 17, "compile_seconds": None, "recompilations": None, "recompile_limit_passed": False}
    assert quality_facts.compile_facts(peer_training.closing_line(result)) == facts
    # the warning as this torch words it
    compiled = """import torch
torch._dynamo.config.recompile_limit = 1
run = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
for size in range(2, 5):
    run(torch.ones(size))
"""
    command = [sys.executable, "-c", compiled]
    log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert quality_facts.compile_facts(peer_training.closing_line(result) + log) == facts, "an evaluation's warning"
    facts["recompile_limit_passed"] = True
    assert quality_facts.compile_facts(log + peer_training.closing_line(result)) == facts


def test_a_copy_that_fails_does_not_stop_the_runs_of_other_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(source: Path, copy: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quality, "copy_as_tapped", no_space)
    benchmark = make_benchmark(tmp_path)
    benchmark.make_stores(["bf16", "bf16-as-tapped", "int8"])
    assert benchmark.failures == ["OSError: [Errno 28] No space left on device"]


def test_a_folder_is_held_until_the_last_command_of_a_killed_run_has_ended(tmp_path: Path) -> None:
    first = make_benchmark(tmp_path)
    first.hold_folder()
    assert first._held is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(first._held.fileno(),)) as left:
        first._held.close()
        with pytest.raises(SystemExit, match="in use by another run, or by a command"):
            make_benchmark(tmp_path).execute()
        left.communicate()
    again = make_benchmark(tmp_path)
    assert again.call(tmp_path / "log", ["-c", "pass"]) == 0
    again.hold_folder()
    assert again.call(tmp_path / "log", ["-c", f"import os; os.fstat({again._held and again._held.fileno()})"]) == 0
    again._held.close()  # type: ignore[union-attr]


def test_differences_are_paired_by_seed() -> None:
    lines = [line("bf16", seed, 2.0 + seed) for seed in range(4)]
    lines += [line("int8", seed, 2.0 + seed + delta) for seed, delta in enumerate((-0.01, 0.0, -0.02))]
    difference = quality_table.paired_difference(lines, "int8", "bf16")
    assert difference is not None and difference.num_pairs == 3
    assert difference.mean == pytest.approx(-0.01)
    assert difference.error == pytest.approx(0.01 / np.sqrt(3))
    assert difference.relative == pytest.approx(-0.01 / 3)
    assert str(difference) == "-0.010 ± 0.006 (-0.3%)"
    assert quality_table.paired_difference(lines, "fp8", "bf16") is None
    lines.append(line("int8", 0, 2.02))  # run again: the newest counts
    newer = quality_table.paired_difference(lines, "int8", "bf16")
    assert newer is not None and newer.mean == pytest.approx(0.0) and newer.num_pairs == 3


@pytest.mark.parametrize(
    ("mean", "error", "relative", "passes"),
    [
        (0.1, 0.05, 0.05, True),
        (-0.05, 0.05, -0.025, True),
        (-0.06, 0.05, -0.02, False),  # beyond one standard error
        (-0.08, 0.1, -0.04, False),  # beyond 3 %
        (0.1, None, 0.05, None),
    ],
)
def test_a_pass_is_within_one_standard_error_and_three_percent(
    mean: float, error: float | None, relative: float, passes: bool | None
) -> None:
    assert quality_table.Difference(3, mean, error, relative).passes is passes


def test_tables_have_a_row_a_variant_and_tell_settings_apart() -> None:
    lines = [line(name, seed, 2.0 + seed) for name in ("bf16-as-tapped", "bf16", "int8") for seed in range(2)]
    anchors = [{"acceptance_length_over_anchors": 2.2}, {}]  # the second of before it was recorded
    lines += [line("projected-int8-H", seed, 2.1 + seed, **more) for seed, more in enumerate(anchors)]
    lines += [line(name, 0, 2.0) for name in ("fp8", "dpace", "fraction-0.5", "peer-specforge")]
    lines += [line("int8", 0, 2.0, steps=99)]
    text = quality_table.format_tables(lines)
    row = "| projected-int8, r = H | 580 (0.10) | 3.000 | 50.0% | 2.600 | 2.200 | 2.600 ± 0.500 (2) | +0.100 ± 0.000 (+4.0%)"
    assert f"{row} | yes |" in text
    assert "| half of the samples | 7 | 1,234 | 8.4 |" in text
    for title in ("### FP8", "### Loss", "### Training data", "### Against SpecForge", "99 steps"):
        assert text.count(title) == 1
    assert "The runs of a seed were trained on the same rows" in text


def test_ours_is_held_against_both_rules_of_the_peer() -> None:
    runs = [(variant.name, seed) for variant in quality_plan.PLANS["peer"] for seed in range(3)]
    shifts = {"peer-specforge": (0.0, 0.01, 0.02), "peer-our-labels": (0.2, 0.3, 0.2), "bf16": (0.02, 0.0, 0.0)}
    lines = [line(name, seed, 2.0 + seed + shifts.get(name, (0.0,) * 3)[seed]) for name, seed in runs]
    for entry in lines:
        if entry["variant"].startswith("peer-"):
            entry |= {"held_out": None, "training_loss": None}
    text = quality_table.format_tables(lines)
    heads = "| τ (seeds) | against SpecForge 0.2.0's step, its labels | against SpecForge 0.2.0's step, our labels |"
    assert heads in text and "### Encodings" not in text
    [tapped] = [row for row in text.splitlines() if row.startswith("| ours, bf16 as tapped (D = 1) |")]
    [scaled] = [row for row in text.splitlines() if row.startswith("| ours, bf16 with D |")]
    assert "-0.010 ± 0.006 (-0.3%), less | -0.233 ± 0.033 (-7.2%), less |" in tapped
    assert "-0.003 ± 0.012 (-0.1%), equal or better |" in scaled


def test_unlike_rows_are_named() -> None:
    lines = [line("bf16", 0, 2.0), line("int8", 0, 2.0, rows={"hash": "other", "as_planned": False})]
    assert quality_table.row_problems(lines, ("bf16", "int8")) == [
        "seed 0: bf16, int8 were not trained on the same rows",
        "seed 0: int8's steps do not have the tokens of the rows planned",
    ]


def test_prompts_are_distinct_short_and_read_up_to_the_cut() -> None:
    def conversation(identity: str, question: str, speaker: str = "human") -> dict[str, Any]:
        turns = [{"from": speaker, "value": question}, {"from": "gpt", "value": "an answer of words"}]
        return {"id": identity, "conversations": turns}

    entries = [
        conversation("a_0", "What is a tree?"),
        conversation("b_0", "what is a  TREE"),
        conversation("c_3", "What is a leaf, then?"),
        conversation("d_0", "Who?"),
        conversation("e_0", "What is a root, and why?", speaker="gpt"),
        conversation("f_0", "Qu'est-ce que c'est là-bas, été?"),
        conversation("g_0", "What is bark made of?"),
    ]
    text = json.dumps(entries)[:-1] + ', {"id": "h_0", "conversat'
    found = quality_data.choose(
        quality_data.read_objects(text), lambda words: len(words.split()), lambda answer: answer[:9], 3, 10
    )
    questions = {row["messages"][0]["content"] for row in found}
    assert questions == {"What is a tree?", "What is bark made of?"}
    assert {row["messages"][1]["content"] for row in found} == {"an answer"}


@pytest.mark.slow
def test_cut_and_run_again_trains_all_variants_on_the_same_rows(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "tiny", dtype="float32")
    generator, words = random.Random(0), ["quick", "brown", "fox", "lazy", "dog", "wizards", "pack"]
    for name, numbers in (("data", range(60)), ("held", range(100, 104))):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{number} {' '.join(generator.choices(words, k=6))}"},
                    {"role": "assistant", "content": " ".join(generator.choices(words, k=20))},
                ]
            }
            for number in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"""--target {tmp_path}/target --data {tmp_path}/data.jsonl --held-out {tmp_path}/held.jsonl
        --folder {tmp_path}/work --results {tmp_path}/results.jsonl --plan encodings --variant bf16-as-tapped
        --variant projected-int4-H --seeds 0 --steps 5 --parallel 2 --gpus cpu --row-tokens 512 --anchors 16 --num-taps 2
        --calibration-tokens 2000 --max-prompts 3 --max-new-tokens 12 --decode --keep-runs"""
    command = [sys.executable, quality.__file__, *options.split(), "--mask-token", "", "--target-layers", ""]
    command += ["--train-options", "--num-layers 1 --block-size 4", "--seconds"]
    results = tmp_path / "results.jsonl"
    cut = subprocess.run([*command, "6"], capture_output=True, text=True, check=True)
    assert "2 of 2 runs are left, 0 failures" in cut.stdout
    subprocess.run([*command, "300"], check=True, stdout=subprocess.DEVNULL)
    lines = quality_table.read_results(results)
    assert {entry["variant"] for entry in lines} == {"bf16-as-tapped", "projected-int4-H"}
    assert len({entry["rows"]["hash"] for entry in lines}) == 1
    for entry in lines:
        assert entry["rows"]["as_planned"] and entry["trained_prompts"] == {
            "checked": True,
            "found": 0,
            "left_out": True,
        }
        assert entry["acceptance_length"] >= 1 and len(entry["held_out"]["accuracy"]) == 3
    again = subprocess.run([*command, "300"], capture_output=True, text=True, check=True)
    assert "0 of 2 runs to do" in again.stdout
    tapped, scaled = (StoreReader(tmp_path / f"work/stores/{name}.zarr") for name in ("bf16-as-tapped", "bf16"))
    assert torch.equal(tapped.calibration.channel_scale, torch.ones(64))
    assert scaled.calibration.channel_scale.ne(1).any()
    np.testing.assert_array_equal(tapped.read(7).features, scaled.read(7).features)
    other = argparse.Namespace(holdout=0.03, row_tokens=512, rows_per_step=1)
    record, tokens = quality_facts.planned_rows(tmp_path / "work/stores/bf16.zarr", None, 1, 5, other, 1.0)
    assert record["hash"] != lines[0]["rows"]["hash"] and len(tokens) == 5
