"""Acceptance statistics of hand-made rounds."""

from dflash_train.speculate.acceptance import acceptance_statistics, speed_statistics, summarise
from dflash_train.speculate.answering import PromptResult, TurnResult
from dflash_train.speculate.decode import DecodeResult, Round


def test_statistics_of_known_rounds() -> None:
    long = DecodeResult(token_ids=[0] * 8, rounds=[Round(3, 3, 4), Round(3, 1, 2), Round(1, 0, 1)], decode_seconds=2.0)
    short = DecodeResult(token_ids=[0] * 2, rounds=[Round(3, 0, 1)], decode_seconds=0.5, stopped=True)
    empty = DecodeResult(token_ids=[0], stopped=True)
    found = acceptance_statistics([long, short, empty], block_size=4)
    assert found["acceptance_length"] == 8 / 4
    assert found["acceptance_length_per_prompt"] == (7 / 3 + 1) / 2
    assert found["acceptance_length_over_anchors"] is None, "decoding has none"
    assert found["num_rounds"] == 4
    assert found["histogram"] == [2, 1, 0, 1]
    keys = ("position", "num_drafted", "num_reached", "num_accepted", "conditional", "cumulative")
    assert [tuple(entry[key] for key in keys) for entry in found["positions"]] == [
        (1, 4, 4, 2, 2 / 4, 2 / 4),
        (2, 3, 2, 1, 1 / 2, 1 / 3),
        (3, 3, 1, 1, 1.0, 1 / 3),
    ]
    speed = speed_statistics([long, short, empty])
    assert (speed["num_tokens"], speed["num_stopped"], speed["tokens_per_second"]) == (11, 2, 8 / 2.5)


def test_anchors_of_all_answers_count_alike() -> None:
    replayed = [DecodeResult(rounds=[Round(3, 3, 4)], anchor_lengths=lengths) for lengths in ([4, 1, 1, 1], [], [3])]
    assert acceptance_statistics(replayed, block_size=4)["acceptance_length_over_anchors"] == 10 / 5


def test_no_round_at_all() -> None:
    found = acceptance_statistics([DecodeResult(token_ids=[0])], block_size=2)
    assert found["acceptance_length"] is None
    assert found["acceptance_length_per_prompt"] is None
    assert found["positions"][0]["conditional"] is None
    assert speed_statistics([DecodeResult(token_ids=[0])])["tokens_per_second"] is None


def test_the_speedup_is_speculative_over_plain_tokens_a_second_of_each_data_set_and_of_all() -> None:
    def answered(source: str, plain_seconds: float) -> PromptResult:
        speculative = DecodeResult(token_ids=[0] * 9, rounds=[Round(3, 3, 4)] * 2, decode_seconds=2.0)
        plain = DecodeResult(token_ids=[0] * 9, decode_seconds=plain_seconds)
        for result in (speculative, plain):
            result.prefill_seconds = 100.0  # counts in none of it
        turn = TurnResult(num_prompt_tokens=5, speculative=speculative, plain=plain)
        return PromptResult(index=0, source=source, turns=[turn])

    result = summarise([answered("a", 4.0), answered("b", 12.0)], block_size=4)
    assert (result["speculative"]["tokens_per_second"], result["plain"]["tokens_per_second"]) == (4.0, 1.0)
    assert (result["speculative"]["prefill_seconds"], result["speculative"]["decode_seconds"]) == (200.0, 4.0)
    assert [entry["speedup"] for entry in (result, *result["data_sets"])] == [4.0, 2.0, 6.0]
