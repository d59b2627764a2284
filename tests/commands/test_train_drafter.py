from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.stage2_drafter import train as training


def test_a_run_that_was_stopped_before_there_was_a_store_says_that_no_step_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any) -> training.TrainResult:
        return training.TrainResult(
            run=tmp_path / "run", step=0, total_steps=0, stopped=True, checkpoint=None, evaluation=None
        )

    monkeypatch.setattr(training, "train", train)
    words = ["train-drafter", "--store", str(tmp_path / "store"), "--run", str(tmp_path / "run"), "--follow"]
    result = CliRunner().invoke(main, [*words, "--gpus", "cpu"])
    assert (result.exit_code, result.stdout) == (0, "no step was run: the store was not there yet\n")
