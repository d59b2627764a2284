"""Acceptance statistics of decoded prompts.

The headline is the pooled acceptance length: tokens produced by verification forwards over the number of those
forwards, all rounds of all prompts alike. That is what decides the speed-up. z-lab's benchmark instead averages rounds
within a prompt and then over prompts, so that a short answer weighs as much as a long one; it is given beside it. The
first token of an answer comes from reading the prompt and counts in neither. A round cut by a stop token or by the
length limit counts with what it produced, as in z-lab's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dflash_train.speculate.decode import DecodeResult


def acceptance_statistics(results: Sequence[DecodeResult], block_size: int) -> dict[str, Any]:
    """JSON-able statistics of speculative decoding; lengths are None where no prompt had a round."""
    rounds = [round_ for result in results for round_ in result.rounds]
    lengths = Counter(round_.num_produced for round_ in rounds)
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
        "num_rounds": len(rounds),
        "histogram": [lengths[length] for length in range(1, block_size + 1)],
        "positions": positions,
    }


def speed_statistics(results: Sequence[DecodeResult]) -> dict[str, Any]:
    """Tokens, seconds and tokens a second after the first token of each prompt; reading the prompts stands apart."""
    num_tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(result.decode_seconds for result in results)
    num_decoded = num_tokens - len(results)
    return {
        "num_tokens": num_tokens,
        "num_stopped": sum(result.stopped for result in results),
        "prefill_seconds": sum(result.prefill_seconds for result in results),
        "decode_seconds": seconds,
        "tokens_per_second": num_decoded / seconds if num_decoded and seconds else None,
    }
