"""Why is the real acceptance length below the estimate? The usual causes, and what of them can be checked in the run itself.

The causes are those that users of other trainers met (SpecForge #455, #533, #500, z-lab #7, #172, speculators #613, and
more in docs/troubleshooting.md): another target, layer or mask token than in training, another way through the drafter,
another template or mode of thinking, answers that are not the target's, prompts of another kind. The most telling check
is the last: prompts of the held-out conversations themselves, decoded for real. If these reach the estimate, drafter and
paths are sound, and the prompts are simply not what it was trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.speculate.answering import PromptDecoder
from dflash_train.speculate.findings import Check, error, ok, warning
from dflash_train.speculate.prompts import Prompt
from dflash_train.stage1_target.recompute import compare_samples
from dflash_train.stage1_target.target_config import text_config
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.drafter_config import target_rope_theta
from dflash_train.stage2_drafter.preparation import PreparedRun

LARGEST_GAP = 0.15
"""Share by which the real number may lie below the estimate without a word."""
STATE_TOLERANCE = 0.05
"""Of stored against recomputed states, beside the encoding's rounding: `dflash inspect-store --verify recompute`."""
OWN_TEXT = 0.6
"""Share of the target's own first choices in its own sampled answers, at least; other people's texts have some half."""
NUM_SAMPLES, MOST_TOKENS = 4, 512
"""Held-out samples that are read again, and how much of each."""


@dataclass(frozen=True)
class Evidence:
    """What a measurement knows."""

    run: PreparedRun
    decoder: PromptDecoder
    prompts: list[Prompt]
    num_trained: int
    """Prompts left out because they are in the training data."""
    tensors: dict[str, Tensor]
    """The drafter as a checkpoint holds it."""

    def held_out(self) -> list[int]:
        """Positions of some held-out samples; where there is an estimate there are some."""
        return [int(index) for index in np.flatnonzero(self.run.held_out())[:NUM_SAMPLES]]


def explain_gap(evidence: Evidence, estimate: float, real: float) -> list[str]:
    """Lines for the log: the gap, and each usual cause with what was checked."""
    checks = list(_checks(evidence, estimate))
    below = f"lies {1 - real / estimate:.0%} below the estimate {estimate:.2f}"
    lines = [f"warning: the real acceptance length {real:.2f} {below}; the usual causes, and what was checked:"]
    for check in checks:
        way_out = "" if check.status == "ok" else check.way_out
        lines.append(f"  {check.status}: {check.name}: {check.text} {way_out}".rstrip())
    return lines


def _checks(evidence: Evidence, estimate: float) -> Iterator[Check]:
    yield ok("target", "weights, config, tokenizer, chat template and layer ids are those of the store.")
    made: dict[str, Callable[[], Iterable[Check]]] = {
        "stored states": lambda: [_states(evidence)],
        "train/serve parity": lambda: _paths(evidence),
        "rotary positions": lambda: [_rotary(evidence)],
        "mask token": lambda: [_mask_token(evidence)],
        "chat template and thinking": lambda: [_template(evidence)],
        "own answers": lambda: [_own_text(evidence)],
        "training data": lambda: [_training_data(evidence)],
        "held-out prompts": lambda: [_held_out_prompts(evidence, estimate)],
    }
    for name, check in made.items():
        try:
            yield from check()
        except (InputError, torch.OutOfMemoryError) as reason:  # of a training that goes on
            text = "not enough device memory" if isinstance(reason, torch.OutOfMemoryError) else str(reason)
            yield warning(name, f"not checked: {text}", "Look at it by `dflash check` and `dflash evaluate`.")


def _states(evidence: Evidence) -> Check:
    """Layers, numbering and cache of the extraction against a new forward."""
    name, reader = "stored states", evidence.run.reader
    report = compare_samples(reader, evidence.decoder.target, evidence.held_out()[:1])
    worst = max(report.largest, key=lambda layer: report.largest[layer])
    difference, limit = report.largest[worst], STATE_TOLERANCE + report.rounding
    if not difference <= limit:
        text = f"{worst} of a stored sample differs by {difference:.1%} from this target's ({limit:.1%} would be rounding)."
        return error(name, text, "Extract again: the drafter is trained on other states than it will see.")
    return ok(name, f"a stored sample computed again differs by at most {difference:.1%} ({worst}).")


def _paths(evidence: Evidence) -> Iterator[Check]:
    """The drafter as training computes it against the drafter with its cache, and the target with its."""
    from dflash_train.speculate.parity import check_parity

    drafter = Drafter(evidence.run.drafter_config, seed=None)
    drafter.load_state_dict(evidence.tensors)
    drafter.float().requires_grad_(False).eval()
    short = sorted((prompt.token_ids for prompt in evidence.prompts), key=len)[:2]
    states, paths, _first_drafts = check_parity(evidence.decoder.target, drafter, short)
    yield states
    yield Check("train/serve parity", paths.status, paths.text, paths.way_out)


