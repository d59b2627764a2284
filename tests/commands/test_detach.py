from __future__ import annotations

from pathlib import Path

from dflash_train.commands.detach import _last_line


def test_the_last_line_of_a_log_is_quoted_without_its_time_of_day(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    assert _last_line(log) == ""
    log.write_text("03:42:36  first\n03:42:46  loaded the target\n\n")
    assert _last_line(log) == "loaded the target"
    log.write_text("Error: no time stands here\n")
    assert _last_line(log) == "Error: no time stands here"
