"""Measure a drafter: real speculative decoding against its target, one prompt at a time on each device; or, at
temperature 0, the same rounds from the target's own answers, many prompts at once (replay.py).

Each prompt is decoded with the drafter and, unless switched off, without it: the first gives acceptance length, the
pair the speed-up and, at temperature 0, the proof that the output is the target's own. Training accuracy is no substitute
(reference: SpecForge #455, 70 % accuracy at acceptance length 1.02 after a train/serve mismatch).

Several devices share the prompts, each process with a target and a drafter of its own. What a prompt gives depends on
the prompt alone, so the numbers do not depend on how many there are; only speeds do, and they are those of one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_train.errors import InputError
from dflash_train.machine.devices import Device
from dflash_train.machine.launch import stop_signals
from dflash_train.speculate.acceptance import summarise
from dflash_train.speculate.answering import (
    Decoding,
    PromptDecoder,
    PromptResult,
    check_reference_target,
    run_facts,
)
from dflash_train.speculate.decode import Interrupted
from dflash_train.speculate.events import Decoded, Progress
from dflash_train.speculate.loading import (
    check_drafter_fits,
    find_drafter,
    load_drafter,
    load_drafter_config,
    trained_groups,
    worse_than_best,
)
from dflash_train.speculate.prompts import Prompt, PromptSet, name_prompts, read_prompts, source_file
from dflash_train.speculate.sampling import Sampling
from dflash_train.speculate.training_record import training_mismatches
from dflash_train.speculate.zlab import ZlabDrafter, check_reference
from dflash_train.stage1_target.generation import generation_mismatches
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config, load_tokenizer, text_config
from dflash_train.stage1_target.tokenization import ChatRenderer, hash_chat_template
from dflash_train.units import format_count

if TYPE_CHECKING:
    from dflash_train.speculate.replay import Replayer

MOST_BLOCK_SIZE = 1024  # drafters are trained on 4 to 32 and do not generalise to larger blocks


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to measure: a drafter against its target on some prompts."""

    target: TargetConfig
    """The target that the drafter was trained for."""
    drafter: Path
    """A drafter's folder in z-lab's format, or a run folder (its newest checkpoint is taken)."""
    prompts: tuple[str, ...]
    """Data sets of the prompts: of `prompts.BENCHMARKS`, or any format of `dflash extract` that has turns."""
    split: str = "train"
    """Split of those that are no benchmark."""
    max_prompts: int | None = 32
    """Prompts to take of each data set, a sample by hash; None for all. z-lab's benchmarks take 128, after a shuffle."""
    max_turns: int = 2
    """Turns of each prompt that are answered, the target's own answers between them; MT-bench has two."""
    max_new_tokens: int = 256
    """Tokens to decode for each turn; z-lab's benchmarks allow 2,048."""
    block_size: int | None = None
    """Block size K, anchor included; None takes the drafter's. A drafter generalises to smaller blocks, not to larger."""
    temperature: float = 0.0
    """0 is greedy; above, drafts and answers are sampled, and answers keep the target's own distribution."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1 is all."""
    top_k: int = 0
    """Only so many of the likeliest tokens; 0 is all."""
    seed: int = 0
    """Of what is drawn at a temperature above 0."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, the same as in extract: thinking against non-thinking halves acceptance."""
    compare_plain: bool = True
    """Whether each prompt is decoded without the drafter too, for the speed-up and the check of equality."""
    reference: bool = False
    """Whether z-lab's package decodes each prompt too, to compare token by token."""
    replay: bool = False
    """Whether the rounds are taken from the target's own greedy answers: the acceptance length alone, in seconds."""
    batch_size: int = 64
    """Answers decoded at once where they are replayed; halved by itself where the device's memory is short."""
    allow_trained_prompts: bool = False
    """Whether prompts of the drafter's training data are measured on as well; they flatter it."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, or a torch device: where this very process runs, if no devices are given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", Path(self.drafter))
        prompts = (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts)
        object.__setattr__(self, "prompts", prompts)
        for name, least in (
            ("max_prompts", 1),
            ("max_turns", 1),
            ("max_new_tokens", 1),
            ("block_size", 2),
            ("seed", 0),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but at least {least} is needed.")
        if self.block_size is not None and self.block_size > MOST_BLOCK_SIZE:
            raise InputError(f"--block-size is {self.block_size}, but at most {MOST_BLOCK_SIZE} makes sense.")
        sampling = self.sampling  # what it refuses is refused before anything is loaded
        if self.reference and not sampling.is_greedy:
            raise InputError(
                f"--reference compares token by token, which --temperature {self.temperature:g} leaves to chance; give one "
                "of them."
            )
        if self.replay and not sampling.is_greedy:
            raise InputError(
                f"--replay follows the target's greedy answers, which --temperature {self.temperature:g} does not give; "
                "leave one of them out."
            )
        if self.replay and self.reference:
            raise InputError("--replay decodes nothing that --reference could compare; leave one of them out.")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    @property
    def decoding(self) -> Decoding:
        """How prompts are answered."""
        return Decoding(
            max_new_tokens=self.max_new_tokens,
            block_size=self.block_size,
            sampling=self.sampling,
            seed=self.seed,
            chat_template_arguments=self.chat_template_arguments,
            compare_plain=self.compare_plain,
        )

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


@dataclass
class Outcome:
    """What the devices gave so far."""

    results: list[PromptResult] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the first process that was loaded; see `run_facts`."""
    failures: list[str] = field(default_factory=list)
    """Processes that died."""
    interrupted: bool = False


def evaluate(
    config: EvaluateConfig, progress: Progress | None = None, devices: Sequence[Device] = ()
) -> dict[str, Any]:
    """Load everything, decode every prompt and return a JSON-able report; `progress` gets notes and an event a prompt.

    One process per device where several are given, else this process. A first SIGINT or SIGTERM while prompts are
    decoded ends it with the report of those that are finished. Raises InputError where the drafter does not fit the
    target (before its weights are loaded), for prompts that cannot be used, and where nothing was finished.
    """
    report = progress or (lambda event: None)
    device = None if devices else config.resolve_device()
    folder = find_drafter(config.drafter)
    if (worse := worse_than_best(config.drafter)) is not None:
        report(f"warning: {worse}")
    drafter_config = load_drafter_config(folder)
    model_config = load_model_config(config.target)
    check_drafter_fits(drafter_config, model_config)
    if config.reference:
        check_reference()
    if config.block_size is not None and config.block_size > drafter_config.block_size:
        report(
            f"warning: --block-size {config.block_size} is more than the {drafter_config.block_size} that the drafter was "
            "trained with, and drafters do not generalise to larger blocks; leave it out, or give a smaller one"
        )
    groups = trained_groups(folder)
    most = getattr(text_config(model_config), "max_position_embeddings", None)
    tokenizer = load_tokenizer(config.target)
    arguments, template = config.chat_template_arguments, hash_chat_template(tokenizer)
    for source in config.prompts:
        for warning in generation_mismatches(source_file(source), config.target, arguments, template):
            report(warning)
    for warning in training_mismatches(folder, model_config, tokenizer, arguments):
        report(warning)
    prompt_set = read_prompts(
        config.prompts,
        lambda: ChatRenderer(tokenizer, config.chat_template_arguments),
        split=config.split,
        limit=config.max_prompts,
        max_turns=config.max_turns,
        max_tokens=None if most is None else most - config.max_new_tokens,
        trained_groups=groups or frozenset(),
        allow_trained=config.allow_trained_prompts,
        way_out=", or --allow-trained-prompts to measure on these",
    )
    for note in training_notes(prompt_set, groups is not None, config.allow_trained_prompts):
        report(note)
    prompts, outcome = prompt_set.prompts, Outcome()
    units = share_prompts(config, prompts, len(devices) or 1)
    devices = devices[: len(units)]
    if devices:
        from dflash_train.speculate.workers import run_workers

        run_workers(config, folder, prompts, units, devices, outcome, report)
    else:
        assert device is not None
        report(f"loading {config.target.name}")
        _run_here(config, folder, prompts, units, device, outcome, report)
    if not outcome.results:
        reason = "; ".join(outcome.failures) or "it was stopped before the first of them"
        raise InputError(f"No prompt was decoded: {reason.rstrip('.')}. Run it again.")
    outcome.results.sort(key=lambda result: result.index)
    block_size = config.block_size or drafter_config.block_size
    return {
        "target": config.target.name,
        "target_revision": config.target.revision,
        "drafter": str(folder),
        "method": "replay" if config.replay else "decoding",
        "batch_size": config.batch_size if config.replay else None,
        "prompt_source": ", ".join(config.prompts),
        "prompt_split": config.split,
        "chat_template_arguments": config.chat_template_arguments,
        "num_skipped_prompts": prompt_set.num_skipped,
        "num_planned_prompts": len(prompts),
        "interrupted": outcome.interrupted,
        "failures": outcome.failures,
        "trained_prompts": {
            "checked": groups is not None,
            "found": prompt_set.num_trained,
            "left_out": not config.allow_trained_prompts,
        },
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        **summarise(
            outcome.results,
            block_size,
            compared=config.compare_plain and config.sampling.is_greedy and not config.replay,
            referred=config.reference,
            timed=not config.replay,
        ),
        "num_processes": len(devices) or 1,
        **outcome.facts,
    }


