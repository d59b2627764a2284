"""Data sources: a local file, a folder, a `save_to_disk` folder or a hub name → one stream of rows (dicts).

json and jsonl are parsed here, line by line: rows may have different keys and mixed types, which a typed Arrow table
either refuses or fills with nulls, and a broken line can be named. Tables (parquet, arrow, save_to_disk, hub) go through
`datasets`; the nulls that it fills in are removed again. `datasets` costs a second to import, so only those paths do it:
what identifies a source (`identity`, part of the key of the sample cache) comes from sizes and times of its files.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.errors import InputError

Row = dict[str, Any]
JSON_SUFFIXES = (".json", ".jsonl")
TABLE_SUFFIXES = (".parquet", ".arrow")
ACCEPTED = "a .json, .jsonl, .parquet or .arrow file, a folder of them, a save_to_disk folder, or a hub name"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SETTINGS_SUFFIX = ".generation.json"  # beside a file of regenerated answers: how they were made
# The words by which `datasets` finds splits in file names.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that can be read from the start as often as needed."""

    name: str
    identity: dict[str, Any]
    # what tells this content from another: files with size and mtime, or hub name and fingerprint
    count: Callable[[], int | None]
    # number of rows where that is cheap to know, for progress
    rows: Callable[[], Iterator[Row]]


def open_source(source: str, split: str = "train") -> Source:
    """Find what `source` names. Raises InputError if there is no such thing or it has no such split."""
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return _saved_dataset(source, path, split)
        return _files_source(source, _folder_files(path, split), path)
    if path.is_file():
        if path.suffix not in JSON_SUFFIXES + TABLE_SUFFIXES:
            raise InputError(f"{source} is a {path.suffix or 'suffix-less'} file; wanted {ACCEPTED}.")
        if split != "train":
            raise InputError(f"{source} is one file and has only the split train, not {split}. Name that split's file.")
        return _files_source(source, [path], path.parent)
    if path.suffix in JSON_SUFFIXES + TABLE_SUFFIXES or not HUB_NAME.fullmatch(source):
        raise InputError(f"{source} does not exist. Give {ACCEPTED}.")
    return hub_source(source, split)


