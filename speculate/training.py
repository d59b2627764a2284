"""The real acceptance length while a drafter is trained: a few prompts, decoded with the real target at every evaluation.

The estimate of training is teacher-forced: it speaks of given text, and of the paths that training computes. This is the
number that counts, by the same code as `dflash evaluate`, of the drafter as its checkpoint would hold it (bf16, `fc`
folded back). Both stand in one log, so that a gap is seen on day one and not when the drafter is served; gap.py says
what to look at.

It runs on the first rank alone, between two steps, while the others wait. The target is loaded at the first evaluation,
after the compiler's warm-up, and stays: 2 bytes a parameter of device memory beside the training. Nothing here is
compiled (torch's stance is force_eager meanwhile), so the stance fail_on_recompile of the training holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import InputError
from dflash_train.speculate.acceptance import acceptance_statistics
from dflash_train.speculate.answering import Decoding, PromptDecoder
from dflash_train.speculate.decode import Interrupted
from dflash_train.speculate.gap import LARGEST_GAP, Evidence, explain_gap
from dflash_train.speculate.prompts import Prompt, PromptSet, name_prompts, read_prompts
from dflash_train.stage1_target.identity import build_manifest, known_without_weights
from dflash_train.stage1_target.target import load_target
from dflash_train.stage1_target.target_config import TargetConfig, load_model_config, load_tokenizer, text_config
from dflash_train.stage1_target.tokenization import ChatRenderer
from dflash_train.stage2_drafter.drafter import Drafter
from dflash_train.stage2_drafter.preparation import PreparedRun
from dflash_train.units import format_bytes, format_count


class RealAcceptance:
    """A `Measurement` of training, after the options --evaluate-target and --evaluate-prompts."""

    def __init__(self) -> None:
        self._decoder: PromptDecoder | None = None
        self._prompts: list[Prompt] = []
        self._num_trained = 0
        self._explained = False

    def check(self, run: PreparedRun) -> list[str]:
        """Refuse another target than the store's, as far as config and tokenizer tell, and prompts that cannot be used."""
        config, manifest = target_config(run), run.reader.manifest
        tokenizer = load_tokenizer(config)
        known = known_without_weights(
            config, load_model_config(config), tokenizer, manifest.target_layer_ids, run.reader.encoding
        )
        _refuse(run, replace(manifest, **known).differences(manifest))
        prompts = self._read_prompts(run, tokenizer)
        named = name_prompts(prompts.trained, prompts.num_trained)
        left_out = f"; left out, for they are trained on: {named}" if prompts.num_trained else ""
        what = f"{format_count(len(prompts.prompts), 'prompt')} of {run.config.evaluate_prompts}"
        return [f"real acceptance length: {what}, decoded with {config.name} at every evaluation{left_out}"]

    def measure(
        self,
        run: PreparedRun,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        estimate: float | None,
        report: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> dict[str, Any]:
        """Decode the prompts; see `stage2_drafter.measurement.Measurement`."""
        with torch.compiler.set_stance("force_eager"):
            started = time.perf_counter()
            decoder = self._decoder or self._load(run, device, report)
            self._decoder = decoder
            self._drop_trained(run, report)
            if not self._prompts:
                return {}
            decoder.drafter.load_state_dict(tensors)
            decoder.stop = stop
            try:
                results = [decoder.run(index, prompt) for index, prompt in enumerate(self._prompts)]
            except Interrupted:
                return {}
            except torch.OutOfMemoryError:
                report("warning: no real acceptance length this time: not enough device memory beside the training")
                return {}
            turns = [turn.speculative for result in results for turn in result.turns]
            statistics = acceptance_statistics(turns, decoder.block_size)
            real = statistics["acceptance_length"]
            values = {
                "real_acceptance_length": real,
                "real_accepted": [entry["cumulative"] for entry in statistics["positions"]],
                "real_prompts": len(results),
                "real_rounds": statistics["num_rounds"],
                "real_seconds": time.perf_counter() - started,
            }
            if real is not None and estimate is not None and self._first_gap(real, estimate):
                evidence = Evidence(run, decoder, self._prompts, self._num_trained, dict(tensors))
                try:
                    for line in explain_gap(evidence, estimate, real):
                        report(line)
                except Interrupted:  # the number stands; the causes are looked for at the next gap
                    self._explained = False
            return values

    def _first_gap(self, real: float, estimate: float) -> bool:
        if self._explained or real >= (1 - LARGEST_GAP) * estimate:
            return False
        self._explained = True
        return True

    def _load(self, run: PreparedRun, device: torch.device, report: Callable[[str], None]) -> PromptDecoder:
        """Target and an empty drafter, on the device of the first rank. Raises InputError for another target."""
        config, manifest = target_config(run), run.reader.manifest
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            target = load_target(config, manifest.target_layer_ids, device)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"--evaluate-target {config.name} does not fit beside the training on {device}; lower --row-tokens, or "
                "leave it out and measure checkpoints with `dflash evaluate` on another GPU."
            ) from error
        made = build_manifest(target, run.reader.encoding, manifest.calibration_hash)
        _refuse(run, made.differences(manifest))
        drafter = Drafter(run.drafter_config, seed=None).to(target.device, target.dtype).requires_grad_(False).eval()
        decoding = Decoding(max_new_tokens=run.config.evaluate_new_tokens, compare_plain=False)
        decoder = PromptDecoder(target, drafter, decoding)
        prompts = self._read_prompts(run, target.tokenizer)
        self._prompts, self._num_trained = prompts.prompts, prompts.num_trained
        held = ""
        if device.type == "cuda":
            held = f", which holds {format_bytes(torch.cuda.memory_allocated(device) - before)} beside the training"
        report(
            f"loaded {config.name} for the real acceptance length{held}; every evaluation decodes "
            f"{format_count(len(prompts.prompts), 'prompt')}, at most {decoding.max_new_tokens} tokens each"
        )
        return decoder

    def _read_prompts(self, run: PreparedRun, tokenizer: Any) -> PromptSet:
        config = run.config
        assert config.evaluate_prompts is not None, "checked by TrainConfig"
        most = getattr(text_config(load_model_config(target_config(run))), "max_position_embeddings", None)
        return read_prompts(
            [config.evaluate_prompts],
            lambda: ChatRenderer(tokenizer, template_arguments(run)),
            limit=config.evaluate_prompts_limit,
            max_turns=1,
            max_tokens=None if most is None else most - config.evaluate_new_tokens,
            trained_groups=frozenset(run.training_groups().tolist()),
        )

    def _drop_trained(self, run: PreparedRun, report: Callable[[str], None]) -> None:
        """Of a store that grows while it is trained on, more prompts may have come into the training data."""
        groups = frozenset(run.training_groups().tolist())
        trained = [prompt for prompt in self._prompts if any(group in groups for group in prompt.groups)]
        if trained:
            self._prompts = [prompt for prompt in self._prompts if prompt not in trained]
            self._num_trained += len(trained)
            report(f"warning: no longer decoded, for they are trained on now: {name_prompts(trained, len(trained))}")


def target_config(run: PreparedRun) -> TargetConfig:
    """The target of --evaluate-target, in the type and, where the name is the same, the revision of the extraction."""
    name, manifest = run.config.evaluate_target, run.reader.manifest
    assert name is not None, "who measures has a target"
    revision = manifest.target_revision if name == manifest.target_name else None
    return TargetConfig(name=name, revision=revision, dtype=manifest.target_dtype)


def template_arguments(run: PreparedRun) -> dict[str, Any]:
    """Those that the store's newest segment was extracted with."""
    settings = [source.get("settings", {}) for source in run.reader.sources()]
    arguments: dict[str, Any] = (settings[-1] if settings else {}).get("chat_template_arguments") or {}
    return arguments


def _refuse(run: PreparedRun, differences: list[str]) -> None:
    if differences:
        raise InputError(
            f"--evaluate-target {run.config.evaluate_target} is not the target of {run.reader.path}: "
            f"{'; '.join(differences)}. Give the target that the store was extracted from."
        )
