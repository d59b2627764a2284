from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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


SCRIPT = """
import json, os, sys, types
from pathlib import Path
from dflash_train.cli import main

def train(config, *arguments):
    told = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    Path(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told | {"torch": "torch" in sys.modules}))
    return types.SimpleNamespace(step=0, total_steps=0, stopped=False, checkpoint=None)

stub = types.ModuleType("dflash_train.stage2_drafter.train")
stub.train = train
sys.modules[stub.__name__] = stub
main()
"""


@pytest.mark.parametrize(("machines", "given"), [(1, False), (2, False), (2, True)])
def test_each_rank_of_torchrun_has_a_compile_cache_of_its_own_before_torch_is_imported(
    machines: int, given: bool, tmp_path: Path
) -> None:
    """With one machine in the run folder, with two in the user's cache folder, unless told otherwise."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines)]
    command += ["--nproc-per-node", str(2 // machines), "--rdzv-id", "train", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", endpoint, "--", "script.py", "train-drafter", "--store", "s", "--run", "run"]
    command += ["--gpus", "cpu", *(["--compile-cache", "fast"] if given else [])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "user"), "TORCHINDUCTOR_CACHE_DIR": "/somebody"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(machines)]
    ends = [(agent.communicate(timeout=120)[0], agent.returncode) for agent in agents]
    assert [status for _, status in ends] == [0] * machines, ends
    for rank in (0, 1):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told.pop("torch") is False
        own = Path(told["TORCHINDUCTOR_CACHE_DIR"])
        assert told["TRITON_CACHE_DIR"] == str(own / "triton") and own.name == f"rank-{rank}"
        if given or machines == 1:
            assert own.parent == (tmp_path / "fast" if given else tmp_path / "run" / "compile-cache")
        else:
            assert own.parents[1] == tmp_path / "user" / "dflash-train" / "compile"
            assert own.parent.name.startswith("run-")
