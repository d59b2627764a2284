from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_train.cli import main
from dflash_train.stage1_target import extract as extract_module
from dflash_train.stage1_target.extract import ExtractConfig


def test_flags_reach_the_extract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[ExtractConfig] = []

    def extract(config: ExtractConfig, _report: Any) -> Any:
        configs.append(config)
        return SimpleNamespace(failures=[], num_new_tokens=0, message="as told", exit_status=0)

    monkeypatch.setattr(extract_module, "extract", extract)
    words = ["extract", "--target", "t", "--data", "d", "--store", str(tmp_path / "store"), "--dry-run"]
    for flags in ([], ["--require-fast-kernels", "--compile-target", "--gpus-per-target", "2"]):
        result = CliRunner().invoke(main, [*words, *flags])
        assert (result.exit_code, result.stdout) == (0, "as told\n"), result.output
    found = [(config.require_fast_kernels, config.compile_target, config.gpus_per_target) for config in configs]
    assert found == [(False, False, 1), (True, True, 2)]
    assert [config.dry_run for config in configs] == [True, True]
