from pathlib import Path

import pytest

from dflash_train.machine.disks import user_cache_folder


def test_cache_folder_respects_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "dflash-train"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert user_cache_folder() == Path("/home/somebody/.cache/dflash-train")
