"""extract, inspect-store and train-drafter on a store in an S3 bucket, against a real server process on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dflash_train.cli import main
from dflash_train.stage2_drafter.run_folder import read_metrics

torch.set_num_threads(1)
pytestmark = pytest.mark.slow
SAID: list[str] = []
"""Whatever the commands have printed in this process."""
TIMES = ("tokens_per_second", "wait_share")


def dflash(*words: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    SAID.append(result.output)
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [
        [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n} " + "is long " * 9},
        ]
        for n in range(24)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def extract(tiny_target: Callable[..., Path], data: Path, tmp_path: Path) -> list[str]:
    """The options of an extract but for --store."""
    options = {
        "--target": tiny_target("llama"),
        "--data": data,
        "--gpus": "cpu",
        "--num-taps": 2,
        "--segment-bytes": 60_000,
        "--batch-tokens": 400,
        "--sample-cache": tmp_path / "samples",
        "--cache-folder": tmp_path / "cache",
    }
    return ["extract", *(str(word) for option in options.items() for word in option)]


def train(store: object, run: Path, *more: object) -> Path:
    options = "--gpus cpu --num-layers 1 --block-size 4 --row-tokens 300 --anchors 16 --rows-per-step 2 --steps 4"
    options += " --evaluate-every 2 --holdout 0.2 --mask-token <|mask|>"
    dflash("train-drafter", "--store", store, "--run", run, *options.split(), *more)
    return run


def curve(run: Path) -> list[dict[str, Any]]:
    lines = [*read_metrics(run), *read_metrics(run, "evaluation")]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def test_remote_store_gives_the_local_stores_drafter_bit_for_bit(
    s3: Any, extract: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, cache = s3.url("stores/tiny.zarr"), ["--cache-folder", tmp_path / "cache"]
    assert "stored 24 of 24" in dflash(*extract, "--store", url).output
    assert "nothing to do" in dflash(*extract, "--store", url).output
    report = json.loads(dflash("inspect-store", url, *cache, "--json").stdout)
    assert (report["path"], report["samples"], report["duplicates"]) == (url, 24, 0) and report["segments"] > 1
    assert "no problem" in dflash("inspect-store", url, *cache, "--verify", "checksums").output
    assert f'store = "{url}"' in (tmp_path / "tiny.zarr.recipe.toml").read_text()
    assert "finished" in dflash("status", url).output

    local = tmp_path / "local.zarr"
    for name, content in s3.objects("stores/tiny.zarr").items():
        path = local / name.removeprefix("stores/tiny.zarr/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.rmtree(tmp_path / "cache")
    s3.requests()
    far, near = train(url, tmp_path / "far", *cache, "--cache-bytes", 30_000), train(local, tmp_path / "near")
    assert any("/features/" in line and "bytes=" in line for line in s3.requests())
    assert curve(far) == curve(near) and len(curve(far)) == 7
    drafters = [load_file(next(run.glob("checkpoints/*4/model.safetensors"))) for run in (far, near)]
    assert all(torch.equal(drafters[0][name], drafters[1][name]) for name in drafters[1])
    assert sum(path.stat().st_size for path in tmp_path.glob("cache/*/rows/*/*")) <= 30_000
    assert f'store = ["{url}"]' in (far / "recipe.toml").read_text()

    written: dict[Any, bytes] = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    written |= s3.objects() | {f"output {number}": text.encode() for number, text in enumerate(SAID)}
    assert len(SAID) > 6 and any(path.suffix == ".log" for path in written if isinstance(path, Path))
    for secret in (s3.secret, "AKIAXXXXXXXXXXXXXXXX"):
        assert [name for name, content in written.items() if secret.encode() in content] == []


def test_killed_upload_loses_and_doubles_nothing(
    s3: Any, extract: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL to the whole process group while a segment's objects are on their way."""
    monkeypatch.chdir(tmp_path)
    url, cache = s3.url("s.zarr"), ["--cache-folder", tmp_path / "cache"]
    s3.fault("/token_ids/c/0", sleep=20)
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_train.cli", *extract, "--store", url],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    started = time.monotonic()
    while not any("/token_ids/c/0" in line and line.startswith("PUT") for line in s3.requests()):
        assert process.poll() is None and time.monotonic() - started < 120
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    s3.fault()
    assert any("/features/c/" in name for name in s3.objects()), "an orphan"
    assert "stored 24 of 24" in dflash(*extract, "--store", url).output
    report = json.loads(dflash("inspect-store", url, *cache, "--json").stdout)
    assert (report["samples"], report["duplicates"]) == (24, 0)
    verified = json.loads(dflash("inspect-store", url, *cache, "--verify", "checksums", "--json").stdout)
    assert (verified["problems"], verified["leftovers"]) == ([], [])


def test_what_goes_wrong_with_the_bucket_is_one_line(
    s3: Any, extract: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    s3.fault("/s.zarr", status=403, code="AccessDenied")
    output = dflash(*extract, "--store", s3.url("s.zarr"), status=1).stderr
    assert output.splitlines()[-1].startswith(
        f"Error: s3://{s3.bucket} refuses to read s3://{s3.bucket}/s.zarr/zarr.json"
    )
    s3.fault()
    output = dflash(*extract, "--store", "s3://no-such-bucket/s.zarr", status=1).stderr
    assert "s3://no-such-bucket is not there. Make it, or correct" in output
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong+secret/of+somebody")
    s3.fault("/s.zarr", status=403, code="SignatureDoesNotMatch")
    output = dflash(*extract, "--store", s3.url("s.zarr"), status=1).output
    assert "refuses to read" in output and "wrong+secret" not in output and s3.secret not in output
    assert not list(tmp_path.glob("*.logs")) and not list(tmp_path.glob("*.toml"))
