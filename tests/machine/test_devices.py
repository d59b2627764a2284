import pytest

from dflash_train.errors import InputError
from dflash_train.machine import devices
from dflash_train.machine.devices import group_devices, parse_devices

GPUS = ["GPU-aaaa1", "GPU-bbbb2", "GPU-cccc3", "GPU-dddd4"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(devices, "_gpu_uuids", lambda: list(GPUS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def visible(text: str | None) -> list[str]:
    return [device.environment["CUDA_VISIBLE_DEVICES"] for device in parse_devices(text)]


def test_gpu_numbers_become_one_uuid_a_process(four_gpus: pytest.MonkeyPatch) -> None:
    assert visible("0-2") == GPUS[:3]
    assert visible("3, 1") == [GPUS[3], GPUS[1]]
    assert visible("0,2-3") == [GPUS[0], *GPUS[2:]]
    assert visible(None) == GPUS
    device = parse_devices("1")[0]
    assert (device.label, device.torch_device) == ("GPU 1", "cuda:0")


def test_numbers_are_positions_in_cuda_visible_devices(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aa")
    assert visible("0-1") == [GPUS[2], GPUS[0]] == visible(None)
    with pytest.raises(InputError, match="--gpus names GPU 2 but CUDA_VISIBLE_DEVICES has 0-1"):
        parse_devices("0-2")
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_devices(None)[0].torch_device == "cpu"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("2-5", "--gpus names GPU 4, 5 but this machine has 0-3; choose from these"),
        ("3-1", "--gpus is '3-1'; write GPU numbers like"),
        ("1,,2", "write GPU numbers like"),
        ("gpu", "write GPU numbers like"),
        ("1,0-2", "names a GPU twice"),
        ("cpu:0", "asks for no worker at all"),
    ],
)
def test_wrong_devices_are_refused(four_gpus: pytest.MonkeyPatch, text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        parse_devices(text)


def test_without_a_gpu_numbers_are_refused_and_the_default_is_one_cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_uuids", list)
    assert [device.label for device in parse_devices(None)] == ["CPU worker 0"]
    assert [device.label for device in parse_devices("cpu:3")] == [f"CPU worker {i}" for i in range(3)]
    with pytest.raises(InputError, match="shows no NVIDIA GPU; use --gpus cpu"):
        parse_devices("0-3")


def test_gpus_are_grouped_with_their_neighbours(four_gpus: pytest.MonkeyPatch) -> None:
    groups = group_devices(parse_devices("0-3"), 2)
    assert [(device.label, device.torch_device) for device in groups] == [
        ("GPUs 0+1", "cuda:0"),
        ("GPUs 2+3", "cuda:0"),
    ]
    assert [device.environment["CUDA_VISIBLE_DEVICES"] for device in groups] == [
        ",".join(GPUS[:2]),
        ",".join(GPUS[2:]),
    ]
    assert group_devices(parse_devices("1,3"), 1) == parse_devices("1,3")
    with pytest.raises(InputError, match="--gpus-per-target 2 does not divide the 3 GPUs to be used; name a multiple"):
        group_devices(parse_devices("0-2"), 2)
    with pytest.raises(InputError, match="--gpus-per-target 2 needs GPUs, but the target is to run on the CPU"):
        group_devices(parse_devices("cpu:2"), 2)
