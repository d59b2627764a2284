"""Write docs/screens/check.md: what `dflash check` says of a good drafter, and of five copies with one break each.

    python docs/screens/check_reports.py demo/run demo/target

The two arguments are a drafter (a folder or a run) and its target, here those that `make demo` leaves. A test breaks a tiny
drafter in the same five ways, and holds the names of the errors against the file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.speculate.drafter_folder import read_drafter_folder

HEADER = """# What `dflash check` says

Written by [check_reports.py](check_reports.py) with the drafter and the target of `make demo`; paths are shortened. First
the drafter as it was trained, then five copies with one break each, of which the lines that are ok are left out.
"""


@dataclass(frozen=True)
class Break:
    """One way to make engines misread a drafter."""

    title: str
    happens: str
    """What would happen without the check."""
    change: Callable[[dict[str, Any], dict[str, Any]], object]
    """Changes config.json and the tensors in place."""


def _eos_for_mask(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["dflash_config"]["mask_token_id"] = 2


def _last_layer(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    layers = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [*layers[:-1], config["num_target_layers"] - 1]


def _another_base(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 5_000_000.0


def _two_block_sizes(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["dflash_config"]["block_size"] = 2 * config["block_size"]


def _another_name(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")


BREAKS = (
    Break(
        "The target's eos as mask token",
        "The end of every turn would look like an open slot.",
        _eos_for_mask,
    ),
    Break(
        "The target's last layer as a tap",
        "Other states than in training: after the final norm, or none at all.",
        _last_layer,
    ),
    Break(
        "Another rotary base",
        "Keys would be turned by other angles than in training.",
        _another_base,
    ),
    Break(
        "Two block sizes",
        "One engine reads the one at the top, another the one in `dflash_config`.",
        _two_block_sizes,
    ),
    Break(
        "A tensor under another name",
        "SGLang ignores what it does not know.",
        _another_name,
    ),
)


def broken_copy(folder: Path, copy: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """config.json and model.safetensors of `folder`, changed."""
    from safetensors.torch import load_file, save_file

    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})


def _report(work: Path, status: int) -> str:
    words = ["check", "drafter", "--target", "target", "--gpus", "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "dflash_train.cli", *words],
        cwd=work,
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != status:
        raise SystemExit(f"exit status {result.returncode}, wanted {status}:\n{result.stdout}{result.stderr}")
    lines = [line.rstrip() for line in result.stdout.replace(str(work.resolve()), "/models").strip().splitlines()]
    if status:
        lines = [line for line in lines if not line.startswith("ok ")]
    return "\n".join(["```", f"$ dflash {' '.join(words)}; echo $?", *lines, str(status), "```"])


def main() -> None:
    drafter, target = (Path(word) for word in sys.argv[1:])
    folder = read_drafter_folder(drafter).path
    parts = [HEADER]
    good = Break("A good drafter", "Nothing is in the way; the last lines serve it.", lambda config, tensors: None)
    for number, one in enumerate((good, *BREAKS)):
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            (work / "target").symlink_to(target.resolve())
            if number:
                broken_copy(folder, work / "drafter", one.change)
            else:
                shutil.copytree(folder, work / "drafter")
            parts += [f"## {one.title}", one.happens, _report(work, int(number > 0)), ""]
    Path(__file__).with_name("check.md").write_text("\n\n".join(part.strip("\n") for part in parts if part) + "\n")


if __name__ == "__main__":
    main()
