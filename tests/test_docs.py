"""The documents: commands that run or at least parse, links that lead somewhere, numbers that follow from their formula.

A command is what stands in a code block (or in back quotes in the text). It is parsed by click: every option must exist
and every value have its type. The commands of the quick start run too, in the order of the document, on a tiny target and
with the small sizes of `SMALL`, unless `<!-- needs: … -->` stands before their block.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_train.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *EXAMPLES]
FENCE = re.compile(r"```(\w*)")
NEEDS = re.compile(r"<!-- needs: (.+) -->")
OF_Z_LAB = ("generate", "benchmark")  # the commands of PyPI's dflash

# What the test adds to a command of the quick start: sizes for a tiny target on a CPU.
SMALL = {
    "regenerate": "--gpus cpu --max-new-tokens 4 --keep-unfinished",
    "extract": "--gpus cpu --sample-cache cache",
    "train-drafter": "--gpus cpu --num-layers 1 --row-tokens 128 --anchors 16 --rows-per-step 1 --steps 1 --holdout 0.2",
    "evaluate": "--gpus cpu --max-prompts 1 --max-new-tokens 6",
}

# … and to the commands of examples/smollm2-gpu, over its recipe.
SMALL_EXAMPLE = {
    "regenerate": "--target my-target --gpus cpu --max-new-tokens 6 --keep-unfinished --batch-size 8",
    "extract": "--target my-target --gpus cpu --target-layers 1,3,5,7,9 --sample-cache cache",
    "train-drafter": "--gpus cpu --num-layers 1 --mask-token 3 --row-tokens 128 --anchors 16 --steps 2 --holdout 0.2",
    "evaluate": "--target my-target --gpus cpu --max-new-tokens 6",
}


@dataclass(frozen=True)
class Command:
    """One command line of a document."""

    document: str
    line: int
    words: tuple[str, ...]
    """What follows `dflash`."""
    needs: str | None
    """What it cannot run without, as its block is marked."""
    in_text: bool = False
    """In back quotes in a sentence, where required options may be left out."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line} dflash {' '.join(self.words)}"


