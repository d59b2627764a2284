"""The block mask's kernels against the eager twin, table by table; on a CPU under Triton's interpreter."""

import pytest
import torch

from dflash_train.stage2_drafter.blocks import block_mask

mask_kernel = pytest.importorskip("dflash_train.stage2_drafter.mask_kernel")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLES = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


def draw(num_tokens: int, num_anchors: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors in documents of random lengths, the last two dummies; seed 0: one document, so tiles seen whole."""
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.sort(torch.randint(num_tokens, (num_anchors,), generator=generator)).values
    borders = torch.zeros(1, dtype=torch.int64) if seed == 0 else torch.randperm(num_tokens, generator=generator)[:5]
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), borders)).sort().values
    start = starts[torch.searchsorted(starts, anchor, right=True) - 1]
    anchor[-2:] = start[-2:] = 0
    return start.int().to(DEVICE), anchor.int().to(DEVICE)


@pytest.mark.parametrize("window, causal", [(None, False), (None, True), (150, False), (5, True)])
@pytest.mark.parametrize("num_tokens, num_anchors, size", [(512, 64, 16), (384, 128, 10), (507, 33, 7), (128, 8, 16)])
def test_the_kernels_fill_the_tables_of_the_eager_twin(
    num_tokens: int, num_anchors: int, size: int, window: int | None, causal: bool
) -> None:
    for seed in range(2):
        start, anchor = draw(num_tokens, num_anchors, seed)
        expected = block_mask(start, anchor, num_tokens, size, window, causal)
        found = mask_kernel.fused_block_mask(start, anchor, num_tokens, size, window, causal)
        for table in TABLES:
            torch.testing.assert_close(getattr(found, table), getattr(expected, table), atol=0, rtol=0, msg=table)
        assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the size is for a GPU")
def test_the_tables_are_equal_at_the_sizes_of_a_real_row() -> None:
    for num_tokens, num_anchors in ((8192, 1024), (65536, 8192)):
        start, anchor = draw(num_tokens, num_anchors, 1)
        expected = block_mask(start, anchor, num_tokens, 16)
        found = mask_kernel.fused_block_mask(start, anchor, num_tokens, 16)
        assert all(torch.equal(getattr(found, table), getattr(expected, table)) for table in TABLES)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has a host to wait for it")
def test_the_host_does_not_wait_and_no_mask_of_all_pairs_is_in_memory() -> None:
    start, anchor = draw(65536, 8192, 1)
    mask_kernel.fused_block_mask(start, anchor, 65536, 16)  # compiles the kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask_kernel.fused_block_mask(start, anchor, 65536, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pairs = 16 * 8192 * (65536 + 16 * 8192)
    assert torch.cuda.max_memory_allocated() - before < pairs / 100
