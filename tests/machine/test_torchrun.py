import subprocess
import sys

import pytest

from dflash_train.errors import InputError
from dflash_train.machine import devices
from dflash_train.machine.torchrun import TorchrunPlace, rank_devices, torchrun_place


def test_a_rank_takes_the_gpus_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_uuids", lambda: ["GPU-aaaa1", "GPU-bbbb2", "GPU-cccc3", "GPU-dddd4"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def labels(local_rank: int, text: str | None, size: int) -> list[str]:
        return [device.label for device in rank_devices(TorchrunPlace(6, 8, local_rank, 2, 3), text, size)]

    assert labels(1, None, 1) == labels(1, "0", 1) == ["GPU 1"]
    assert labels(1, None, 2) == ["GPU 2", "GPU 3"]
    assert labels(1, "cpu", 1) == ["CPU worker 1"]
    with pytest.raises(InputError, match="2 processes here, which need 6 GPUs, but this machine shows 4; start fewer"):
        labels(1, None, 3)
    monkeypatch.setattr(devices, "_gpu_uuids", list)
    assert labels(1, None, 1) == ["CPU worker 1"]


def test_torchrun_tells_the_place_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert torchrun_place() == TorchrunPlace(5, 8, 1, 4, 1)


def test_torchrun_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, dflash_train.machine.torchrun; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