def words_after_dflash(line: str) -> tuple[str, ...] | None:
    """The arguments of a line that runs dflash, also through torchrun; None for any other line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    for number, word in enumerate(words):
        runs = word in ("dflash", "dflash-train") and words[:number] in ([], ["$"], ["srun"])
        # without the --, torchrun takes --run for its own --run-path
        if runs or (word == "dflash_train.cli" and words[max(number - 2, 0) : number] == ["-m", "--"]):
            return tuple(words[number + 1 :])
    return None


def code_lines(text: str) -> Iterator[tuple[int, str, str, str | None]]:
    """(line number, language, line, needs) of every line in a fenced or indented block; continued lines are joined."""
    needs: str | None = None
    language: str | None = None
    joined = ""
    in_block = False
    for number, line in enumerate(text.split("\n"), start=1):
        if language is None and (marker := NEEDS.fullmatch(line.strip())):
            needs = marker[1]
            continue
        if fence := FENCE.match(line):
            language = fence[1] if language is None else None
            in_block, needs = language is not None, needs if language is not None else None
            continue
        if language is None:
            indented = line.startswith("    ")
            if in_block and line.strip() and not indented:
                in_block, needs = False, None
            in_block |= indented
            if not indented:
                if line.strip():
                    needs = None
                continue
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        yield number, language or "", joined, needs
        joined = ""


def commands_of(document: Path) -> Iterator[Command]:
    text, name = document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))
    for number, _, line, needs in code_lines(text):
        words = words_after_dflash(line)
        if words is not None:
            yield Command(name, number, words, needs)
    for number, line in enumerate(text.split("\n"), start=1):
        for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", "" if line.startswith("    ") else line):
            words = words_after_dflash(quoted)
            if words is not None:
                yield Command(name, number, words, None, in_text=True)


ALL = [command for document in DOCUMENTS for command in commands_of(document)]


def test_commands_are_found() -> None:
    """A document whose commands are no longer found would pass every other test here."""
    found = {command.document for command in ALL if not command.in_text}
    assert {"README.md", "docs/quick-start.md", "docs/several-gpus.md"} <= found
    assert sum(command.document == "docs/several-gpus.md" and command.needs is not None for command in ALL) >= 5
    assert {command.words[0] for command in ALL if command.words} >= set(COMMANDS), "a command that no document shows"


@pytest.mark.parametrize("command", ALL, ids=str)
def test_command_parses(command: Command) -> None:
    name = next((word for word in command.words if not word.startswith("-")), None)
    if name in OF_Z_LAB:
        return
    context = click.Context(main, info_name="dflash")
    if name is None or name not in COMMANDS:
        main.make_parser(context).parse_args(list(command.words))
        assert name is None or (command.in_text and name == "COMMAND"), f"{command}: no such command"
        return
    found = main.get_command(context, name)
    assert found is not None
    own = click.Context(found, info_name=name, parent=context)
    values, rest, _ = found.make_parser(own).parse_args(list(command.words[command.words.index(name) + 1 :]))
    assert not rest, f"{command}: too many arguments"
    for parameter in found.params:
        value = values.get(parameter.name or "")
        value = None if type(value).__name__ == "Sentinel" else value  # click 8.3 for what is not given
        if value is not None and not isinstance(parameter.type, click.types.BoolParamType):
            parameter.type_cast_value(own, value)
        complete = not parameter.required or value is not None or "recipe" in values
        assert complete or command.in_text, f"{command}: {parameter.name} is missing"


def test_the_quick_start_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, quick_start_target: Path
) -> None:
    """Every command of the document that is not marked, in order, ends with status 0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-target").symlink_to(quick_start_target)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": f"the answer {n}"},
            ]
        }
        for n in range(12)
    ]
    for name in ("conversations.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = []
    for command in commands_of(ROOT / "docs" / "quick-start.md"):
        if command.in_text or command.needs is not None:
            continue
        words = [*command.words, *shlex.split(SMALL.get(command.words[0], ""))]
        if "recompute" in words:
            words += ["--gpus", "cpu"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, f"{command}: {result.output}"
        ran.append(command.words[0])
    assert set(ran) >= {"regenerate", "extract", "inspect-store", "train-drafter", "evaluate"}
    assert (tmp_path / "runs" / "first" / "evaluation.json").is_file()


def test_the_smollm2_example_runs_from_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_start_target: Path
) -> None:
    """The four commands of its README in their order; no measured prompt was trained on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-target").symlink_to(quick_start_target)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(20)))
    ran = []
    for command in commands_of(ROOT / "examples" / "smollm2-gpu" / "README.md"):
        if command.in_text:
            continue
        result = CliRunner().invoke(main, [*command.words, *shlex.split(SMALL_EXAMPLE[command.words[0]])])
        assert result.exit_code == 0, f"{command}: {result.output}"
        ran.append(command.words[0])
    assert ran == list(SMALL_EXAMPLE)
    run = tmp_path / "runs" / "smollm2"
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["trained_prompts"]["left_out"] and evaluation["trained_prompts"]["found"] > 0
    assert evaluation["trained_prompts"]["found"] + evaluation["num_prompts"] == 20
    recipe = tomllib.loads((run / "recipe.toml").read_text())["train-drafter"]
    assert (recipe["lr"], recipe["block-size"], recipe["steps"]) == (2e-3, 16, 2), "the recipe, and flags over it"


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples").glob("*/*.toml")), ids=lambda path: path.name)
def test_recipes_of_the_examples_give_all_that_their_commands_need(recipe: Path) -> None:
    for name in tomllib.loads(recipe.read_text(encoding="utf-8")):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, ["--recipe", str(recipe)], parent=click.Context(main))


def test_forecasts_of_the_paper_recipe_are_what_its_script_prints() -> None:
    path = ROOT / "examples" / "qwen3" / "forecast.py"
    spec = importlib.util.spec_from_file_location("forecast", path)
    assert spec is not None and spec.loader is not None
    forecast = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forecast)
    text = path.with_name("README.md").read_text(encoding="utf-8")
    for table in forecast.tables():
        assert "\n".join(table) in text, "python examples/qwen3/forecast.py prints another table"
    fill = forecast.fill_of_rows()
    steps = forecast.num_rows(800_000, fill) / forecast.ROWS_PER_STEP
    assert f"{fill:.1%}".replace("%", " %") in text and f"{steps:,.0f} steps" in text
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for rate in forecast.EXTRACT_TOKENS_PER_SECOND.values():
        assert f"{rate:,}" in performance
    for milliseconds in (*forecast.STEP_MS.values(), *forecast.BARE_STEP_MS.values()):
        assert str(milliseconds) in performance


@pytest.fixture(scope="module")
def quick_start_target(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target deep enough for the five taps of z-lab's rule."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("quick-start")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,  # or it repeats the line end of the template, and a blank answer is left out
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_the_forms_of_conversations_are_recognised() -> None:
    from dflash_train.stage1_target.conversations import FORMATS, detect_format

    text = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for _, language, line, _ in code_lines(text) if language == "jsonl"]
    shown = {detect_format("the quick start", list(row)) for row in rows}
    assert shown == set(FORMATS)


@pytest.mark.parametrize("document", ["README.md", "docs/encodings.md"])
def test_bytes_per_token_follow_from_the_encodings(document: str) -> None:
    """The features' bytes of the table; the 5 bytes of token id and loss mask are said in the text."""
    from dflash_train.store.encoding import ENCODINGS, is_projected, make_encoding

    rows = 0
    for line in (ROOT / document).read_text(encoding="utf-8").split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        shape = re.fullmatch(r"(\d+) × (\d+)", cells[1]) if len(cells) > 4 else None
        if shape is None:
            continue
        rows += 1
        num_layers, hidden_size = map(int, shape.groups())
        encodings = [
            make_encoding(name, num_layers, hidden_size, hidden_size if is_projected(name) else None)
            for name in ENCODINGS
        ]
        sizes = [encoding.bytes_per_token - 5 for encoding in encodings]
        assert [int(cell.replace(",", "")) for cell in cells[2:6]] == sizes, line
        terabytes = [f"{size * 100e6 / 1e12:.2f} TB" for size in sizes]
        assert cells[6:] in (terabytes[1:2], terabytes[1::2]), line
    assert rows >= 6


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (document.parent / target.split("#")[0]).exists(), f"{document.name} links to {target}"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "README.md" or f"({document.name})" in index, document.name


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_fits_80_columns(name: str | None) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, [*([name] if name else []), "--help"])
    assert result.exit_code == 0
    lines = result.output.split("\n")
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert name or not any(line.startswith("  ") and line.endswith("...") for line in lines), (
        "a command's short help is cut off"
    )


@pytest.mark.parametrize("words, offered", [("dflash ex", "extract"), ("dflash extract --enc", "--encoding")])
def test_the_shell_completes(words: str, offered: str) -> None:
    environment = {"_DFLASH_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=environment).invoke(main, [], prog_name="dflash")
    assert f"plain,{offered}" in result.output


def test_a_demo_whose_extract_was_stopped_before_there_was_a_store_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py"])
    demo = runpy.run_path(str(ROOT / "examples" / "demo" / "run.py"))["main"]
    calls: list[object] = []
    monkeypatch.setitem(demo.__globals__, "unpack_target", lambda: None)
    monkeypatch.setitem(demo.__globals__, "dflash", lambda *words: calls.append(words[0]))
    with pytest.raises(
        SystemExit, match=r"holds 0 of \d+ samples: extract was stopped\. Run `make demo` again to go on"
    ):
        demo()
    assert calls == ["extract"]
