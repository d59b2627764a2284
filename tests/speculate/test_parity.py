"""Token for token and round for round the same as z-lab's own package (PyPI `dflash` 0.1.0).

Its folder comes from `pip install --no-deps --target tests/.oracle dflash==0.1.0`; installed into the environment it
would overwrite our `dflash` command.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_train.speculate.decode import speculative_decode
from dflash_train.stage1_target.target import Target
from dflash_train.stage2_drafter.drafter import Drafter

ORACLE = Path(__file__).parents[1] / ".oracle"

pytestmark = [
    pytest.mark.skipif(not (ORACLE / "dflash").is_dir(), reason="needs z-lab's dflash 0.1.0 in tests/.oracle"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # the oracle's own call
]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    sys.path.insert(0, str(ORACLE))
    try:
        from dflash import model

        monkeypatch.setattr(model, "_cuda_time", lambda: 0.0)  # it synchronises CUDA even on a CPU
        yield model
    finally:
        sys.path.remove(str(ORACLE))


def load_in_oracle(oracle: Any, drafter: Drafter, folder: Path) -> Any:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(drafter.config.to_json("float32")))
    save_file(drafter.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return oracle.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 4},
        {"block_size": 7, "target_layer_ids": (0, 2, 4), "input_embedding_scale": 2.5},
        {"block_size": 5, "is_causal": True, "final_logit_softcapping": 8.0, "output_multiplier": 0.5},
        {"block_size": 4, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    ],
    ids=["plain", "scaled", "causal", "sliding"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_tokens_and_rounds_equal_those_of_zlab(
    kind: str,
    fields: dict[str, Any],
    oracle: Any,
    tmp_path: Path,
    make_tiny_target: Callable[[str], Target],
    make_tiny_drafter: Callable[..., Drafter],
) -> None:
    target = make_tiny_target(kind)
    seen: set[int] = set()
    for seed in range(3):
        drafter = make_tiny_drafter(target, seed, **fields)
        theirs = load_in_oracle(oracle, drafter, tmp_path)
        for prompt, max_new_tokens, stop_ids in (([3], 30, []), ([1, 2, 9, 4, 4, 8, 0, 5], 23, [7]), ([6, 5], 2, [])):
            expected = oracle.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), max_new_tokens, stop_ids or None, return_stats=True
            )
            result = speculative_decode(target, drafter, prompt, max_new_tokens, stop_ids)
            assert result.token_ids == expected.output_ids[0, len(prompt) :].tolist()
            assert result.acceptance_lengths == expected.acceptance_lengths
            seen.update(result.acceptance_lengths)
    assert len(seen) > 1  # some drafts were accepted
