"""The HTML report: whole and harmless whatever lies in the run folder, and fit to be seen in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.errors import InputError
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.curves import shown_slots
from dflash_train.stage2_drafter.report import read_run, write_report
from dflash_train.stage2_drafter.train import train
from dflash_train.stage2_drafter.versions import package_versions, source_revision

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "circle", "line", "path", "br"}


class Page(HTMLParser):
    """Text and tags of a page; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def metrics_line(step: int, kind: str = "train", **changes: Any) -> dict[str, Any]:
    accuracy = [0.5 * (1 - 0.99**step) / slot for slot in range(1, 8)]
    quality = {
        "loss": 2 + 60 / (1 + step),
        "cross_entropy": 2 + 61 / (1 + step),
        "acceptance_length": 1 + sum(accuracy),
    }
    if kind == "evaluation":
        return {"kind": kind, "step": step, **quality, "accuracy": accuracy, "rows": 4} | changes
    times = {"tokens": 1000, "tokens_per_second": 900.0 + step % 7, "wait_share": 0.01}
    more = {"lr": 6e-4 / (1 + step), "gradient_norm": 9 / (1 + step), "skipped": None, "slots": 800}
    return {"kind": kind, "step": step, **quality, "accuracy": accuracy, **more, **times} | changes


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run folder as training leaves it, without the training: metrics, and checkpoints without tensors."""

    def make(name: str = "run", steps: int = 120, saved: tuple[int, ...] = (60, 120), **state: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        lines = [metrics_line(step) for step in range(1, steps + 1)]
        lines += [metrics_line(step, "evaluation") for step in range(0, steps + 1, 40)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in saved:
            folder = run / "checkpoints" / f"step-{step:08d}" / "trainer"
            folder.mkdir(parents=True)
            (folder.parent / "model.safetensors").write_bytes(bytes(1 << 20))
            values = {
                "step": step,
                "config": TrainConfig(store=Path("s.zarr"), run=run, lr=1e-3).to_json(),
                "drafter": {"num_hidden_layers": 2, "block_size": 8, "dflash_config": {"mask_token_id": 63}},
                "store": {"target_name": "org/target", "encoding": "int8", "target_layer_ids": [1, 9]},
                "segments": ["a", "b"],
                "total_steps": steps,
                "random_state": {"seed": 0},
                "versions": {"dflash-train": "0.1.0", "source revision": "abcdef", "torch": "2.13.0"},
                "evaluation": metrics_line(step, "evaluation"),
            }
            (folder / "state.json").write_text(json.dumps(values | state))
        return run

    return make


def evaluation_file(run: Path, step: int, path: Path, **changes: Any) -> Path:
    positions = [{"position": slot, "cumulative": 0.6**slot} for slot in range(1, 8)]
    values = {
        "drafter": f"elsewhere/{run.name}/checkpoints/step-{step:08d}",
        "acceptance_length": 2.345,
        "positions": positions,
        "num_prompts": 16,
        "lossless": True,
        "speedup": 1.7,
    }
    path.write_text(json.dumps(values | changes))
    return path


def test_page_shows_the_run(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    path = write_report(run, evaluations=[evaluation_file(run, 120, tmp_path / "e.json")])
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    for text in ("Loss", "Acceptance length", "Accuracy by position", "Accuracy over the block", "Speed", "Waiting"):
        assert text in page.text
    assert sum(tag == "figure" for tag, _ in page.tags) == 8
    for text in ("120 of 120", "step-00000060", "step-00000120", "newest", "org/target", "2.345", "source abcdef"):
        assert text in page.text, text
    changed = re.findall(r'<tr class="changed"><th>([^<]*)', path.read_text(encoding="utf-8"))
    assert changed == ["store", "run", "lr"]
    assert not list(run.glob(".tmp-*"))


def test_page_needs_no_network_and_runs_nothing(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run()).read_text(encoding="utf-8")
    tags = Page(text).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "a", "form"}
    assert not {name for _, attributes in tags for name in attributes if name in ("src", "href") or name[:2] == "on"}
    assert "http:" not in text and "https:" not in text and "url(" not in text
    policy = next(attributes["content"] for _, attributes in tags if "http-equiv" in attributes)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_text_from_the_run_is_only_text(make_run: Callable[..., Path], tmp_path: Path) -> None:
    evil = "\"><script>alert(1)</script><b x='"
    run = make_run(
        "<i>run",
        versions={evil: evil},
        store={"target_name": evil, "encoding": [evil], "target_layer_ids": {evil: evil}},
        config={evil: evil, "betas": [evil]},
        evaluation=None,
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(121, skipped=evil, loss=evil, accuracy=[evil, None, True])) + "\n")
        file.write(json.dumps(metrics_line(121, "evaluation", rows=evil, loss={evil: 1}, accuracy=evil)) + "\n")
    written = evaluation_file(
        run, 120, tmp_path / "e.json", prompt_source=evil, num_prompts=evil, positions=evil, dtype=evil
    )
    page = Page(write_report(run, tmp_path / "new" / "p.html", [written]).read_text(encoding="utf-8"))
    assert not {tag for tag, _ in page.tags} & {"script", "i"}
    assert not [attributes for tag, attributes in page.tags if tag == "b" and attributes]
    assert evil in page.text


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(make_run: Callable[..., Path]) -> None:
    run = make_run(saved=())
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(metrics_line(120, loss=7.0)).encode() + b'\n{"kind": "train", "step": 121, "lo\xc3')
    (run / "recipe.toml").write_text("[train-drafter]\nlr = 0.5 # <\n")
    record = read_run(run)
    assert [entry["step"] for entry in record.steps] == list(range(1, 121))
    assert (record.steps[-1]["loss"], record.unreadable_lines) == (7.0, 1)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "1 line of metrics.jsonl could not be read" in page.text
    assert "No checkpoint has been written yet" in page.text and "lr = 0.5 # <" in page.text
    (run / "metrics.jsonl").write_text("")
    assert "No step was logged yet" in write_report(run).read_text(encoding="utf-8")


def test_a_damaged_checkpoint_is_named_and_the_rest_shown(make_run: Callable[..., Path]) -> None:
    run = make_run()
    (run / "checkpoints" / "step-00000120" / "trainer" / "state.json").write_text('{"step": 120')
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "step-00000120 cannot be read" in page.text and "org/target" in page.text


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff", "cannot be read"),
        (b"[]", "is no evaluation"),
        (b'{"drafter": "x"}', "is no evaluation"),
        (b'{"acceptance_length": 1, "drafter": "other/checkpoints/step-00000120"}', "not a checkpoint of this run"),
        (b'{"acceptance_length": 1, "drafter": "z-lab/drafter"}', "not a checkpoint of this run"),
    ],
)
def test_what_is_no_evaluation_of_the_run_is_refused(
    make_run: Callable[..., Path], tmp_path: Path, content: bytes, message: str
) -> None:
    run, file = make_run(), tmp_path / "e.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        write_report(run, evaluations=[file])
    assert not (run / "report.html").exists()


def test_the_command(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    result = CliRunner().invoke(main, ["report", str(run), "--output", str(tmp_path / "out" / "page.html")])
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'out' / 'page.html'}\n")
    for wrong, message in ((tmp_path / "no", "is no folder"), (tmp_path, "has neither metrics.jsonl nor checkpoints")):
        result = CliRunner().invoke(main, ["report", str(wrong)])
        assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


def test_a_long_run_makes_a_small_page(make_run: Callable[..., Path]) -> None:
    run = make_run(steps=20_000)
    assert write_report(run).stat().st_size < 400_000


def test_a_trained_run_records_what_made_it(
    make_store: Callable[..., Path], make_train_config: Callable[..., TrainConfig]
) -> None:
    config = make_train_config(make_store(), steps=1, num_layers=1)
    train(config, lambda line: None)
    page = Page(write_report(config.run).read_text(encoding="utf-8"))
    state = read_run(config.run).state
    assert state is not None
    changing = {"source revision": state.versions.get("source revision")}  # somebody may commit while tests run
    assert state.versions | changing == package_versions() | changing
    assert f"dflash-train {state.versions['dflash-train']}" in page.text and "1 of 1" in page.text
    assert "row tokens" in page.text and "weights fingerprint" in page.text


@pytest.mark.parametrize("count, slots", [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (15, [1, 2, 4, 8, 15])])
def test_slots_that_are_drawn(count: int, slots: list[int]) -> None:
    assert shown_slots(count) == slots


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_source_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        settings = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True)

    assert source_revision(tmp_path) is None
    git("init")
    assert source_revision(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "m")
    revision = source_revision(tmp_path)
    assert revision is not None and re.fullmatch("[0-9a-f]{12}", revision)
    (tmp_path / "b").write_text("untracked")
    assert source_revision(tmp_path) == revision
    (tmp_path / "a").write_text("2")
    assert source_revision(tmp_path) == f"{revision} with changes"
    (tmp_path / "inner").mkdir()
    assert source_revision(tmp_path / "inner") is None, "a folder of somebody's checkout"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("width, dark", [(1280, False), (500, True)])
def test_page_looks_right_in_a_browser(make_run: Callable[..., Path], tmp_path: Path, width: int, dark: bool) -> None:
    """Curves are drawn in their colour, the background follows the scheme, and nothing sticks out on the right."""
    from PIL import Image

    run = make_run()
    page = write_report(run, evaluations=[evaluation_file(run, 120, tmp_path / "e.json")])
    picture = tmp_path / "page.png"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={picture}",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400", f"file://{page}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    background, blue = ((0x14, 0x17, 0x1C), (0x6A, 0xA8, 0xEC)) if dark else ((0xF6, 0xF7, 0xF9), (0x2A, 0x6F, 0xBB))
    assert (pixels[:, -8:] == background).all(), "the right margin is empty"
    assert (pixels[:, :8] == background).all()
    assert ((pixels == blue).all(-1)).sum() > 1000, "curves of the first colour"
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 200
