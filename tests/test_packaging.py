"""What an installation holds: every package, the two names of the command, and nothing that slows its help."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_packages_are_all_folders_with_an_init() -> None:
    folders = {path.parent for path in ROOT.glob("*/__init__.py")} | {
        path.parent for path in ROOT.glob("*/*/__init__.py")
    }
    hidden = {folder for folder in folders if any(part.startswith(".") for part in folder.relative_to(ROOT).parts)}
    names = {
        ".".join(("dflash_train", *folder.relative_to(ROOT).parts)) for folder in folders - hidden - {ROOT / "build"}
    }
    assert {"dflash_train"} | names == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_module_but_the_packages_own_lies_in_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {
        *("__init__.py", "cli.py", "errors.py", "units.py"),
    }


def test_both_commands_are_one_entry_point() -> None:
    assert set(PROJECT["project"]["scripts"].values()) == {"dflash_train.cli:main"}
    assert set(PROJECT["project"]["scripts"]) == {"dflash", "dflash-train"}


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split("\n")
    }
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    names = {
        entry.split(">=")[0].lower() for group in groups for entry in group if not entry.startswith("dflash-train")
    }
    assert names <= pinned


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from dflash_train.cli import COMMANDS, main; "
        "results = [CliRunner().invoke(main, [*name, '--help']) for name in ([], *([n] for n in COMMANDS))]; "
        "assert all(r.exit_code == 0 for r in results), results; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'zarr', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_arrows_point_one_way() -> None:
    """store and machine import no stage, the stages never import each other."""
    forbidden = {
        "store": (
            "stage1_target",
            "stage2_drafter",
            "speculate",
            "machine",
            "cli",
            "commands",
            "transformers",
            "torch.nn",
        ),
        "machine": ("stage1_target", "stage2_drafter", "speculate", "store", "cli", "commands"),
        "stage1_target": ("stage2_drafter", "speculate", "cli", "commands"),
        "stage2_drafter": ("stage1_target", "speculate", "cli", "commands"),
        "speculate": ("cli", "commands"),
    }
    for folder, names in forbidden.items():
        for path in (ROOT / folder).glob("*.py"):
            for line in path.read_text().split("\n"):
                if line.lstrip().startswith(("import ", "from ")):
                    module = line.split()[1].removeprefix("dflash_train.")
                    assert not any(module == name or module.startswith(name + ".") for name in names), f"{path}: {line}"
