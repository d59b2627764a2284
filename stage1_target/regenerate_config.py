"""Everything a user can set of a regenerate, with the reasons for the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError
from dflash_train.stage1_target.target_config import TargetConfig


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """One regenerate: which target answers which questions, how, and into which file."""

    target: TargetConfig
    """The target; with a server only its name counts, which extract compares."""
    source: str
    """Data set of the questions: any format of `dflash extract` that has turns, or `prompt` or `turns` alone."""
    output: Path
    """The jsonl file of answers; made if it is missing, filled up if it is there."""
    split: str = "train"
    """Split of the data set."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking; extract wants the same."""
    devices: str | None = None
    """GPU numbers like 0-4 or 5,7, or cpu, or cpu:3; None is every GPU, or one CPU worker where there is none."""
    temperature: float = 0.7
    """0 is greedy. 0.7 as SpecForge's script has it; what will be served is better."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 from all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 from all."""
    max_new_tokens: int = 2048
    """Limit of one answer."""
    keep_unfinished: bool = False
    """Keep answers that had not ended at the limit. Off: extract would teach the drafter that they end there."""
    seed: int = 0
    """Each answer's draws depend on it, the conversation and the turn alone, not on what else is in a batch."""
    max_conversations: int | None = None
    """Take only the first conversations of the data set; None for all."""
    batch_size: int = 32
    """Conversations that a worker generates together, in process. A batch is what a killed worker loses at most."""
    server: str | None = None
    """Address of an OpenAI-compatible server that runs the target; None runs it in process."""
    server_model: str | None = None
    """What the server calls the target; None takes the only model that it lists."""
    api_key_file: Path | None = None
    """File that holds the server's key."""
    requests: int = 64
    """Requests in flight at a time: enough to fill the batch of one GPU's server."""
    request_seconds: float = 600.0
    """How long to wait for the server to say something: an answer comes as a whole, so longer than the longest."""
    retries: int = 6
    """Further tries of a request, with waits that double to 30 s: together a minute."""
    log_folder: Path | None = None
    """Where each run puts its workers' logs; None is `<output>.logs`."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "requests", "request_seconds"):
            if not getattr(self, name) > 0:  # NaN is not
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be more than 0.")
        for name in ("temperature", "top_k", "retries"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be 0 or more.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}, but must be more than 0 and at most 1.")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed is {self.seed}, but must be at least 0 and below 2**63.")
        if self.max_conversations is not None and self.max_conversations < 1:
            raise InputError(f"--max-conversations is {self.max_conversations}, but must be more than 0.")
        if self.output.suffix != ".jsonl":
            raise InputError(f"--output is {self.output}, but must end in .jsonl, the form that it has.")
        if self.output.is_dir():
            raise InputError(f"--output is {self.output}, a folder, but must be a file; name another path.")
        if self.output.resolve() == Path(self.source).expanduser().resolve():
            raise InputError(f"--output is {self.output}, the data itself; name another file.")
        if self.server is None:
            for name in ("server_model", "api_key_file"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name.replace('_', '-')} needs --server; give both or neither.")
        elif self.devices is not None:
            raise InputError("--gpus says where the target runs in process, but --server is given; leave one out.")
