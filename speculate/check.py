"""`dflash check`: everything that makes engines misread a drafter, without a server.

Engines read the same two files differently, fall back to defaults without a word, and a wrong reading shows as an
acceptance length near 1, not as an error. So every key that some engine reads is held against what the others read,
against the tensors, the target and its tokenizer; and on a few answers of the real target the drafter computes the same
blocks as training does and as serving does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.speculate.config_checks import check_config
from dflash_train.speculate.drafter_folder import DrafterFolder, read_drafter_folder
from dflash_train.speculate.findings import ENGINES, Check, error, warning
from dflash_train.speculate.loading import worse_than_best
from dflash_train.speculate.serving import serving_commands
from dflash_train.speculate.target_checks import check_against_target
from dflash_train.speculate.tensor_checks import TARGET_TENSORS, check_tensors
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Which drafter to check, for which target and engines."""

    target: TargetConfig
    """The target that it will draft for."""
    drafter: Path
    """A drafter's folder in z-lab's format, or a run folder (its newest checkpoint is taken)."""
    engines: tuple[str, ...] = ENGINES
    """What will read it: of `ENGINES`; what only others would misread is left out."""
    parity: bool = True
    """Whether the target is loaded, to compare training with drafting on a few of its answers."""
    device: str = "cpu"
    """The torch device that the target runs on; the drafter is computed in fp32 on the CPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", Path(self.drafter))
        object.__setattr__(self, "engines", tuple(self.engines) or ENGINES)
        unknown = [engine for engine in self.engines if engine not in ENGINES]
        if unknown:
            raise InputError(f"The engine {unknown[0]!r} is unknown; use {', '.join(ENGINES)}.")


def check_drafter(config: CheckConfig, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Make all checks; a JSON-able report with `ok` (no error), `checks` and `commands`.

    Raises InputError for a drafter or target that cannot be read at all. `progress` is told what takes time.
    """
    say = progress or (lambda text: None)
    folder = read_drafter_folder(config.drafter)
    model_config, tokenizer = load_model_config(config.target), load_tokenizer(config.target)
    checks = check_config(folder, config.engines)
    checks += check_tensors(folder)
    checks += check_against_target(folder, model_config, tokenizer, config.engines)
    checks += _strict_reading(folder, checks)
    if (worse := worse_than_best(config.drafter)) is not None:
        checks.append(warning("checkpoint", *worse))
    if config.parity:
        checks += _with_target(config, folder, checks, say)
    return {
        "ok": all(check.status != "error" for check in checks),
        "drafter": str(folder.path),
        "target": config.target.name,
        "engines": list(config.engines),
        "counts": dict(Counter(check.status for check in checks)),
        "checks": [asdict(check) for check in checks],
        "commands": serving_commands(folder, config.target, config.engines),
    }


def _strict_reading(folder: DrafterFolder, checks: Sequence[Check]) -> list[Check]:
    """What this package's own loader refuses, where no check has named it."""
    from dflash_train.stage2_drafter.drafter_config import DrafterConfig

    try:
        DrafterConfig.from_json(folder.config)
    except (InputError, TypeError, ValueError, AttributeError) as found:
        if all(check.status != "error" for check in checks):
            return [
                error("config.json", f"{str(found).rstrip('.')}.", "Mend config.json, or export the drafter again.")
            ]
    return []


def _with_target(
    config: CheckConfig, folder: DrafterFolder, checks: Sequence[Check], say: Callable[[str], None]
) -> list[Check]:
    """The checks that need the target's weights; not made where the drafter could not be loaded."""
    from safetensors.torch import load_file

    from dflash_train.speculate import parity
    from dflash_train.stage1_target.target import load_target
    from dflash_train.stage2_drafter.drafter import Drafter, DrafterConfig

    if any(check.status == "error" for check in checks):
        return [warning("parity", "not compared, because of the errors above.", "Mend them and check again.")]
    drafter_config = DrafterConfig.from_json(folder.config)
    say(f"loading {config.target.name}")
    target = load_target(config.target, drafter_config.target_layer_ids, config.device)
    found = [parity.check_head(target, folder), parity.check_scales(target, drafter_config)]
    drafter = Drafter(drafter_config, seed=None)
    tensors = load_file(folder.path / "model.safetensors")
    drafter.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in TARGET_TENSORS})
    drafter.float().requires_grad_(False).eval()
    say(f"answering {len(parity.PROMPTS)} prompts")
    try:
        return [*found, *parity.check_parity(target, drafter, parity.encode_texts(target))]
    except InputError as reason:  # a target whose cache cannot be rewound
        return [*found, warning("parity", f"not compared: {reason}", "Evaluate it with an engine.")]
