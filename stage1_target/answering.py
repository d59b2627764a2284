"""What both ways of answering share: the questions that are left, the file of answers, and counts."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

from dflash_train.stage1_target.answer_file import AnswerFile
from dflash_train.stage1_target.dialogue import Dialogue, DialogueReader, Outcome
from dflash_train.stage1_target.events import Answering, Note
from dflash_train.stage1_target.regenerate_config import RegenerateConfig

Report = Callable[[Answering | Note], None]

OWN_NUMBERS = re.compile(r"(?<!HTTP )\b\d[\d,]*")
"""What of a reason is of one conversation alone, as a rule: its length, in a server's words."""


def by_kind(reasons: Counter[str]) -> Counter[str]:
    """Reasons that differ in their numbers alone counted together, with «…» for these."""
    kinds: dict[str, Counter[str]] = {}
    for reason, count in reasons.items():
        kinds.setdefault(OWN_NUMBERS.sub("…", reason), Counter())[reason] += count
    return Counter({kind if len(found) > 1 else next(iter(found)): found.total() for kind, found in kinds.items()})


class Run:
    """One run of regenerate."""

    def __init__(self, config: RegenerateConfig, answers: AnswerFile, reader: DialogueReader, report: Report) -> None:
        self.config, self.answers, self.reader, self.report = config, answers, reader, report
        self.num_rows = reader.source.count()
        if config.max_conversations is not None and self.num_rows is not None:
            self.num_rows = min(self.num_rows, config.max_conversations)
        self.failures: list[str] = []
        self.failed: Counter[str] = Counter()
        self.num_new = self.num_tokens = self.num_changed = 0
        self.started: float | None = None

    def pending(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """The dialogues that are not done."""
        return (dialogue for dialogue in dialogues if dialogue.key not in self.answers.done)

    def add(self, outcomes: list[Outcome]) -> None:
        """Make outcomes durable, count them and say how far it is."""
        self.answers.add(outcomes)
        for outcome in outcomes:
            self.num_tokens += outcome.num_tokens
            self.num_changed += outcome.num_changed
            self.num_new += not outcome.failed
            if outcome.failed:
                self.failed[str(outcome.reason)] += 1
        seconds = time.monotonic() - (self.started or time.monotonic())
        self.report(
            Answering(
                num_done=len(self.answers.done),
                num_rows=self.num_rows,
                num_left_out=self.answers.left_out.total(),
                num_failed=self.failed.total(),
                num_tokens=self.num_tokens,
                tokens_per_second=self.num_tokens / seconds if seconds > 0 else 0.0,
            )
        )
