"""The target's own answers to the questions of a data set: in process on some devices, or by a server.

The parent reads questions as they are needed, deals them, and alone writes: what is in the output is done, everything
else is asked again by the next run. A worker that dies, or a server that fails, loses only what was under way.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.errors import InputError
from dflash_train.machine.devices import parse_devices
from dflash_train.machine.launch import stop_signals
from dflash_train.stage1_target.answer_file import AnswerFile
from dflash_train.stage1_target.answering import Report, Run, by_kind
from dflash_train.stage1_target.asking import ask_server
from dflash_train.stage1_target.chat_server import ChatServer
from dflash_train.stage1_target.dialogue import DialogueReader
from dflash_train.stage1_target.events import Answering, Note
from dflash_train.stage1_target.generation import GenerationSettings, absolute_target
from dflash_train.stage1_target.generator_pool import run_generators
from dflash_train.stage1_target.regenerate_config import RegenerateConfig
from dflash_train.stage1_target.sources import open_source
from dflash_train.stage1_target.target_config import load_model_config, load_tokenizer
from dflash_train.stage1_target.tokenization import ChatRenderer, hash_chat_template
from dflash_train.units import format_count

__all__ = ["Answering", "RegenerateConfig", "RegenerateResult", "make_settings", "regenerate"]

PACKAGES = ("dflash-train", "torch", "transformers")


@dataclass(kw_only=True)
class RegenerateResult:
    """How a regenerate ended."""

    outcome: str
    """finished, stopped (by a signal) or failed (something is missing that a further run may answer)."""
    output: Path
    num_conversations: int
    """Conversations in the output."""
    num_cut: int
    """Of these, those that lack their last turns."""
    num_unfinished: int
    """Of these, those that lack no turn, but end with an unfinished answer."""
    num_duplicates: int
    left_out: Counter[str]
    """Why conversations are not in the output, and rows of the data that ask nothing."""
    num_new: int = 0
    """Conversations that this run has answered or left out."""
    num_tokens: int = 0
    """Of this run, dropped ones included."""
    num_changed: int = 0
    """Answers of this run that the chat template does not render as they were written."""
    num_retries: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    """Workers that died, and conversations that failed, by reason."""

    @property
    def exit_status(self) -> int:
        """0, or 1 if something failed."""
        return 1 if self.failures else 0

    def lines(self) -> list[str]:
        """The end for the user: what is left out and why first, the sum last."""
        lines = [f"left out: {reason} ({format_count(count, 'time')})" for reason, count in self.left_out.most_common()]
        if self.num_cut:
            lines.append(
                f"{format_count(self.num_cut, 'conversation')} kept without the last turns (field `cut` says why)"
            )
        if self.num_unfinished:
            lines.append(
                f"{format_count(self.num_unfinished, 'conversation')} kept with an unfinished last answer (field `cut` says so)"
            )
        if self.num_duplicates:
            lines.append(f"{format_count(self.num_duplicates, 'row')} not answered again: an earlier row asks the same")
        if self.num_changed:
            lines.append(
                f"{format_count(self.num_changed, 'answer')} not rendered by the chat template as written; extract may set "
                f"such aside"
            )
        if self.num_retries:
            lines.append(f"{format_count(self.num_retries, 'request')} repeated")
        more = "" if self.outcome == "finished" else "; run again to go on"
        return [*lines, f"{self.output} holds {format_count(self.num_conversations, 'conversation')}{more}"]


def regenerate(config: RegenerateConfig, report: Report | None = None) -> RegenerateResult:
    """Answer all questions that the output does not answer yet.

    Raises InputError (StoreError for what the disk refuses) for input that cannot do; what fails on the way stands in
    the result's `failures`.
    """
    report = report or (lambda _event: None)
    reader = DialogueReader(open_source(config.source, config.split), config.max_conversations)
    stop = threading.Event()
    server, template = None, None
    if config.server is not None:
        server = ChatServer(config.server, _api_key(config), config.request_seconds, config.retries, stop)
        template = _local_template(config)
    else:
        parse_devices(config.devices)
        load_model_config(config.target)
        tokenizer = load_tokenizer(config.target)
        ChatRenderer(tokenizer, config.chat_template_arguments)
        template = hash_chat_template(tokenizer)
    dialogues = reader.read()
    first = next(dialogues)  # that no row can be used is said before anything is loaded
    model = None if server is None else config.server_model or _only_model(server)
    answers = AnswerFile(config.output, make_settings(config, model, template))
    run = Run(config, answers, reader, report)
    pending = run.pending(itertools.chain([first], dialogues))
    stopped = False
    try:
        first_pending = next(pending, None)
        if first_pending is not None:
            pending = itertools.chain([first_pending], pending)
            run.started = time.monotonic()
            if answers.num_answered:
                report(Note(f"{config.output} holds {format_count(answers.num_answered, 'conversation')} already"))
            with stop_signals() as signalled:
                if server is not None and model is not None:
                    ask_server(run, server, model, pending, signalled, stop)
                else:
                    run_generators(run, pending, signalled)
                stopped = signalled.is_set()
    finally:
        answers.close()
    failures = [*run.failures, *(f"{count:,} failed: {reason}" for reason, count in by_kind(run.failed).most_common())]
    return RegenerateResult(
        outcome="stopped" if stopped else "failed" if failures else "finished",
        output=config.output,
        num_conversations=answers.num_answered,
        num_cut=answers.num_cut,
        num_unfinished=answers.num_unfinished,
        num_duplicates=reader.num_duplicates,
        left_out=by_kind(answers.left_out + reader.unusable),
        num_new=run.num_new,
        num_tokens=run.num_tokens,
        num_changed=run.num_changed,
        num_retries=0 if server is None else server.num_retries,
        seconds=time.monotonic() - run.started if run.started is not None else 0.0,
        failures=failures,
    )


def make_settings(
    config: RegenerateConfig, model: str | None, chat_template_hash: str | None = None
) -> GenerationSettings:
    """What the answers of a run depend on; `model` is what the server calls the target."""
    return GenerationSettings(
        target=absolute_target(config.target.name),
        revision=config.target.revision,
        chat_template_arguments=config.chat_template_arguments,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        keep_unfinished=config.keep_unfinished,
        server_model=model,
        chat_template_hash=chat_template_hash,
        made_from={"data": config.source, "split": config.split, "server": config.server},
        packages={name: _version(name) for name in PACKAGES},
    )


def _local_template(config: RegenerateConfig) -> str | None:
    """Hash of the chat template in the folder that --target names beside a server; None for a name, or without one."""
    if not Path(config.target.name).exists():
        return None
    try:
        tokenizer = load_tokenizer(config.target)
    except InputError:  # the server runs it all the same
        return None
    return hash_chat_template(tokenizer) if tokenizer.chat_template else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _api_key(config: RegenerateConfig) -> str | None:
    if config.api_key_file is None:
        return None
    try:
        key = config.api_key_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {config.api_key_file} cannot be read: {error}. Name a text file.") from error
    if not key or any(not letter.isprintable() for letter in key):
        raise InputError(f"--api-key-file {config.api_key_file} must hold the key alone, on one line.")
    return key


def _only_model(server: ChatServer) -> str:
    models = server.models()
    if len(models) != 1:
        raise InputError(
            f"The server {server.url} serves {', '.join(models) or 'no model'}; name one with --server-model."
        )
    return models[0]
