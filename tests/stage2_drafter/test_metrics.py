from __future__ import annotations

from dflash_train.stage2_drafter.metrics import format_evaluation, format_step


def test_an_evaluation_counts_one_row_one_prompt_and_one_round_as_one() -> None:
    values = {"loss": 1.0, "accuracy": [0.5], "acceptance_length": 1.25}
    real = {"real_acceptance_length": 1.5, "real_seconds": 2.0}
    one = format_evaluation(3, {**values, **real, "rows": 1, "real_prompts": 1, "real_rounds": 1})
    assert "(1 row)" in one and "(1 prompt, 1 round, 2 s)" in one
    more = format_evaluation(3, {**values, **real, "rows": 2, "real_prompts": 1000, "real_rounds": 4000})
    assert "(2 rows)" in more and "(1,000 prompts, 4,000 rounds, 2 s)" in more


def test_a_step_tells_what_it_waited_for() -> None:
    values = {"loss": 2.5, "accuracy": [0.5], "acceptance_length": 1.5, "skipped": None, "tokens_per_second": 9.0}
    values |= {"wait_share": 0.02, "lr": 1e-3, "gradient_norm": 1.0}
    assert "2% of the time waiting for data, lr" in format_step(1, 2, values)
    assert "2% of the time waiting for data, lr" in format_step(1, 2, values | {"store_wait_seconds": 0.1})
    waited = format_step(1, 2, values | {"store_wait_seconds": 12.3})
    assert "2% of the time waiting for data and 12 s for the store to grow, lr" in waited
