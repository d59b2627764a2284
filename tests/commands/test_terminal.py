"""How commands speak: drawn on a real terminal (a pty), as plain lines, as JSON, or not at all; reports in a file."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dflash_train.commands.display import CountView
from dflash_train.commands.terminal import Terminal, show


def test_the_output_file_gets_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show({"a": 1}, "one", False, tmp_path / "new" / "folder" / "report.json")
    assert json.loads((tmp_path / "new" / "folder" / "report.json").read_text()) == {"a": 1}
    said = capsys.readouterr()
    assert said.out == "one\n" and said.err.endswith(f"wrote {tmp_path / 'new' / 'folder' / 'report.json'}\n")


def test_a_report_is_printed_even_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        show({"a": 1}, "one", False, tmp_path / "file" / "report.json")
    assert capsys.readouterr().out == "one\n"


SCRIPT = """
import logging, os, signal, subprocess, sys, time, warnings
import click
from dflash_train.commands.display import CountView
from dflash_train.commands.terminal import Failure, Terminal, fail, progress_options

@click.command()
@progress_options
@click.argument("how")
def main(how):
    with Terminal(CountView("rows")) as terminal:
        terminal.report("it begins")
        for done in range(1, 401):
            terminal.report((done, 400))
            if done == 200:
                warnings.warn("of python")
                logging.getLogger().error("a logged error")
                print("printed", flush=True)
                os.write(2, b"from C\\n 10%|#   | 1/10\\r 20%|##  | 2/10\\n")
                subprocess.run(["echo", "from a child"])
                time.sleep(0.6)
            if done == 300 and how == "wait":
                terminal.report("waiting")
                time.sleep(60)
            if done == 300 and how == "raise":
                raise RuntimeError("a bug")
            if done == 300 and how == "fail":
                raise Failure("bad input")
    if how == "errors":
        fail("one of several")
    click.echo("the result")

main()
"""


def run_plain(how: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, how, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


CONTROLLING_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


class Screen:
    """A process whose standard streams are its own controlling terminal, and what it wrote there."""

    def __init__(self, *arguments: str, script: str = SCRIPT) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        self._ours, self._theirs = ours, theirs
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLING_TERMINAL + script, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )

    def read(self, until: str | None = None) -> str:
        """Collect output until some text appears, or the process has ended and nothing is left."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (until is None or until not in self.text):
            if select.select([self._ours], [], [], 0.1)[0]:
                self.text += os.read(self._ours, 65536).decode()
            elif self.process.poll() is not None:
                break
        return self.text

    def close(self) -> None:
        """Assert that the terminal is as it was, with its cursor."""
        assert self.process.wait(10) is not None
        after = termios.tcgetattr(self._theirs)
        os.close(self._ours)
        os.close(self._theirs)
        assert after == self.before
        assert self.text.rindex("\x1b[?25h") > self.text.rindex("\x1b[?25l"), "the cursor is shown again"

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())


def test_on_a_terminal_the_display_is_drawn_and_all_else_stands_above_it() -> None:
    screen = Screen("finish")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.read().replace("\r", "\n")).split("\n")
    screen.close()
    assert screen.process.returncode == 0
    for said in ("it begins", "UserWarning: of python", "a logged error", "printed", "from C", "from a child"):
        assert any(re.match(rf"\d\d:\d\d:\d\d  .*{said}", line) for line in lines), said
    assert not any("0%|" in line for line in lines), "progress bars of libraries are left out"
    assert any(re.match("rows  ━+.*200 of 400", line) for line in lines)
    frame = [line for line in lines if line.strip()][-3:]
    assert re.match("rows  ━+ +400 of 400", frame[0]) and "in all" in frame[1] and frame[2] == "the result"


@pytest.mark.parametrize("how", ["press", signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_display_leaves_a_clean_terminal(how: str | int) -> None:
    screen = Screen("wait")
    screen.read(until="waiting")
    assert not termios.tcgetattr(screen._theirs)[3] & termios.ECHO, "typed keys are not echoed into the display"
    if isinstance(how, int):
        screen.process.send_signal(how)
    else:
        screen.press("abc\x03")
    screen.read()
    screen.close()
    assert screen.process.returncode == (143 if how == signal.SIGTERM else 1)
    assert "Traceback" not in screen.text and "abc" not in screen.text


def test_a_traceback_comes_after_the_display() -> None:
    screen = Screen("raise")
    text = screen.read()
    screen.close()
    assert text.index("Traceback") > text.rindex("\x1b[?25h")
    assert "RuntimeError: a bug" in text


def test_elsewhere_there_are_lines_with_times_few_of_them_and_the_last_is_right() -> None:
    done = run_plain("finish")
    assert (done.returncode, done.stdout) == (0, "printed\nfrom a child\nthe result\n")
    lines = [line[10:] for line in done.stderr.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert lines[0] == "it begins"
    assert lines[1].startswith("rows: 1 of 400")
    assert lines[-1] == "rows: 400 of 400"
    assert len(lines) == 3
    assert "\x1b" not in done.stderr


def test_the_newest_line_is_said_where_a_run_ends_early() -> None:
    done = run_plain("fail")
    *_, newest, error = done.stderr.splitlines()
    assert newest[10:].startswith("rows: 300 of 400, ")
    assert (done.returncode, error) == (1, "Error: bad input")


def test_quiet_prints_results_and_errors_alone() -> None:
    done = run_plain("errors", "--quiet")
    assert (done.stdout, done.stderr) == ("the result\n", "Error: one of several\n")


@pytest.mark.parametrize("how, status, last", [("errors", 0, "one of several"), ("fail", 1, "bad input")])
def test_log_json_is_one_object_a_line(how: str, status: int, last: str) -> None:
    done = run_plain(how, "--log-json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, events[0]["event"], events[0]["text"]) == (status, "note", "it begins")
    assert (events[-1]["event"], events[-1]["text"]) == ("error", last)
    assert {event["text"] for event in events if event["event"] == "output"} >= {"printed", "from C", "from a child"}
    (first, *_) = (event for event in events if event["event"] == "rows")
    assert (first["done"], first["total"]) == (1, 400)
    assert all(datetime.fromisoformat(event["time"]).tzinfo for event in events)
    assert done.stdout == ("the result\n" if status == 0 else "")


def test_quiet_and_log_json_exclude_each_other() -> None:
    done = run_plain("finish", "--quiet", "--log-json")
    assert (done.returncode, "exclude each other" in done.stderr) == (2, True)


def test_lines_of_progress_become_rarer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr("dflash_train.commands.terminal.time.monotonic", lambda: now[0])
    with Terminal(CountView("rows")) as terminal:
        for second in range(36_000):
            now[0] = float(second)
            terminal.report((second, 36_000))
    lines = capsys.readouterr().err.splitlines()
    assert 500 < len(lines) < 700
    assert "35,999 of 36,000" in lines[-1]


def test_extract_on_a_terminal(tmp_path: Path, tiny_target: Any) -> None:
    """The real command, start to end: its display, and no line of anybody else."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]} for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["extract", "--target", str(tiny_target("llama")), "--data", "rows.jsonl", "--store", "s.zarr"]
    words += ["--gpus", "cpu", "--num-taps", "2", "--sample-cache", "cache"]
    script = f"import os; os.chdir({str(tmp_path)!r}); from dflash_train.cli import main; main()"
    screen = Screen(*words, script=script)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.read())
    screen.close()
    assert screen.process.returncode == 0, text
    assert "9 of 9  9 committed" in text and "CPU worker 0" in text
    assert text.rstrip().splitlines()[-1].startswith("stored 9 of 9")
