"""Answers by a server: a bounded number of conversations in flight, each turn by turn in a thread of its own.

The main thread reads questions and writes answers, as many at a time as have come in. A stop waits for the answers under
way. Where every conversation fails, one after another, the run ends early instead of asking a dead server all questions.

A server that refuses a question (HTTP 400) does so because of the question or of the settings that all questions share. An
answered question tells: with the first one of a run, all that were refused are left out. Until then they count as failed,
and when FAILURES_IN_A_ROW have been refused nothing more is asked before those under way, which may take longer, are back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

from dflash_train.errors import InputError
from dflash_train.stage1_target.answering import Run
from dflash_train.stage1_target.chat_server import UNFINISHED, WHOLE, BadRequest, ChatServer, Refused
from dflash_train.stage1_target.conversations import Message
from dflash_train.stage1_target.dialogue import Dialogue, Exchange, Outcome
from dflash_train.stage1_target.events import Note
from dflash_train.stage1_target.regenerate_config import RegenerateConfig
from dflash_train.units import format_count

FAILURES_IN_A_ROW = 16
"""At least this many conversations, and as many as are in flight, before a server counts as dead, or all settings as wrong."""


def ask_server(
    run: Run,
    server: ChatServer,
    model: str,
    pending: Iterator[Dialogue],
    signalled: threading.Event,
    stop: threading.Event,
) -> None:
    """Answer all pending dialogues; sets `stop` where the rest is not wanted any more. Raises InputError."""
    asked: queue.SimpleQueue[Dialogue | None] = queue.SimpleQueue()
    answered: queue.SimpleQueue[Outcome | InputError | None] = queue.SimpleQueue()

    def work() -> None:
        while (dialogue := asked.get()) is not None:
            try:
                answered.put(_converse(dialogue, run.config, server, model, stop))
            except InputError as error:
                answered.put(error)
            except Exception as error:  # noqa: BLE001 - a thread that ends without a word would be waited for
                reason = f"{type(error).__name__}: {error}"
                answered.put(Outcome(dialogue.key, [], reason=reason, failed=True))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(run.config.requests)]
    for thread in threads:
        thread.start()
    run.report(
        Note(f"asking {server.url} for answers of {model}, {format_count(run.config.requests, 'request')} at a time")
    )
    in_flight = in_a_row = 0
    answered_any = told_wait = False
    refused: list[Outcome] = []  # before any was answered
    most_in_a_row = max(FAILURES_IN_A_ROW, run.config.requests)
    fatal: InputError | None = None
    try:
        while True:
            if signalled.is_set() and not stop.is_set():
                run.report(Note("stopping: answers under way are waited for; Ctrl-C once more to drop them"))
                stop.set()
            while in_flight < run.config.requests and len(refused) < most_in_a_row and not stop.is_set():
                dialogue = next(pending, None)
                if dialogue is None:
                    break
                asked.put(dialogue)
                in_flight += 1
            if not in_flight or fatal is not None:
                break
            if server.long_wait is not None and not told_wait:
                run.report(Note(server.long_wait))
                told_wait = True
            outcomes: list[Outcome] = []
            for result in _received(answered):
                in_flight -= 1
                if isinstance(result, InputError):
                    fatal = fatal or result
                elif result is not None and result.refused and not answered_any:
                    refused.append(result)
                elif result is not None:
                    outcomes.append(result)
                    answered_any = answered_any or not result.failed
                    in_a_row = in_a_row + 1 if result.failed else 0
            if answered_any:
                outcomes += refused
                refused = []
            if outcomes:
                run.add(outcomes)
            if in_a_row >= most_in_a_row and not stop.is_set():
                run.failures.append(f"given up: {in_a_row:,} conversations failed one after another")
                stop.set()
        if len(refused) >= most_in_a_row:
            run.failures.append(f"given up: the server refused {len(refused):,} conversations and answered none")
        if refused:
            run.add([replace(outcome, failed=True) for outcome in refused])
    finally:
        stop.set()
        for _ in threads:
            asked.put(None)
    if fatal is not None:
        raise fatal


def _received(answered: queue.SimpleQueue[Outcome | InputError | None]) -> list[Outcome | InputError | None]:
    """Everything that has come in, after a short wait for the first."""
    received = []
    try:
        received.append(answered.get(timeout=0.2))
        while True:
            received.append(answered.get_nowait())
    except queue.Empty:
        return received


def _converse(
    dialogue: Dialogue, config: RegenerateConfig, server: ChatServer, model: str, stop: threading.Event
) -> Outcome | None:
    """All turns of one dialogue; None where a stop came between them."""
    exchange = Exchange(dialogue, config.keep_unfinished)
    while not exchange.done:
        if stop.is_set():
            return None
        request = {
            "model": model,
            "messages": exchange.asked,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "seed": dialogue.seed(config.seed, exchange.num_answers) & 0x7FFFFFFF,
            # silent, servers take what the target's generation_config.json says
            "repetition_penalty": 1.0,
            "min_p": 0.0,
        }
        if dialogue.tools:
            request["tools"] = dialogue.tools
        if config.chat_template_arguments:
            request["chat_template_kwargs"] = config.chat_template_arguments
        try:
            choice = server.complete(request)
        except BadRequest as error:
            exchange.end(str(error), refused=True)
            break
        except Refused as error:
            if stop.is_set():
                return None
            exchange.end(str(error), failed=True)
            break
        num_tokens = int(choice["usage"].get("completion_tokens") or 0)
        reason = choice["finish_reason"]
        if reason == "content_filter":
            exchange.drop("the server's content filter stopped an answer", num_tokens)
        elif reason in WHOLE or reason in UNFINISHED:
            exchange.answer(_message(choice["message"]), num_tokens, reason in WHOLE)
        else:
            exchange.drop(f"the server ended an answer as {str(reason)[:40]!r}, which may not be whole", num_tokens)
    return exchange.outcome()


def _message(message: Message) -> Message:
    """What of a server's message a chat template reads."""
    kept: Message = {"role": "assistant", "content": message.get("content") or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        kept["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept
