"""Measure a drafter: real speculative decoding against its target, at temperature 0, one prompt at a time.

Each prompt is decoded with the drafter and, unless switched off, without it: the first gives acceptance length, the
pair the speed-up and the proof that the output is the target's own. Training accuracy is no substitute
(reference: SpecForge #455, 70 % accuracy at acceptance length 1.02 after a train/serve mismatch).
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_train.errors import InputError
from dflash_train.speculate.acceptance import acceptance_statistics, speed_statistics
from dflash_train.speculate.agreement import first_difference
from dflash_train.speculate.decode import DecodeResult, plain_decode, speculative_decode
from dflash_train.speculate.events import Decoded, Progress
from dflash_train.speculate.loading import (
    check_drafter_fits,
    check_drafter_fits_target,
    find_drafter,
    load_drafter,
    load_drafter_config,
)
from dflash_train.speculate.target_cache import check_continuation
from dflash_train.stage1_target.conversations import SURROGATE, Prompt, RowError, read_prompts
from dflash_train.stage1_target.target import (
    Target,
    TargetConfig,
    load_model_config,
    load_target,
    load_tokenizer,
    stop_token_ids,
    text_config,
)
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.stage2_drafter.drafter import Drafter

if TYPE_CHECKING:
    from rich.console import Group

MOST_BLOCK_SIZE = 1024  # drafters are trained on 4 to 32 and do not generalise to larger blocks


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to measure: a drafter against its target on some prompts."""

    target: TargetConfig
    """The target that the drafter was trained for."""
    drafter: Path
    """A drafter's folder in z-lab's format, or a run folder (its newest checkpoint is taken)."""
    prompts: str
    """Data set of the prompts: any format of `dflash extract` that has turns; each prompt ends with its first user turn."""
    split: str = "train"
    """Split of that data set."""
    max_prompts: int | None = 32
    """Prompts to take from the start of the data set; None for all. z-lab's benchmarks take 128."""
    max_new_tokens: int = 256
    """Tokens to decode for each prompt; z-lab's benchmarks allow 2,048."""
    block_size: int | None = None
    """Block size K, anchor included; None takes the drafter's. A drafter generalises to smaller blocks, not to larger."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, the same as in extract: thinking against non-thinking halves acceptance."""
    compare_plain: bool = True
    """Whether each prompt is decoded without the drafter too, for the speed-up and the check of equality."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, or a torch device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", Path(self.drafter))
        for name, least in (("max_prompts", 1), ("max_new_tokens", 1), ("block_size", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but at least {least} is needed.")
        if self.block_size is not None and self.block_size > MOST_BLOCK_SIZE:
            raise InputError(f"--block-size is {self.block_size}, but at most {MOST_BLOCK_SIZE} makes sense.")

    def resolve_device(self) -> torch.device:
        """The device to run on. Raises InputError for CUDA where there is none."""
        has_cuda = torch.cuda.is_available()
        if self.device == "auto":
            return torch.device("cuda" if has_cuda else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise InputError(f"The device {self.device!r} is unknown to torch; use auto, cpu or cuda.") from error
        if device.type == "cuda" and (not has_cuda or (device.index or 0) >= torch.cuda.device_count()):
            raise InputError(
                f"The device {self.device!r} does not exist here ({torch.cuda.device_count()} CUDA devices were found); "
                "use --device cpu."
            )
        return device


def evaluate(config: EvaluateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Load everything, decode every prompt and return a JSON-able report; `progress` gets an event a prompt.

    Raises InputError where the drafter does not fit the target (before its weights are loaded), and for prompts that
    cannot be used.
    """
    device = config.resolve_device()
    folder = find_drafter(config.drafter)
    drafter_config = load_drafter_config(folder)
    model_config = load_model_config(config.target)
    check_drafter_fits(drafter_config, model_config)
    rows = read_prompts(config.prompts, config.split, config.max_prompts)
    prompts = encode_prompts(load_tokenizer(config.target), rows, config.chat_template_arguments)
    most = getattr(text_config(model_config), "max_position_embeddings", None)
    fitting = [ids for ids in prompts if most is None or len(ids) + config.max_new_tokens <= most]
    if not fitting:
        raise InputError(
            f"None of the {len(prompts)} prompts of {config.prompts} leaves room for {config.max_new_tokens} new tokens "
            f"within the target's {most} positions; give shorter prompts or lower --max-new-tokens."
        )
    target = load_target(config.target, drafter_config.target_layer_ids, device)
    drafter = load_drafter(folder, device, target.dtype)
    result = evaluate_prompts(
        target,
        drafter,
        fitting,
        max_new_tokens=config.max_new_tokens,
        stop_ids=stop_token_ids(target),
        block_size=config.block_size,
        compare_plain=config.compare_plain,
        progress=progress,
    )
    return {
        "target": config.target.name,
        "target_revision": config.target.revision,
        "drafter": str(folder),
        "prompt_source": config.prompts,
        "prompt_split": config.split,
        "chat_template_arguments": config.chat_template_arguments,
        "num_skipped_prompts": len(rows) - len(fitting),
        **result,
    }


