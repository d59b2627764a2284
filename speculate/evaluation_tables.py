"""The report of an evaluation for the terminal, as rich tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_train.speculate.prompts import source_labels
from dflash_train.units import format_count

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def format_evaluation(result: dict[str, Any]) -> Group:
    """The report of `evaluate`: headline, one line a data set, one a block position, and whether the output is right."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    if result["num_prompts"] < result["num_planned_prompts"]:
        why = "Stopped" if result["interrupted"] else "Ended early"
        parts.append(
            Text(
                f"{why} after {result['num_prompts']:,} of {result['num_planned_prompts']:,} prompts: all numbers are of "
                "these.",
                style="bold",
            )
        )
    parts.append(_summary(result))
    if len(result["data_sets"]) > 1:
        parts += [Text(), _data_sets(result)]
    sentences = "\n".join([_agreement_text(result), *_reference_lines(result)])
    parts += [Text(), _positions(result), Text(), Text(sentences)]
    return Group(*parts)


def _summary(result: dict[str, Any]) -> Table:
    from rich.table import Table

    summary = Table(show_header=False, box=None, pad_edge=False)
    summary.add_row(
        "acceptance length", f"[bold]{_number(result['acceptance_length'])}[/bold]  tokens per target forward"
    )
    summary.add_row(
        "  mean over answers", f"{_number(result['acceptance_length_per_prompt'])}  as z-lab's benchmark averages"
    )
    if result["acceptance_length_over_anchors"] is not None:
        summary.add_row(
            "  mean over anchors",
            f"{_number(result['acceptance_length_over_anchors'])}  of a round at every token",
        )
    summary.add_row("block size", f"{result['block_size']}  ({result['block_size'] - 1} drafts a round)")
    answers = "" if result["num_answers"] == result["num_prompts"] else f"{result['num_answers']:,} answers, "
    left_out = result["trained_prompts"]["found"] if result["trained_prompts"]["left_out"] else 0
    trained = f"; {left_out:,} that were trained on are left out" if left_out else ""
    summary.add_row("prompts", f"{result['num_prompts']:,}  ({answers}{result['num_prompt_tokens']:,} tokens{trained})")
    summary.add_row("new tokens, rounds", f"{result['speculative']['num_tokens']:,}, {result['num_rounds']:,}")
    summary.add_row("temperature", _temperature(result))
    if result["method"] == "replay":
        summary.add_row("method", "replay of the target's own greedy answers; speeds are not measured")
    for name in ("speculative", "plain"):
        if result[name] is not None and result["method"] != "replay":
            summary.add_row(f"{name} decoding", f"{_number(result[name]['tokens_per_second'], 1)} tokens/s")
    if result["speedup"] is not None:
        summary.add_row("speed-up", f"{_number(result['speedup'])} ×")
    processes = result["num_processes"]
    several = f"{processes} processes, each on " if processes > 1 else ""
    summary.add_row(
        "run on",
        f"{several}{result['device']}, {result['dtype']}, transformers {result['versions']['transformers']}",
    )
    if result["recurrent_target"] and result["method"] != "replay":
        summary.add_row(
            "recurrent layers",
            "copied before each block, replayed after a partly accepted one: one more forward a time",
        )
    return summary


def _temperature(result: dict[str, Any]) -> str:
    if not result["temperature"]:
        return "0  (greedy)"
    cut = [f"top-p {result['top_p']:g}"] if result["top_p"] < 1 else []
    cut += [f"top-k {result['top_k']}"] if result["top_k"] else []
    return f"{', '.join([format(result['temperature'], 'g'), *cut])}  (rejection sampling, seed {result['seed']})"


def _data_sets(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="By data set", title_justify="left")
    table.add_column("data")
    for title in ("prompts", "acceptance length", "over answers", "first draft right", "tokens/s", "plain", "speed-up"):
        table.add_column(title, justify="right")
    entries = result["data_sets"]
    for entry, label in zip(entries, source_labels([entry["source"] for entry in entries]), strict=True):
        plain = None if entry["plain"] is None else entry["plain"]["tokens_per_second"]
        table.add_row(
            label,
            f"{entry['num_prompts']:,}",
            f"[bold]{_number(entry['acceptance_length'])}[/bold]",
            _number(entry["acceptance_length_per_prompt"]),
            _share(entry["positions"][0]["cumulative"]),
            _number(entry["speculative"]["tokens_per_second"], 1),
            _number(plain, 1),
            _number(entry["speedup"]),
        )
    return table


def _positions(result: dict[str, Any]) -> Table:
    from rich.table import Table

    positions = Table(title="Acceptance by block position", title_justify="left")
    for title in ("position", "drafted", "accepted", "if reached", "of drafted", "rounds of this length"):
        positions.add_column(title, justify="right")
    positions.add_row("anchor", "", "", "", "", f"{result['histogram'][0]:,}")
    for entry, count in zip(result["positions"], result["histogram"][1:], strict=True):
        positions.add_row(
            str(entry["position"]),
            f"{entry['num_drafted']:,}",
            f"{entry['num_accepted']:,}",
            _share(entry["conditional"]),
            _share(entry["cumulative"]),
            f"{count:,}",
        )
    return positions


def _agreement_text(result: dict[str, Any]) -> str:
    """Sentences on whether the output equals plain greedy decoding."""
    differences = result["differences"]
    if result["method"] == "replay":
        return "The answers are the target's own: what plain greedy decoding gives. Nothing else was decoded."
    if differences is None:
        if result["temperature"]:
            return "At this temperature outputs are random: their distribution is the target's own, but no two are compared."
        return "Not compared with plain greedy decoding."
    if result["plain"] is None:
        return "Not compared with plain greedy decoding."
    if not differences:
        return f"Output equals plain greedy decoding on {_all_answers(result)}."
    return f"Output differs from plain greedy decoding on {_difference_text(result, differences, 'plain')}"


def _reference_lines(result: dict[str, Any]) -> Sequence[str]:
    reference = result["reference"]
    if reference is None:
        return ()
    if not reference["differences"]:
        return (f"Output equals that of z-lab's package on {_all_answers(result)}.",)
    text = _difference_text(result, reference["differences"], "z-lab's")
    return (f"Output differs from that of z-lab's package on {text}",)


def _all_answers(result: dict[str, Any]) -> str:
    return f"all {_answers(result)}" if result["num_answers"] > 1 else "the one prompt"


def _answers(result: dict[str, Any]) -> str:
    if result["num_answers"] == result["num_prompts"]:
        return format_count(result["num_prompts"], "prompt")
    return format_count(result["num_answers"], "answer")


def _difference_text(result: dict[str, Any], differences: list[dict[str, Any]], other: str) -> str:
    first = differences[0]
    verdict = "a tie that rounding flipped" if first["within_rounding"] else "NOT explained by rounding"
    num_errors = sum(not entry["within_rounding"] for entry in differences)
    gap = "no gap (one output ended)" if first["gap"] is None else f"gap {first['gap']:.3g}"
    turn = f", turn {first['turn'] + 1}" if result["num_answers"] != result["num_prompts"] else ""
    return (
        f"{len(differences):,} of {_answers(result)}, {num_errors:,} of them not explained by rounding. First: prompt "
        f"{first['prompt']}{turn}, new token {first['position']}: {other} {first['plain_token']}, speculative "
        f"{first['speculative_token']}, {gap} between their logits (best two: {first['top2_gap']:.3g}), rounding explains "
        f"{first['rounding']:.3g}: {verdict}."
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
