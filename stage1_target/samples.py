"""Data set → sample table: every conversation as token ids and loss mask, made once, in the parent process.

The table lies under `cache_dir/<key>/`, where the key covers everything that decides a token or a mask; it is written
under a temporary name and renamed, so what is found under a key is whole. A second call costs the hash of the tokenizer
(0.1 s for Qwen3's 11 MB) and opens the table; the data set is not read again.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_train.errors import InputError
from dflash_train.stage1_target.conversations import (
    CONVERSATION_FORMATS,
    SURROGATE,
    RowError,
    detect_format,
    first_turn_group,
    parse_conversation,
    peek_columns,
)
from dflash_train.stage1_target.sample_table import DESCRIPTION, SAMPLES, SCHEMA, SampleTable, prompt_group, sample_id
from dflash_train.stage1_target.sources import Row, Source, open_source
from dflash_train.stage1_target.tokenization import (
    ChatRenderer,
    MaskTokenizer,
    Rendering,
    Tokens,
    hash_chat_template,
    hash_tokenizer,
)
from dflash_train.store.manifest import format_id, hash_json
from dflash_train.units import format_count

__all__ = ["DataConfig", "SampleTable", "prepare_samples"]

CACHE_VERSION = 1  # raise it whenever a row would come out differently
BATCH_ROWS = 256  # rows tokenised at once: enough for all cores, and a few MB
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read and how to tokenise it."""

    source: str
    """A json, jsonl, parquet or arrow file, a folder of them, a save_to_disk folder, or a hub name."""
    split: str = "train"
    """Split of a hub data set or of a folder with splits."""
    max_tokens: int = 4096
    """Longer samples are cut at the tail; tokens."""
    max_samples: int | None = None
    """Stop after this many samples; None takes all."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        if not self.source:
            raise InputError("The data has no name; give a file, a folder or a data set of the hub.")
        if self.max_tokens < 2:
            raise InputError(f"--max-tokens is {self.max_tokens}; wanted at least 2, an anchor and its successor.")
        if self.max_samples is not None and self.max_samples < 1:
            raise InputError(f"--max-samples is {self.max_samples}; wanted at least 1, or none for all samples.")


def prepare_samples(
    config: DataConfig, tokenizer: Any, cache_dir: Path, progress: Progress | None = None
) -> SampleTable:
    """The samples of a data set: from the cache where it has them, else read, tokenised and cached.

    progress is called with (rows done, rows in all or None). Raises InputError for a source, format or tokenizer that
    cannot be used, and where every row went into quarantine (with the commonest reason).
    """
    source = open_source(config.source, config.split)
    identity = {
        "version": CACHE_VERSION,
        "source": source.identity,
        "split": config.split,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer.is_fast else tokenizer.name_or_path,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": hash_chat_template(tokenizer),
        "arguments": config.chat_template_arguments,
        "max_tokens": config.max_tokens,
        "max_samples": config.max_samples,
    }
    path = cache_dir / hash_json(identity)
    if (path / DESCRIPTION).exists():
        return SampleTable.load(path)

    columns, rows = peek_columns(config.source, source.rows())
    builder = _TableBuilder(config, tokenizer, detect_format(config.source, columns))
    try:
        _write_table(path, builder, rows, source, progress)
    except OSError as error:
        raise InputError(
            f"The samples of {config.source} cannot be cached in {cache_dir}: {error}. Free space there or choose "
            f"another folder."
        ) from error
    return SampleTable.load(path)


def _write_table(
    path: Path, builder: "_TableBuilder", rows: Iterator[Row], source: Source, progress: Progress | None
) -> None:
    """Everything under a temporary name, synced, then one rename."""
    config, total = builder.config, source.count()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=path.parent))
    try:
        with pa.OSFile(str(staging / SAMPLES), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for batch in _batches(rows):
                columns_of_batch = builder.add(batch)
                if columns_of_batch["id"]:
                    writer.write_batch(pa.record_batch(columns_of_batch, schema=SCHEMA))
                if progress is not None:
                    progress(builder.num_rows, total)
                if builder.full:
                    break
        builder.check_any()
        described = {
            "quarantined": builder.quarantined,
            "num_rows": builder.num_rows,
            "num_duplicates": builder.num_duplicates,
            "num_truncated": builder.num_truncated,
            "counts_all_tokens": builder.format_name == "text",
            "source": {
                "name": config.source,
                "split": config.split,
                "format": builder.format_name,
                "fingerprint": hash_json(source.identity),
                "revision": source.identity.get("revision"),
                "max_tokens": config.max_tokens,
                "chat_template_arguments": config.chat_template_arguments,
            },
        }
        (staging / DESCRIPTION).write_text(json.dumps(described), encoding="utf-8")
        for name in (SAMPLES, DESCRIPTION):
            _sync(staging / name)
        try:
            staging.rename(path)
        except OSError:
            if not (path / DESCRIPTION).exists():  # else another process finished the same table first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        yield batch


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _TableBuilder:
    """Turns batches of rows into Arrow columns, and counts what is left out."""

    def __init__(self, config: DataConfig, tokenizer: Any, format_name: str) -> None:
        self.config = config
        self.format_name = format_name
        self.num_rows = self.num_duplicates = self.num_truncated = 0
        self.quarantined: list[dict[str, Any]] = []
        self.seen: set[int] = set()
        self.num_token_ids = len(tokenizer)
        if format_name in CONVERSATION_FORMATS:
            self.renderer = ChatRenderer(tokenizer, config.chat_template_arguments)
        if format_name != "input_ids+loss_mask":
            self.tokenizer = MaskTokenizer(tokenizer)

    @property
    def full(self) -> bool:
        return self.config.max_samples is not None and len(self.seen) >= self.config.max_samples

    def add(self, rows: list[Row]) -> dict[str, list[Any]]:
        """Columns of the samples of these rows that are to be kept."""
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        for row, group, tokens in self._tokenize(rows):
            if self.full:
                break
            self._keep(columns, row, group, tokens)
        self.num_rows += len(rows)
        return columns

    def check_any(self) -> None:
        """Raises InputError if no sample is left."""
        if not self.seen:
            [(reason, count)] = Counter(entry["reason"] for entry in self.quarantined).most_common(1)
            raise InputError(
                f"No row of {self.config.source} ({self.format_name} format, {format_count(self.num_rows, 'row')}) can be used; the "
                f"commonest reason ({format_count(count, 'time')}): {reason}. Give other rows, or mend these."
            )

    def _tokenize(self, rows: list[Row]) -> Iterator[tuple[int, int | None, Tokens]]:
        """(row number, group or None where it follows from the tokens, tokens) of each sample."""
        origins: list[tuple[int, int | None]] = []
        renderings: list[Rendering] = []
        texts: list[str] = []
        ready: list[Tokens] = []
        for number, row in enumerate(rows, start=self.num_rows):
            try:
                if self.format_name == "text":
                    if not isinstance(row.get("text"), str):
                        raise RowError("no text in this row")
                    row["text"].encode()
                    texts.append(row["text"])
                    origins.append((number, None))
                elif self.format_name == "input_ids+loss_mask":
                    ready.append(_ready_tokens(row, self.num_token_ids))
                    origins.append((number, None))
                else:
                    conversation = parse_conversation(self.format_name, row)
                    group = first_turn_group(conversation.messages)
                    samples = self.renderer.split(conversation)
                    for sample in samples:
                        sample.text.encode()  # JSON may escape half a surrogate pair, on which tokenizers panic
                    renderings += samples
                    origins += [(number, group)] * len(samples)
            except UnicodeEncodeError:
                self._quarantine(number, SURROGATE)
            except RowError as error:
                self._quarantine(number, str(error))
        if texts:
            ready = self.tokenizer.tokenize_text(texts)
        elif renderings:
            ready = self.tokenizer.tokenize(renderings)
        for (row_number, group_of_row), tokens in zip(origins, ready, strict=True):
            yield row_number, group_of_row, tokens

    def _keep(self, columns: dict[str, list[Any]], row: int, group: int | None, tokens: Tokens) -> None:
        token_ids, loss_mask = tokens.token_ids, tokens.loss_mask
        if group is not None and len(loss_mask) and loss_mask.all():
            self._quarantine(row, "every token would count: the chat template marks the prompt as an answer too")
            return
        truncated = len(token_ids) > self.config.max_tokens
        token_ids, loss_mask = token_ids[: self.config.max_tokens], loss_mask[: self.config.max_tokens]
        identity = sample_id(token_ids, loss_mask)
        supervised = int(loss_mask.sum())
        if not supervised:
            cut = f" within the first {self.config.max_tokens}" if truncated else ""
            self._quarantine(row, f"no supervised tokens{cut}", format_id(identity))
            return
        if identity in self.seen:
            self.num_duplicates += 1
            return
        self.seen.add(identity)
        self.num_truncated += truncated
        if group is None:
            group = prompt_group(token_ids, loss_mask, identity)
        for name, value in zip(SCHEMA.names, (identity, group, supervised, token_ids, loss_mask), strict=True):
            columns[name].append(value)

    def _quarantine(self, row: int, reason: str, sample_id: str | None = None) -> None:
        self.quarantined.append({"row": row, "id": sample_id, "reason": reason})


def _ready_tokens(row: Row, num_token_ids: int) -> Tokens:
    token_ids, loss_mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(token_ids, list) or not isinstance(loss_mask, list) or not token_ids:
        raise RowError("input_ids and loss_mask are not two filled lists")
    if len(token_ids) != len(loss_mask):
        raise RowError("input_ids and loss_mask differ in length")
    if not all(type(token) is int and 0 <= token < num_token_ids for token in token_ids):
        raise RowError(f"input_ids holds something that is no token id of the tokenizer (0 to {num_token_ids - 1})")
    if not all(value in (0, 1) for value in loss_mask):
        raise RowError("loss_mask holds something else than 0 and 1")
    return Tokens(np.array(token_ids, np.int32), np.array(loss_mask, np.uint8))