def evaluate_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    compare_plain: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The measured part of `evaluate`, for a target and a drafter that are loaded already; prompts are token ids."""
    import transformers

    check_drafter_fits_target(drafter.config, target)
    check_continuation(target.model, target.vocab_size, target.device)
    block_size = drafter.config.block_size if block_size is None else block_size
    if target.device.type == "cuda":  # the first rounds load kernels; on a CPU there is nothing to warm
        plain_decode(target, prompts[0], min(8, max_new_tokens))
        speculative_decode(target, drafter, prompts[0], min(2 * block_size, max_new_tokens), block_size=block_size)
    speculative: list[DecodeResult] = []
    plain: list[DecodeResult] = []
    differences: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        speculative.append(speculative_decode(target, drafter, prompt, max_new_tokens, stop_ids, block_size))
        if compare_plain:
            plain.append(plain_decode(target, prompt, max_new_tokens, stop_ids))
            difference = first_difference(target, prompt, plain[-1].token_ids, speculative[-1].token_ids)
            if difference is not None:
                differences.append({"prompt": index, **difference.to_json()})
        if progress is not None:
            progress(_decoded(speculative, len(prompts)))
    speeds = {
        "speculative": speed_statistics(speculative),
        "plain": speed_statistics(plain) if compare_plain else None,
    }
    rates = [speed["tokens_per_second"] if speed else None for speed in speeds.values()]
    return {
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": max_new_tokens,
        "block_size": block_size,
        **acceptance_statistics(speculative, block_size),
        **speeds,
        "speedup": rates[0] / rates[1] if rates[0] and rates[1] else None,
        "num_equal": len(prompts) - len(differences) if compare_plain else None,
        "differences": differences if compare_plain else None,
        "lossless": all(entry["within_rounding"] for entry in differences) if compare_plain else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _decoded(results: Sequence[DecodeResult], num_all: int) -> Decoded:
    lengths = [length for result in results for length in result.acceptance_lengths]
    speed = speed_statistics(results)
    return Decoded(
        num_prompts=len(results),
        num_all=num_all,
        num_tokens=speed["num_tokens"],
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        tokens_per_second=speed["tokens_per_second"],
    )


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], chat_template_arguments: dict[str, Any]
) -> list[list[int]]:
    """Token ids of each prompt under the target's chat template, with the opening of the assistant's turn.

    Prompts that the template refuses are left out. Raises InputError where it refuses all, or there is no template.
    """
    renderer = ChatRenderer(tokenizer, chat_template_arguments)
    texts: list[str] = []
    refusal: RowError | None = None
    for prompt in prompts:
        try:
            text = renderer.render(prompt.messages, prompt.tools, add_generation_prompt=True)
            text.encode()
            texts.append(text)
        except UnicodeEncodeError:
            refusal = RowError(SURROGATE)
        except RowError as error:
            refusal = error
    if refusal is not None and not texts:
        raise InputError(f"No prompt can be put to the target: {refusal}. Give other prompts or template arguments.")
    return [list(map(int, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])) for text in texts]


def format_evaluation(result: dict[str, Any]) -> Group:
    """The report of `evaluate` for the terminal, as rich tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def number(value: float | None, digits: int = 2) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    summary = Table(show_header=False, box=None, pad_edge=False)
    summary.add_row(
        "acceptance length", f"[bold]{number(result['acceptance_length'])}[/bold]  tokens per target forward"
    )
    summary.add_row(
        "  mean over prompts", f"{number(result['acceptance_length_per_prompt'])}  as z-lab's benchmark averages"
    )
    summary.add_row("block size", f"{result['block_size']}  ({result['block_size'] - 1} drafts a round)")
    summary.add_row("prompts", f"{result['num_prompts']:,}  ({result['num_prompt_tokens']:,} tokens)")
    summary.add_row("new tokens, rounds", f"{result['speculative']['num_tokens']:,}, {result['num_rounds']:,}")
    for name in ("speculative", "plain"):
        if result[name] is not None:
            summary.add_row(f"{name} decoding", f"{number(result[name]['tokens_per_second'], 1)} tokens/s")
    if result["speedup"] is not None:
        summary.add_row("speed-up", f"{number(result['speedup'])} ×")
    summary.add_row(
        "run on", f"{result['device']}, {result['dtype']}, transformers {result['versions']['transformers']}"
    )
    positions = Table(title="Acceptance by block position", title_justify="left")
    for title in ("position", "drafted", "accepted", "if reached", "of all rounds", "rounds of this length"):
        positions.add_column(title, justify="right")
    positions.add_row("anchor", "", "", "", "", f"{result['histogram'][0]:,}")
    for entry, count in zip(result["positions"], result["histogram"][1:], strict=True):
        shares = ["–" if entry[key] is None else f"{entry[key]:.1%}" for key in ("conditional", "cumulative")]
        positions.add_row(
            str(entry["position"]), f"{entry['num_drafted']:,}", f"{entry['num_accepted']:,}", *shares, f"{count:,}"
        )
    return Group(summary, Text(), positions, Text(), Text(_agreement_text(result)))


def _agreement_text(result: dict[str, Any]) -> str:
    """Sentences on whether the output equals plain greedy decoding."""
    differences = result["differences"]
    if differences is None:
        return "Not compared with plain greedy decoding."
    if not differences:
        return f"Output equals plain greedy decoding on all {result['num_prompts']:,} prompts."
    first = differences[0]
    verdict = "a tie that rounding flipped" if first["within_rounding"] else "NOT explained by rounding"
    num_errors = sum(not entry["within_rounding"] for entry in differences)
    gap = "no gap (one output ended)" if first["gap"] is None else f"gap {first['gap']:.3g}"
    return (
        f"Output differs from plain greedy decoding on {len(differences):,} of {result['num_prompts']:,} prompts, "
        f"{num_errors:,} of them not explained by rounding. First: prompt {first['prompt']}, new token "
        f"{first['position']}: plain {first['plain_token']}, speculative {first['speculative_token']}, {gap} between "
        f"their logits (best two: {first['top2_gap']:.3g}), rounding explains {first['rounding']:.3g}: {verdict}."
    )
