from pathlib import Path

import pytest

from dflash_train.errors import InputError
from dflash_train.machine.compile_cache import compile_cache_folder


def place_of(monkeypatch: pytest.MonkeyPatch, world: int, local_world: int) -> None:
    """Pretend that torchrun started `world` processes, `local_world` of them here."""
    values = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world, "GROUP_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_kernels_are_compiled_into_the_run_folder_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in ("without torchrun", "with torchrun on one machine"):
        assert compile_cache_folder(Path("run"), None) == tmp_path / "run" / "compile-cache"
        assert compile_cache_folder(Path("run"), Path("fast")) == tmp_path / "fast"
        place_of(monkeypatch, world=4, local_world=4)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--compile-cache is file, a file, but must be a folder; name another path"):
        compile_cache_folder(Path("run"), Path("file"))


def test_kernels_of_several_machines_stay_on_each_under_a_name_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "link").symlink_to("run")
    place_of(monkeypatch, world=4, local_world=2)
    folder = compile_cache_folder(Path("run"), None)
    assert folder.parent == tmp_path / "user" / "dflash-train" / "compile" and folder.name.startswith("run-")
    assert compile_cache_folder(Path("link"), None) == compile_cache_folder(tmp_path / "run", None) == folder
    assert compile_cache_folder(Path("other") / "run", None) != folder
    assert compile_cache_folder(Path("run"), Path("fast")) == tmp_path / "fast"