def share_prompts(config: EvaluateConfig, prompts: Sequence[Prompt], num_devices: int) -> list[tuple[int, ...]]:
    """Positions of the prompts that a device takes at once: one, or where they are replayed a batch of similar length."""
    if not config.replay:
        return [(index,) for index in range(len(prompts))]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
    size = min(config.batch_size, -(-len(prompts) // num_devices))
    return [tuple(order[first : first + size]) for first in range(0, len(order), size)]


def load_decoder(config: EvaluateConfig, folder: Path, device: torch.device | str) -> PromptDecoder | Replayer:
    """Load target and drafter, and z-lab's drafter where it is asked for. Raises InputError."""
    target = load_target(config.target, load_drafter_config(folder).target_layer_ids, device)
    drafter = load_drafter(folder, target.device, target.dtype)
    if config.replay:
        from dflash_train.speculate.replay import Replayer

        return Replayer(target, drafter, config.decoding, config.batch_size)
    reference = ZlabDrafter(folder, target.device, target.dtype) if config.reference else None
    decoder = PromptDecoder(target, drafter, config.decoding, reference)
    if reference is not None:
        check_reference_target(decoder)
    return decoder


def decoded_event(results: Sequence[PromptResult], num_all: int) -> Decoded:
    """How far an evaluation is."""
    turns = [turn.speculative for result in results for turn in result.turns]
    lengths = [length for turn in turns for length in turn.acceptance_lengths]
    seconds, num_tokens = sum(turn.decode_seconds for turn in turns), sum(len(turn.token_ids) for turn in turns)
    return Decoded(
        num_prompts=len(results),
        num_all=num_all,
        num_tokens=num_tokens,
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        tokens_per_second=(num_tokens - len(turns)) / seconds if seconds and num_tokens > len(turns) else None,
    )


def training_notes(prompt_set: PromptSet, checked: bool, allowed: bool) -> Iterator[str]:
    """What to say about prompts that the drafter was trained on."""
    if not checked:
        yield (
            "whether prompts are in the drafter's training data is not checked: its folder does not list what it was "
            "trained on (trainer/groups.npy of a checkpoint)"
        )
    elif prompt_set.num_trained:
        what = "measured on all the same, which flatters the drafter" if allowed else "left out"
        yield (
            f"warning: {format_count(prompt_set.num_trained, 'prompt')} of the data are in the drafter's training data and "
            f"{what}: {name_prompts(prompt_set.trained, prompt_set.num_trained)}"
        )


def _run_here(
    config: EvaluateConfig,
    folder: Path,
    prompts: Sequence[Prompt],
    units: Sequence[Sequence[int]],
    device: torch.device,
    outcome: Outcome,
    report: Progress,
) -> None:
    decoder = load_decoder(config, folder, device)
    outcome.facts = run_facts(decoder.target, decoder.is_recurrent)
    decoder.warm_up(prompts[0])
    with stop_signals() as stop:
        decoder.stop = stop.is_set
        with suppress(Interrupted):
            for unit in units:
                outcome.results += decoder.run_all(unit, prompts)
                report(decoded_event(outcome.results, len(prompts)))
        outcome.interrupted = len(outcome.results) < len(prompts)
