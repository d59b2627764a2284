"""The command lines that serve a drafter with its target, exactly as a shell takes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path

from dflash_train.speculate.drafter_folder import DrafterFolder
from dflash_train.stage1_target.target_config import TargetConfig


def serving_commands(folder: DrafterFolder, target: TargetConfig, engines: Collection[str]) -> dict[str, str]:
    """One command line an engine; none where the block size is not known."""
    block_size, drafter = folder.integer("block_size"), str(folder.path.absolute())
    if block_size is None or block_size < 2:
        return {}
    name = str(Path(target.name).absolute()) if Path(target.name).exists() else target.name
    common = [*(["--revision", target.revision] if target.revision else [])]
    common += ["--trust-remote-code"] if target.trust_remote_code else []
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    mixed = len(set(folder.layer_types())) > 1
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", name, "--speculative-algorithm", "DFLASH"]
    lines = {
        "sglang": [*sglang, "--speculative-draft-model-path", drafter, *common],
        "vllm": ["vllm", "serve", name, "--speculative-config", json.dumps(speculative, ensure_ascii=False), *common],
        "z-lab": ["dflash", "generate", "transformers", "Why is the sky blue?", "--model", name, "--draft", drafter],
    }
    prefix = {"vllm": "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""}
    return {engine: prefix.get(engine, "") + shlex.join(lines[engine]) for engine in lines if engine in engines}
