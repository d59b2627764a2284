from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.commands.recipe import format_recipe, read_recipe
from dflash_train.errors import InputError

COMMANDS = ("extract", "train-drafter", "evaluate")


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def parse(name: str, *words: str) -> dict[str, Any]:
    return command(name).make_context(name, list(words), parent=click.Context(main)).params


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "train-drafter",
            ["--store", "s", "--run", "r", "--lr", "2e-3", "--betas", "0.8", "0.9", "--crop", "--steps", "0"],
        ),
        ("train-drafter", ["--store", "mit Leerzeichen/ä", "--run", 'quo"te', "--mask-token", "<|\u2581mask\\|>"]),
        ("evaluate", ["--target", "t", "--drafter", "d", "--data", "p", "--no-plain", "--max-prompts", "0"]),
        (
            "extract",
            ["--target", "t", "--data", "d", "--store", "s", "--chat-template-arguments", '{"enable_thinking": false}'],
        ),
    ],
)
def test_a_written_recipe_gives_the_same_options_back(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = parse(name, *words)
    (tmp_path / "recipe.toml").write_text(format_recipe(command(name), values), encoding="utf-8")
    again = parse(name, "--recipe", "recipe.toml")

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return value.absolute() if isinstance(value, Path) else value

    assert again == {key: absolute(value) for key, value in values.items()}


def test_several_data_sets_and_copies_of_benchmarks_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.jsonl").touch()
    words = ["--target", "t", "--drafter", "d", "--data", "gsm8k=copy.jsonl", "--data", "mbpp", "--data", "copy.jsonl"]
    (tmp_path / "r.toml").write_text(format_recipe(command("evaluate"), parse("evaluate", *words)))
    file = str(tmp_path / "copy.jsonl")
    assert parse("evaluate", "--recipe", "r.toml")["data"] == (f"gsm8k={file}", "mbpp", file)
    (tmp_path / "one.toml").write_text('[evaluate]\ntarget = "t"\ndrafter = "d"\ndata = "p"\n')
    assert parse("evaluate", "--recipe", "one.toml")["data"] == ("p",)


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[train-drafter]\nstore = "s"\nrun = "r"\nlr = 1e-3\nseed = 5\n[extract]\nencoding = "bf16"\n')
    values = parse("train-drafter", "--recipe", str(path), "--seed", "7")
    assert (values["lr"], values["seed"], values["num_layers"], values["run"]) == (1e-3, 7, 5, Path("r"))


def test_a_table_of_template_arguments_is_taken_as_json(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[extract]\nchat-template-arguments = { enable_thinking = false }\n")
    values = read_recipe(path, command("extract"), COMMANDS)
    assert values == {"chat_template_arguments": '{"enable_thinking": false}'}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[train-drafter]\nlearning-rat = 1", r"unknown option 'learning-rat' in \[train-drafter\]; known are store"),
        ("[train-drafter]\nrow-token = 1", "the nearest known name is 'row-tokens'"),
        ("[train_drafter]\nlr = 1", "the nearest known name is 'train-drafter'"),
        ("lr = 1", "has 'lr' at its top; put options into a table"),
        ("[train-drafter\nlr = 1", "is not TOML"),
    ],
)
def test_what_a_recipe_has_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_recipe(path, command("train-drafter"), COMMANDS)


def test_wrong_recipes_end_a_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[train-drafter]\nstore = "s"\nrun = "r"\nlr = "fast"\n')
    result = CliRunner().invoke(main, ["train-drafter", "--recipe", str(path)])
    assert (result.exit_code, "'fast' is not a valid float" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["train-drafter", "--recipe", str(tmp_path / "no.toml")])
    assert (result.exit_code, "cannot be read" in result.output) == (1, True)
    assert "Traceback" not in result.output
