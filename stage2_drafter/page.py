"""The HTML of a run's report: headline numbers, charts, tables. Every text from data is escaped; a policy in the page
forbids scripts and network, so nothing in a run folder can make the page do anything.
"""

from __future__ import annotations

import dataclasses
import html
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_train.stage2_drafter.charts import draw_chart, format_value
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.curves import accuracy_of, number, run_charts, shown_slots, slot_accuracy
from dflash_train.stage2_drafter.report import CheckpointRecord, RunRecord
from dflash_train.stage2_drafter.run_checkpoints import score_of
from dflash_train.stage2_drafter.versions import package_versions
from dflash_train.units import format_bytes

MOST_EVALUATIONS = 200  # rows of the table
_WORDS = {"None": "none", "True": "yes", "False": "no"}

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f26;--soft:#5c6470;--edge:#dfe3e8;--grid:#e8ebef;
--c1:#2a6fbb;--c2:#c8501e;--c3:#1d8a5f;--c4:#8a4fc0;--c5:#a57c00;--c6:#c2387f}
@media(prefers-color-scheme:dark){:root{--page:#14171c;--card:#1c2027;--ink:#e7eaee;--soft:#9aa3b0;--edge:#2f353f;
--grid:#2a2f38;--c1:#6aa8ec;--c2:#f0905f;--c3:#4fc795;--c4:#bd93ec;--c5:#dcb545;--c6:#f085b8}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:34px 0 10px}
p{margin:0 0 8px;color:var(--soft);overflow-wrap:anywhere}p.warn{color:var(--c2)}
.tiles{display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin:20px 0 14px;padding:0}
.tiles div,.chart,.table{background:var(--card);border:1px solid var(--edge);border-radius:8px}
.tiles div{padding:10px 14px}.tiles dt{color:var(--soft);font-size:.8rem}
.tiles dd{margin:0;font-size:1.35rem;line-height:1.3}.tiles small{display:block;color:var(--soft);font-size:.78rem}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.chart{display:flex;flex-direction:column;margin:0;padding:14px 16px 16px;min-width:0}
figcaption b{display:block}figcaption span{color:var(--soft);font-size:.82rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 8px;padding:0;font-size:.82rem}
.legend li::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;background:var(--c);
margin-right:6px;vertical-align:.22em}
.legend li.dots::before{width:8px;height:8px;border-radius:50%;vertical-align:0}
.plot{margin-top:auto;padding:8px 14px 40px 48px}.plot>svg{display:block;width:100%;height:210px;overflow:visible}
.plot text{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}path{vector-effect:non-scaling-stroke;fill:none;stroke-linejoin:round;stroke-linecap:round}
.line{stroke-width:2}.raw{stroke-width:1;opacity:.35}.link{stroke-width:1.2;opacity:.55}path.band{opacity:.16;stroke:none}
.plot circle{stroke:var(--card);stroke-width:1}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px;text-align:left;border-top:1px solid var(--grid);vertical-align:top}
thead th,tbody:first-child tr:first-child>*{border-top:0}thead th{color:var(--soft);font-weight:500;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}tbody th{font-weight:400;color:var(--soft);width:1%;white-space:nowrap}
tr.changed td,tr.changed th{color:var(--ink);font-weight:600}
.facts td{overflow-wrap:anywhere;min-width:12ch}
pre.table{margin:0;padding:12px 14px;font-size:.85rem}
.columns{display:grid;gap:0 14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));align-items:start}
.mark{background:var(--c1);color:var(--card);border-radius:4px;font-size:.72rem;padding:1px 6px;margin-left:6px}
footer{margin-top:34px;color:var(--soft);font-size:.82rem}
@media print{body{background:#fff}.chart,.tiles div{break-inside:avoid}}
"""


def make_page(run: RunRecord) -> str:
    """The whole page of a run."""
    name = "/".join(run.path.resolve().parts[-2:])
    charts = "".join(draw_chart(chart) for chart in run_charts(run)) or "<p>No step was logged yet.</p>"
    parts = [
        f"<h1>{_text(name)}</h1>",
        _lead(run),
        _tiles(run),
        f'<h2>Curves</h2><div class="charts">{charts}</div>',
        _checkpoint_table(run),
        _decoding_table(run),
        _evaluation_table(run),
        _settings(run),
        _footer(),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(name)}: training report</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _lead(run: RunRecord) -> str:
    lines = []
    state = run.state
    if state is not None:
        store, drafter = state.store, state.drafter
        lines.append(
            f"Drafter of {drafter.get('num_hidden_layers')} layers with block size {drafter.get('block_size')} for "
            f"{store.get('target_name')}, from a store in {store.get('encoding')}."
        )
    versions = dict(state.versions) if state is not None else {}
    made_with = ["dflash-train " + versions["dflash-train"]] if "dflash-train" in versions else []
    made_with += [f"source {versions['source revision']}"] if "source revision" in versions else []
    lines += [f"Trained with {', '.join(made_with)}."] if made_with else []
    warnings = [f"{entry.name} cannot be read: {entry.problem}" for entry in run.checkpoints if entry.problem]
    if run.unreadable_lines:
        lines_text = "1 line" if run.unreadable_lines == 1 else f"{run.unreadable_lines:,} lines"
        warnings.append(f"{lines_text} of metrics.jsonl could not be read (or one is being written) and are left out.")
    if not run.checkpoints:
        warnings.append("No checkpoint has been written yet; it will add configuration, manifest and versions.")
    return "".join(f"<p>{_text(line)}</p>" for line in lines) + "".join(
        f'<p class="warn">{_text(line)}</p>' for line in warnings
    )


def _tiles(run: RunRecord) -> str:
    tiles: list[tuple[str, str, str]] = []
    total = run.state.total_steps if run.state is not None else None
    if run.steps:
        step = run.steps[-1]["step"]
        seconds = sum(
            number(entry.get("tokens")) / speed
            for entry in run.steps
            if (speed := number(entry.get("tokens_per_second"))) > 0
        )
        tokens = sum(value for entry in run.steps if not math.isnan(value := number(entry.get("tokens"))))
        skipped = sum(entry.get("skipped") is not None for entry in run.steps)
        tiles.append(("steps", f"{step:,}" + (f" of {total:,}" if total else ""), f"{skipped:,} skipped"))
        tiles.append(("tokens trained on", format_value(tokens, "short"), f"in {_duration(seconds)} of steps"))
    if run.evaluations:
        last = run.evaluations[-1]
        first = number(run.evaluations[0].get("loss"))
        tiles.append(("held-out loss", _show(last.get("loss")), f"{_show(first)} at first"))
        scores = [number(entry.get("acceptance_length")) for entry in run.evaluations]
        best = max((score for score in scores if not math.isnan(score)), default=math.nan)
        tiles.append(("acceptance, estimated", _show(last.get("acceptance_length")), f"best {_show(best)}"))
        measured = [
            score for entry in run.evaluations if not math.isnan(score := number(entry.get("real_acceptance_length")))
        ]
        if measured:
            tiles.append(("acceptance, real", f"{measured[-1]:.3f}", f"best {max(measured):.3f}"))
    if run.decodings:
        decoding = run.decodings[-1]
        prompts = decoding.values.get("num_prompts", "?")
        length = _show(decoding.values.get("acceptance_length"))
        tiles.append(("acceptance, decoded", length, f"step {decoding.step:,}, {prompts} prompts"))
    if run.steps:
        speeds = sorted(value for entry in run.steps if not math.isnan(value := number(entry.get("tokens_per_second"))))
        waits = [value for entry in run.steps if not math.isnan(value := number(entry.get("wait_share")))]
        if speeds:
            tiles.append(("tokens a second", format_value(speeds[len(speeds) // 2], "short"), "median of steps"))
        if waits:
            tiles.append(("waiting for data", f"{sum(waits) / len(waits):.1%}", f"at most {max(waits):.1%}"))
    cells = [
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(note)}</small></dd></div>"
        for name, value, note in tiles
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def _checkpoint_table(run: RunRecord) -> str:
    if not run.checkpoints:
        return ""
    scores = {entry.name: score_of(_evaluation_of(entry)) for entry in run.checkpoints}
    known = {name: score for name, score in scores.items() if score is not None}
    best = max(known, key=lambda name: known[name]) if known else None
    decoded = {entry.step: entry.values for entry in run.decodings}
    rows = []
    for entry in run.checkpoints:
        marks = ["best"] * (entry.name == best) + ["newest"] * (entry is run.checkpoints[-1])
        evaluation = _evaluation_of(entry)
        name = _text(entry.name) + "".join(f'<span class="mark">{mark}</span>' for mark in marks)
        accuracy = accuracy_of(evaluation)
        rows.append(
            [
                name,
                format_bytes(entry.drafter_bytes),
                format_bytes(entry.total_bytes),
                _show(evaluation.get("loss")),
                _share(accuracy[0] if accuracy else None),
                _show(evaluation.get("acceptance_length")),
                _show(decoded.get(entry.step, _as_decoded(evaluation)).get("acceptance_length")),
            ]
        )
    head = ["checkpoint", "drafter", "with training state", "held-out loss", "accuracy at slot 1"]
    head += ["estimated acceptance", "real acceptance"]
    return "<h2>Checkpoints</h2>" + _table(head, rows)


def _decoding_table(run: RunRecord) -> str:
    rows = []
    for entry in run.decodings:
        values = entry.values
        words = [values.get("prompt_source"), values.get("device"), values.get("dtype")]
        rows.append(
            [
                f"{entry.step:,}",
                _show(values.get("acceptance_length")),
                _show(values.get("speedup")),
                _text(
                    _WORDS[str(values.get("lossless"))] if isinstance(values.get("lossless"), bool) else "not checked"
                ),
                _text(values.get("num_prompts", "")),
                _text(values.get("max_new_tokens", "")),
                _text(", ".join(str(word) for word in words if word)),
            ]
        )
    head = ["step", "acceptance length", "speed over plain", "same output", "prompts", "tokens each", "prompts, device"]
    return "<h2>Real decoding</h2>" + _table(head, rows, left=(6,)) if rows else ""


def _evaluation_table(run: RunRecord) -> str:
    if not run.evaluations:
        return ""
    stride = math.ceil(len(run.evaluations) / MOST_EVALUATIONS)
    shown = run.evaluations[::-1][::stride][::-1]
    slots = shown_slots(max(len(accuracy_of(entry)) for entry in run.evaluations))
    real = any("real_acceptance_length" in entry for entry in run.evaluations)
    rows = [
        [
            f"{entry['step']:,}",
            *(_show(entry.get(name)) for name in ("loss", "cross_entropy", "acceptance_length")),
            *([_show(entry.get("real_acceptance_length"))] if real else []),
            *(_share(slot_accuracy(entry, slot)) for slot in slots),
            _text(entry.get("rows", "")),
        ]
        for entry in shown
    ]
    head = ["step", "loss", "cross-entropy", "estimated acceptance", *(["real acceptance"] if real else [])]
    head += [*(f"slot {slot}" for slot in slots), "rows"]
    left_out = f"<p>Every {stride}th of {len(run.evaluations):,}.</p>" if stride > 1 else ""
    return "<h2>Held-out evaluations</h2>" + left_out + _table(head, rows)


def _settings(run: RunRecord) -> str:
    state = run.state
    if state is None:
        return f'<h2>Recipe</h2><pre class="table">{_text(run.recipe)}</pre>' if run.recipe else ""
    defaults = {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in dataclasses.fields(TrainConfig)
    }
    changed = {name for name, value in state.config.items() if name in defaults and value != defaults[name]}
    left = "<h2>Configuration</h2><p>Bold where it is not the default.</p>" + _facts(state.config, changed)
    right = "<h2>Store</h2>" + _facts({**state.store, "segments": len(state.segments)})
    right += "<h2>Versions</h2>" + _facts(state.versions)
    right += "<h2>Drafter</h2>" + _facts(state.drafter)
    return f'<div class="columns"><section>{left}</section><section>{right}</section></div>'


def _footer() -> str:
    versions = package_versions()
    source = f", source {versions['source revision']}" if "source revision" in versions else ""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    text = f"Made by dflash-train {versions['dflash-train']}{source} on {made}. Bold lines are running means of the faint ones."
    return f"<footer>{_text(text)}</footer>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table whose first column and those named are text, the others numbers. Cells are HTML, heads are text."""

    def kind(column: int) -> str:
        return "" if column == 0 or column in left else ' class="n"'

    heads = "".join(f"<th{kind(column)}>{_text(text)}</th>" for column, text in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{kind(column)}>{cell}</td>' for column, cell in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(values: Mapping[str, Any], changed: Iterable[str] = ()) -> str:
    """A table of names and values, nested objects as «outer.inner»."""
    marked = set(changed)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{name}.{key}": item for key, item in inner.items()} if inner else {name: value}
    rows = []
    for name, value in flat.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else _WORDS.get(str(value), str(value))
        mark = ' class="changed"' if name in marked else ""
        rows.append(f"<tr{mark}><th>{_text(name.replace('_', ' '))}</th><td>{_text(text)}</td></tr>")
    return f'<div class="table facts"><table><tbody>{"".join(rows)}</tbody></table></div>'


def _as_decoded(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation measured by real decoding, as an evaluation of `dflash evaluate` has it."""
    return {"acceptance_length": evaluation.get("real_acceptance_length")}


def _evaluation_of(entry: CheckpointRecord) -> dict[str, Any]:
    return entry.state.evaluation or {} if entry.state is not None else {}


def _show(value: Any) -> str:
    known = number(value)
    return "–" if math.isnan(known) else f"{known:.3f}"


def _share(value: Any) -> str:
    known = number(value)
    return "–" if math.isnan(known) else f"{known:.1%}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds) or seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _text(value: Any) -> str:
    return html.escape(str(value))
