"""Acceptance statistics of decoded prompts.

The headline is the pooled acceptance length: tokens produced by verification forwards over the number of those
forwards, all rounds of all prompts alike. That is what decides the speed-up. z-lab's benchmark instead averages rounds
within an answer and then over answers, so that a short answer weighs as much as a long one; it is given beside it. The
first token of an answer comes from reading the prompt and counts in neither. A round cut by a stop token or by the
length limit counts with what it produced, as in z-lab's code. A replay knows the length of a round at every token, too:
the mean over all of these weighs text by its length, not by its rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_train.speculate.decode import DecodeResult

if TYPE_CHECKING:
    from dflash_train.speculate.answering import PromptResult


def acceptance_statistics(results: Sequence[DecodeResult], block_size: int) -> dict[str, Any]:
    """JSON-able statistics of speculative decoding; lengths are None where no answer had a round."""
    rounds = [round_ for result in results for round_ in result.rounds]
    lengths = Counter(round_.num_produced for round_ in rounds)
    at_anchors = [length for result in results for length in result.anchor_lengths or ()]
    means = [sum(result.acceptance_lengths) / len(result.rounds) for result in results if result.rounds]
    positions = []
    for position in range(1, block_size):
        drafted = [round_ for round_ in rounds if round_.num_drafted >= position]
        reached = sum(round_.num_accepted >= position - 1 for round_ in drafted)
        accepted = sum(round_.num_accepted >= position for round_ in drafted)
        positions.append(
            {
                "position": position,
                "num_drafted": len(drafted),
                "num_reached": reached,
                "num_accepted": accepted,
                "conditional": accepted / reached if reached else None,
                "cumulative": accepted / len(drafted) if drafted else None,
            }
        )
    return {
        "acceptance_length": sum(round_.num_produced for round_ in rounds) / len(rounds) if rounds else None,
        "acceptance_length_per_prompt": sum(means) / len(means) if means else None,
        "acceptance_length_over_anchors": sum(at_anchors) / len(at_anchors) if at_anchors else None,
        "num_rounds": len(rounds),
        "histogram": [lengths[length] for length in range(1, block_size + 1)],
        "positions": positions,
    }


def speed_statistics(results: Sequence[DecodeResult], timed: bool = True) -> dict[str, Any]:
    """Tokens, seconds and tokens a second after the first token of each answer; reading the prompts stands apart.

    Answers that were not timed (replay.py) have no seconds.
    """
    num_tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(result.decode_seconds for result in results)
    num_decoded = num_tokens - len(results)
    return {
        "num_tokens": num_tokens,
        "num_stopped": sum(result.stopped for result in results),
        "prefill_seconds": sum(result.prefill_seconds for result in results) if timed else None,
        "decode_seconds": seconds if timed else None,
        "tokens_per_second": num_decoded / seconds if timed and num_decoded and seconds else None,
    }


def summarise(
    results: Sequence[PromptResult],
    block_size: int,
    compared: bool = True,
    referred: bool = False,
    timed: bool = True,
) -> dict[str, Any]:
    """All numbers of an evaluation, over all prompts and by data set; `compared`: plain and speculative must be equal.

    `referred`: each answer was compared with that of z-lab's package, too. `timed`: it was decoded, not replayed.
    """
    sources = list(dict.fromkeys(result.source for result in results))
    by_source = [
        {"source": source, **_numbers([result for result in results if result.source == source], block_size, timed)}
        for source in sources
    ]
    differences = _differences(results, "difference") if compared else None
    reference = None
    if referred:
        found = _differences(results, "reference_difference")
        reference = {
            "num_equal": sum(len(result.turns) for result in results) - len(found),
            "differences": found,
            "same": all(entry["within_rounding"] for entry in found),
        }
    numbers = _numbers(results, block_size, timed)
    return {
        "block_size": block_size,
        **numbers,
        "data_sets": by_source,
        "num_equal": numbers["num_answers"] - len(differences) if differences is not None else None,
        "differences": differences,
        "lossless": all(entry["within_rounding"] for entry in differences) if differences is not None else None,
        "reference": reference,
    }


def _numbers(results: Sequence[PromptResult], block_size: int, timed: bool) -> dict[str, Any]:
    turns = [turn for result in results for turn in result.turns]
    speculative = [turn.speculative for turn in turns]
    plain = [turn.plain for turn in turns if turn.plain is not None]
    speeds = {"speculative": speed_statistics(speculative, timed), "plain": speed_statistics(plain) if plain else None}
    rates = [speed["tokens_per_second"] if speed else None for speed in speeds.values()]
    return {
        "num_prompts": len(results),
        "num_answers": len(turns),
        "num_prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
        **acceptance_statistics(speculative, block_size),
        **speeds,
        "speedup": rates[0] / rates[1] if rates[0] and rates[1] else None,
    }


def _differences(results: Sequence[PromptResult], name: str) -> list[dict[str, Any]]:
    return [
        {"prompt": result.index, "turn": number, **difference}
        for result in results
        for number, turn in enumerate(result.turns)
        if (difference := getattr(turn, name)) is not None
    ]