def without_nulls(value: Any) -> Any:
    """Remove keys whose value is None, at any depth: Arrow tables fill keys that a row lacks with nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _files_source(source: str, files: list[Path], base: Path) -> Source:
    def count() -> int | None:
        counts = [_count_rows(file) for file in files]
        return None if None in counts else sum(item for item in counts if item is not None)

    def rows() -> Iterator[Row]:
        for file in files:
            yield from (_json_rows(file) if file.suffix in JSON_SUFFIXES else _table_rows(file))

    return Source(name=source, identity={"files": _file_states(files, base)}, count=count, rows=rows)


def _file_states(files: list[Path], base: Path) -> list[list[Any]]:
    states = [(file, file.stat()) for file in files]
    return [[file.relative_to(base).as_posix(), state.st_size, state.st_mtime_ns] for file, state in states]


def _folder_files(folder: Path, split: str) -> list[Path]:
    """Data files of one split. Files whose path names no split belong to train."""
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        hidden = any(part.startswith((".", "__")) for part in relative.parts) or file.name.endswith(SETTINGS_SUFFIX)
        if file.is_file() and not hidden and file.suffix in JSON_SUFFIXES + TABLE_SUFFIXES:
            splits.setdefault(_split_of(relative.with_suffix("")), []).append(file)
    if not splits:
        raise InputError(f"No .json, .jsonl, .parquet or .arrow file in {folder}. Give {ACCEPTED}.")
    if split not in splits:
        raise InputError(f"{folder} has no split {split}; found {', '.join(sorted(splits))}.")
    return splits[split]


def _split_of(relative: Path) -> str:
    words = re.split(r"[-._ /0-9]+", relative.as_posix())
    for split, names in SPLIT_WORDS.items():
        if any(word in names for word in words):
            return split
    return "train"


def _count_rows(file: Path) -> int | None:
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(not line.isspace() for line in stream)
    if file.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (OSError, pyarrow.ArrowInvalid):
            return None  # reading will say what is wrong
    return None


def _json_rows(file: Path) -> Iterator[Row]:
    """Rows of a JSON-lines file, or of a .json file that holds one list of objects."""
    with file.open("rb") as stream:
        start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from _json_list(file, stream.read())
            return
        for number, line in enumerate(stream, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not text:
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                if file.suffix == ".json" and text == b"{":
                    raise InputError(
                        f"{file} holds JSON over several lines that is not a list. Wanted a list of objects or one "
                        f"object a line."
                    ) from error
                raise InputError(f"{file}, line {number}: {_json_problem(error)}. Repair or remove it.") from error
            if not isinstance(row, dict):
                raise InputError(f"{file}, line {number}: found a JSON {type(row).__name__}, wanted one object a line.")
            yield row


def _json_list(file: Path, data: bytes) -> Iterator[Row]:
    try:
        rows = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        raise InputError(f"{file}, line {error.lineno}: {_json_problem(error)}. Repair the file.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: {_json_problem(error)}. Repair the file.") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{file}, item {number}: found a JSON {type(row).__name__}, wanted a list of objects.")
        yield row


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply for a conversation"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg}, column {error.colno})"
    return f"not valid UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else f"not valid JSON ({error})"


@contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """The `datasets` module without progress bars and log lines: the terminal belongs to our own progress."""
    import datasets

    bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield datasets
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _table_rows(file: Path) -> Iterator[Row]:
    with _quiet_datasets() as datasets:
        try:
            # streaming: no second copy of the table in the cache folder of `datasets`
            loader = file.suffix.removeprefix(".")
            for row in datasets.load_dataset(loader, data_files=[str(file)], split="train", streaming=True):
                yield without_nulls(row)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise InputError(f"{file} cannot be read: {_first_line(error).rstrip('.')}. Write it again.") from error


def _saved_dataset(source: str, path: Path, split: str) -> Source:
    if (path / "dataset_dict.json").exists():
        try:
            splits = list(json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"{path / 'dataset_dict.json'} is damaged ({_first_line(error)}); it lists the splits of a save_to_disk "
                f"folder. Save the data set again."
            ) from error
        if split not in splits:
            raise InputError(f"{source} has no split {split}; found {', '.join(splits)}.")
        path = path / split
    elif split != "train":
        raise InputError(f"{source} is one saved data set and has only the split train, not {split}.")

    def load() -> Any:
        with _quiet_datasets() as datasets:
            try:
                return datasets.load_from_disk(str(path))
            except (OSError, ValueError, KeyError) as error:
                raise InputError(f"{source} is no whole save_to_disk folder: {_first_line(error)}") from error

    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("cache-"))
    return Source(
        name=source,
        identity={"files": _file_states(files, path)},
        count=lambda: len(load()),
        rows=lambda: (without_nulls(row) for row in load()),
    )


def hub_source(source: str, split: str, configuration: str | None = None) -> Source:
    """A data set on the hub; of those that have several, one configuration. Raises InputError, from what went wrong."""
    with _quiet_datasets() as datasets:
        try:
            table = datasets.load_dataset(source, *([configuration] if configuration else []), split=split)
        except Exception as error:  # the hub client raises dozens of kinds: network, rights, names, splits, configs
            raise InputError(
                f"{source} is no local path, and loading it from the hub failed: {_first_line(error)}. Give {ACCEPTED}."
            ) from error
    urls = " ".join((table.info.download_checksums or {}).keys())
    revision = re.search(r"@([0-9a-f]{40})", urls)
    identity = {"hub": source, "split": split, "fingerprint": table._fingerprint}
    return Source(
        name=source,
        identity=identity | ({"revision": revision[1]} if revision else {}),
        count=lambda: len(table),
        rows=lambda: (without_nulls(row) for row in table),
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