def _rotary(evidence: Evidence) -> Check:
    """The drafter's angles against the target's: another base trains, and drafts worse the longer the context."""
    name, base = "rotary positions", evidence.run.drafter_config.rope_theta
    target = text_config(evidence.decoder.target.model_config).to_dict()
    wanted = target_rope_theta(target)
    if base != wanted:
        text = f"the drafter's base is {base:,.0f}, the target's {wanted:,.0f}."
        return warning(name, text, "Train with the target's: rope_theta in --drafter-config.")
    partial = (target.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0
    note = "; engines must not take the target's partial rotation for the drafter" if partial else ""
    return ok(name, f"base {base:,.0f}, the target's{note}.")


def _mask_token(evidence: Evidence) -> Check:
    name, token = "mask token", evidence.run.drafter_config.mask_token_id
    reader = evidence.run.reader
    texts = [reader.read(index).token_ids for index in evidence.held_out()]
    texts += [np.asarray(prompt.token_ids) for prompt in evidence.prompts]
    count = sum(int((text == token).sum()) for text in texts)
    if count:
        return error(
            name, f"{token} stands {count:,} times in text.", "Train with a token that no text has: --mask-token."
        )
    return ok(name, f"{token}, in training and in config.json, is not in the text of samples and prompts.")


def _template(evidence: Evidence) -> Check:
    name, sources = "chat template and thinking", evidence.run.reader.sources()
    used = [source.get("settings", {}).get("chat_template_arguments") or {} for source in sources]
    different = [arguments for arguments in used if arguments != used[-1]]
    if different:
        text = f"segments were extracted with {used[-1]} and with {different[0]}; the prompts take the first."
        return warning(name, text, "Other modes of thinking halve acceptance: train on the mode that you serve.")
    arguments = used[-1] if used else {}
    return ok(name, f"the prompts take the arguments of the extraction, {arguments or 'none'}.")


def _own_text(evidence: Evidence) -> Check:
    """Does the target say what the data says? Teacher forcing follows the data, decoding the target."""
    name, target, reader = "own answers", evidence.decoder.target, evidence.run.reader
    right = counted = 0
    for index in evidence.held_out():
        sample = reader.read(index)
        token_ids = torch.from_numpy(sample.token_ids[:MOST_TOKENS]).long()
        with torch.inference_mode():
            choices = target.model(token_ids[None].to(target.device), use_cache=False).logits[0, :-1].argmax(-1).cpu()
        counts = torch.from_numpy(sample.loss_mask[1 : len(token_ids)].astype(bool))
        right += int((choices == token_ids[1:])[counts].sum())
        counted += int(counts.sum())
    share = right / max(counted, 1)
    temperatures = {
        made.get("temperature") for source in reader.sources() for made in source.get("generation") or [] if made
    }
    how = (
        f"regenerated at temperature {', '.join(map(str, sorted(temperatures)))}" if temperatures else "not regenerated"
    )
    text = f"{share:.0%} of the answers' tokens are the target's first choice ({how}); prompts are decoded at temperature 0."
    if share < OWN_TEXT:
        return warning(name, text, "Let the target answer the data itself: `dflash regenerate`.")
    return ok(name, text)


def _training_data(evidence: Evidence) -> Check:
    left_out = f" ({evidence.num_trained:,} that were are left out)" if evidence.num_trained else ""
    return ok("training data", f"none of the prompts is in it, by group hash{left_out}.")


def _held_out_prompts(evidence: Evidence, estimate: float) -> Check:
    """The prompts of held-out conversations, decoded for real."""
    name, lengths = "held-out prompts", list[int]()
    for index in evidence.held_out():
        sample = evidence.run.reader.read(index)
        prompt = sample.token_ids[: int(sample.loss_mask.argmax())].tolist()
        if prompt:
            lengths += evidence.decoder.answer(prompt).acceptance_lengths
    if not lengths:
        return warning(name, "not decoded: no held-out sample has a prompt and a round.", "")
    real = sum(lengths) / len(lengths)
    text = f"on prompts of held-out conversations real decoding reaches {real:.2f}"
    if real < (1 - LARGEST_GAP) * estimate:
        return warning(
            name,
            f"{text}, below the estimate, too.",
            "So the prompts are not the cause: look at the lines above. If these are ok, at --evaluate-new-tokens: what "
            "is decoded should be as long as the answers of the data.",
        )
    return ok(name, f"{text}: the drafter is as good as estimated, these prompts are of another kind than its data.")
