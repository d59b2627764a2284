"""Reports on the terminal and in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_train.commands.terminal import show


def test_the_output_file_gets_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show({"a": 1}, "one", False, tmp_path / "new" / "folder" / "report.json")
    assert json.loads((tmp_path / "new" / "folder" / "report.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == "one\n"


def test_a_report_is_printed_even_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        show({"a": 1}, "one", False, tmp_path / "file" / "report.json")
    assert capsys.readouterr().out == "one\n"
