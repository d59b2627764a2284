"""The commands: every option is a field of the stage's config with the same default, and bad input is one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dflash_train.cli import main

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n} is long"},
        ]
    }
    for n in range(12)
]


REQUIRED = {
    "regenerate": ["--target", "t", "--data", "d", "--output", "o"],
    "extract": ["--target", "t", "--data", "d", "--store", "s"],
    "train-drafter": ["--store", "s", "--run", "r"],
    "evaluate": ["--target", "t", "--drafter", "d", "--data", "p"],
    "check": ["d", "--target", "t"],
}


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def defaults_of(*classes: Any) -> dict[str, Any]:
    fields = {field.name: field for cls in classes for field in dataclasses.fields(cls)}
    values = {name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING}
    for name, field in fields.items():
        if field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
    return values


@pytest.mark.parametrize("command", ["regenerate", "extract", "train-drafter", "evaluate", "check"])
def test_option_defaults_are_those_of_the_config(command: str) -> None:
    from dflash_train.speculate.check import CheckConfig
    from dflash_train.speculate.evaluate import EvaluateConfig
    from dflash_train.stage1_target.extract import ExtractConfig
    from dflash_train.stage1_target.import_config import ImportConfig
    from dflash_train.stage1_target.regenerate import RegenerateConfig
    from dflash_train.stage1_target.samples import DataConfig
    from dflash_train.stage1_target.target_config import TargetConfig
    from dflash_train.stage2_drafter.config import TrainConfig

    classes = {
        "regenerate": (RegenerateConfig, TargetConfig),
        "extract": (ExtractConfig, DataConfig, TargetConfig),
        "import-store": (ImportConfig, TargetConfig),
        "train-drafter": (TrainConfig,),
        "evaluate": (EvaluateConfig, TargetConfig),
        "check": (CheckConfig, TargetConfig),
    }
    renamed = {"gpus": "devices", "target_layers": "target_layer_ids", "data": "source"}
    if command in ("evaluate", "check"):
        renamed |= {"gpus": "device", "data": "prompts"}
    context = click.Context(main)
    found = main.get_command(context, command)
    assert found is not None
    values = found.make_context(command, REQUIRED[command], parent=context).params
    options = {
        renamed.get(name, name): value
        for name, value in values.items()
        if name
        not in ("allow_busy_gpus", "as_json", "output", "plot", "target", "data", "store", "stores", "run", "drafter")
    }
    wanted = defaults_of(*classes[command])
    if command == "train-drafter":
        assert wanted.pop("more_stores") == ()  # --store again
    if command == "check":
        wanted["engines"] = ()  # the config takes none for all
    if command in ("evaluate", "check"):
        wanted["device"] = None  # the CLI resolves devices through --gpus
    options["chat_template_arguments"] = json.loads(options.pop("chat_template_arguments", "{}"))
    wanted.setdefault("chat_template_arguments", {})
    assert not wanted.keys() - options.keys(), "fields without an option"
    assert options == {name: wanted[name] for name in options}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_help_of_replay_promises_equal_rounds_in_float32_alone() -> None:
    words = " ".join(CliRunner().invoke(main, ["evaluate", "--help"], terminal_width=120).output.split())
    said = words[words.index("--replay ") : words.index("--batch-size ")]
    assert "exact" not in said and "In float32 the rounds are those of decoding; in bfloat16 up to rounding." in said


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["extract"], 2, "Missing option '--target'"),
        (["inspect-store", "nowhere.zarr"], 1, "nowhere.zarr is not there"),
        (["inspect-store", "nowhere.zarr", "--verify", "recompute"], 2, "give --target"),
        (["train-drafter", "--store", "nowhere.zarr", "--run", "r", "--gpus", "cpu"], 1, "nowhere.zarr is not there"),
        (["train-drafter", "--store", "s", "--run", "r", "--steps", "5", "--epochs", "2"], 1, "Both --steps 5"),
        (["train-drafter", "--store", "s", "--run", "r", "--lr", "fast"], 2, "'fast' is not a valid float"),
        (["extract", "--target", "t", "--data", "d", "--store", "s", "--target-layers", "a"], 2, "write layer numbers"),
        (
            ["extract", "--target", "t", "--data", "d", "--store", "s", "--chat-template-arguments", "[1]"],
            2,
            "no JSON object",
        ),
        (["check", "d", "--target", "t", "--gpus", "cpu:2"], 1, "name one"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == status, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("encoding", [["bf16"], ["projected-int4", "--rank", "23"]])
def test_the_commands_in_a_row(tmp_path: Path, data: Path, tiny_target: Any, encoding: list[str]) -> None:
    """extract, inspect, verify, recompute, train and evaluate a tiny target, as a user would."""
    target, store, folder = tiny_target("llama"), tmp_path / "s.zarr", tmp_path / "run"
    extract = ["extract", "--target", target, "--data", data, "--store", store, "--gpus", "cpu", "--num-taps", 2]
    extract += ["--sample-cache", tmp_path / "cache", "--encoding", *encoding]
    dry = run(*extract, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "dry run: nothing was stored" in dry.output
    assert not store.exists()
    done = run(*extract)
    assert done.exit_code == 0, done.output
    assert "stored 12 of 12" in done.output
    assert "nothing to do: all 12 samples are stored" in run(*extract).output

    report = json.loads(run("inspect-store", store, "--json").stdout)
    assert (report["samples"], report["segments"]) == (12, 1)
    assert run("inspect-store", store, "--verify", "checksums").exit_code == 0
    recompute = ["inspect-store", store, "--verify", "recompute", "--target", target, "--gpus", "cpu"]
    assert run(*recompute, "--tolerance", 0.001).exit_code == 0
    wrong = run("inspect-store", store, "--sample", "zz")
    assert (wrong.exit_code, "is no sample id" in wrong.output) == (1, True)

    train = ["train-drafter", "--store", store, "--run", folder, "--gpus", "cpu", "--num-layers", 1, "--block-size", 4]
    train += ["--row-tokens", 128, "--anchors", 16, "--rows-per-step", 1, "--steps", 2, "--mask-token", "<|mask|>"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "a new question"}) + "\n")
    measured = ["--evaluate-target", target, "--evaluate-prompts", asked, "--evaluate-new-tokens", 4]
    trained = run(*train, "--holdout", 0.2, *measured)
    assert trained.exit_code == 0, trained.output
    assert (folder / "checkpoints" / "step-00000002" / "model.safetensors").exists()
    assert trained.output.count(", real acceptance length ") == 2  # at the steps 0 and 2
    shutil.copy(folder / "recipe.toml", tmp_path / "again.toml")
    repeated = run("train-drafter", "--recipe", tmp_path / "again.toml", "--run", tmp_path / "again")
    assert repeated.exit_code == 0, repeated.output
    name = Path("checkpoints", "step-00000002", "model.safetensors")
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), "a recipe reproduces the run"

    evaluate = ["evaluate", "--target", target, "--drafter", folder, "--data", data, "--gpus", "cpu", "--json"]
    files = ["--output", tmp_path / "e.json", "--plot", tmp_path / "e.png"]
    evaluated = run(*evaluate, "--max-prompts", 2, "--max-new-tokens", 8, *files)
    assert evaluated.exit_code == 0, evaluated.output
    result = json.loads(evaluated.stdout)
    assert result == json.loads((tmp_path / "e.json").read_text())
    assert 1 <= result["acceptance_length"] <= 4
    assert result["trained_prompts"]["found"] > 0, "what was trained on is left out"
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")

    replayed = run(*evaluate, "--max-prompts", 2, "--max-new-tokens", 8, "--replay", "--batch-size", 1)
    assert replayed.exit_code == 0, replayed.output
    again = json.loads(replayed.stdout)
    assert (again["method"], again["lossless"], again["speculative"]["tokens_per_second"]) == ("replay", None, None)
    assert (again["histogram"], again["positions"]) == (result["histogram"], result["positions"])

    checked = run("check", folder, "--target", target, "--gpus", "cpu", "--output", tmp_path / "c.json")
    assert checked.exit_code == 0, checked.output
    assert "training record: config.json is as the trainer wrote it" in checked.output
    assert "num_speculative_tokens" in json.loads((tmp_path / "c.json").read_text())["commands"]["vllm"]
    for name_of_format, source in (("z-lab", []), ("speculators", ["--store", store])):
        exported = run("export", folder, tmp_path / name_of_format, "--format", name_of_format, *source)
        assert exported.exit_code == 0, exported.output
    assert run("check", tmp_path / "z-lab", "--target", target, "--gpus", "cpu", "--no-parity").exit_code == 0

    flipped = next((store / "segments").glob("*/features/c/0/0"))
    content = bytearray(flipped.read_bytes())
    content[100] ^= 1
    flipped.write_bytes(content)
    damaged = run("inspect-store", store, "--verify", "checksums")
    assert (damaged.exit_code, "features" in damaged.output) == (1, True)
