from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.errors import InputError
from dflash_train.stage1_target.target_config import (
    TargetConfig,
    check_target_layer_ids,
    default_target_layer_ids,
    from_pretrained,
    load_model_config,
)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("/no/such/folder", "The target '/no/such/folder' is not there"),
        ("/no/such/file.gguf", "'/no/such/file.gguf' is no file"),
    ],
)
def test_wrong_name_is_one_sentence(name: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_model_config(TargetConfig(name=name))


def test_gguf_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(
        InputError, match=r"needs the package gguf; install the extra: pip install 'dflash-train\[gguf\]'"
    ):
        load_model_config(TargetConfig(name=str(tmp_path / "model.gguf")))


def test_weights_that_do_not_fit_name_the_option_that_spreads_them(tiny_target: Callable[..., Path]) -> None:
    class TooLarge:
        @staticmethod
        def from_pretrained(*_arguments: Any, **_keywords: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        InputError,
        match="The weights of the target '.*llama.*' do not fit into the memory of the device; give each copy more GPUs "
        "with dflash extract --gpus-per-target, or take a quantised checkpoint",
    ):
        from_pretrained(TooLarge, TargetConfig(name=str(tiny_target("llama"))), "weights")


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "ids"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (5, 1, (2,)),
        (5, 2, (1, 2)),
    ],
)
def test_default_layers_follow_z_labs_rule(num_layers: int, num_taps: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, num_taps) == ids


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ((0, 4), "Target layer 4 is the last one, whose output engines cannot tap"),
        ((0, 5), "do not exist in a target of 5 layers; choose from 0 to 3"),
        ((-1, 2), "do not exist"),
        ((2, 1), "not ascending and distinct"),
        ((1, 1), "not ascending and distinct"),
        ((), "No target layer is named"),
    ],
)
def test_wrong_layers_are_refused(ids: tuple[int, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        check_target_layer_ids(ids, 5)


def test_more_taps_than_the_rule_has_are_refused() -> None:
    with pytest.raises(InputError, match="A target of 5 layers has no 4 taps by z-lab's rule"):
        default_target_layer_ids(5, 4)
