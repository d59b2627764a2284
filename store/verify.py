"""Reading a whole store to find every damaged byte: `dflash inspect-store --verify checksums`.

Each segment is read twice: file by file against checksums.json, then sample by sample, which tells whose rows are hit
and proves what file checksums cannot: that counts, crc32c and padding are what the writer promises. The second pass
mostly finds the page cache warm. Damage of any kind becomes a `Problem`, never an exception.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_train.store.arrays import INNER_ROWS, read_array
from dflash_train.store.calibration import CALIBRATION, Calibration
from dflash_train.store.checksums import CHECKSUMS_NAME, Checksum, check_sum, extend_crc, read_checksums, sum_file
from dflash_train.store.consumed import CONSUMED, consumed_segments, read_record
from dflash_train.store.creation import (
    EMBED_TOKENS,
    LM_HEAD,
    TARGET_FILES,
    calibration_shapes,
    is_locked,
    manifest_encoding,
    stale_entries,
)
from dflash_train.store.download import download_segment, downloaded
from dflash_train.store.encoding import Encoding
from dflash_train.store.index import INDEX_NAME, check_index
from dflash_train.store.location import StoreLocation, StoreUrl
from dflash_train.store.manifest import Manifest, StoreError, format_id
from dflash_train.store.opened import Segment, SegmentFiles, list_segments
from dflash_train.store.plan import PLAN_NAME, read_plan
from dflash_train.store.reader import open_manifest
from dflash_train.store.reference import list_references, reference_encoding
from dflash_train.store.segment import REFERENCE, SEGMENTS, row_arrays
from dflash_train.store.upload import orphans_of
from dflash_train.units import format_bytes, format_count

GAP_ROWS = 4096


@dataclass(frozen=True)
class Problem:
    """One damaged thing: its segment, «reference/<id>» for one of reference samples (None: the store's own files), sample
    id and file where they are known."""

    segment: str | None
    sample: str | None
    file: str | None
    text: str


@dataclass
class VerifyReport:
    """What was read and what was wrong; a store is sound when problems is empty."""

    problems: list[Problem] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    """Half-written entries of dead runs: harmless, removed by the next extract."""
    in_progress: list[str] = field(default_factory=list)
    """Half-written entries of a run that holds the store's lock now: not looked into."""
    num_segments: int = 0
    num_samples: int = 0
    num_bytes: int = 0


def verify_store(path: StoreLocation, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read everything in a store and report every problem; progress gets bytes read and bytes in all.

    Raises StoreError only where there is nothing to verify: no store at this path, or one of a newer version. Of a URL
    one segment at a time is downloaded, and removed when it is verified.
    """
    if isinstance(path, StoreUrl):
        return _verify_remote(path, progress)
    if not (path / CHECKSUMS_NAME).is_file():
        open_manifest(path)
    verifier = _Verifier(path, progress)
    verifier.verify_root()
    for name in verifier.segment_ids:
        verifier.verify_segment(path / SEGMENTS / name, name, verifier.encoding)
    encoding = None if verifier.encoding is None else reference_encoding(verifier.encoding)
    for folder in list_references(path):
        verifier.verify_segment(folder, f"{REFERENCE}/{folder.name}", encoding)
    if progress is not None:  # the bytes in all were those of files that no checksum lists, too
        progress(verifier.report.num_bytes, verifier.report.num_bytes)
    return verifier.report


def _verify_remote(location: StoreUrl, progress: Callable[[int, int], None] | None) -> VerifyReport:
    with downloaded(location) as (folder, objects, sizes):
        if not (folder / CHECKSUMS_NAME).is_file():
            try:
                open_manifest(folder)
            except StoreError as error:
                raise StoreError(str(error).replace(str(folder), str(location))) from error
        orphans = tuple(f"{SEGMENTS}/{name}/" for name in orphans_of(sizes))
        total_bytes = sum(
            size for name, size in sizes.items() if not name.startswith(orphans) and not name.endswith(CHECKSUMS_NAME)
        )
        verifier = _Verifier(folder, progress, total_bytes)
        verifier.verify_root()
        reference = None if verifier.encoding is None else reference_encoding(verifier.encoding)
        parts = [(f"{SEGMENTS}/{name}", name, verifier.encoding) for name in verifier.segment_ids]
        for place in list_references(folder):
            parts.append((f"{REFERENCE}/{place.name}", f"{REFERENCE}/{place.name}", reference))
        for name, label, encoding in parts:
            download_segment(folder, name, objects, sizes)
            verifier.verify_segment(folder / name, label, encoding)
            shutil.rmtree(folder / name, ignore_errors=True)
    report = verifier.report
    here, there = str(folder), str(location)
    report.problems = [replace(problem, text=problem.text.replace(here, there)) for problem in report.problems]
    report.leftovers = [objects.url(f"{SEGMENTS}/{name}") for name in orphans_of(sizes)]
    if progress is not None:
        progress(report.num_bytes, report.num_bytes)
    return report


def format_verification(report: VerifyReport) -> str:
    """The result as text: what was read, then a line for each problem."""
    counts = f"{format_count(report.num_segments, 'segment')}, {format_count(report.num_samples, 'sample')}"
    read = f"{counts}, {format_bytes(report.num_bytes)} read"
    lines = [f"{read}: {f'{len(report.problems):,} problems' if report.problems else 'no problem'}"]
    for problem in report.problems:
        where = {"segment": problem.segment, "sample": problem.sample, "file": problem.file}
        lines.append(f"  {', '.join(f'{name} {value}' for name, value in where.items() if value)}: {problem.text}")
    lines += [f"  being written by a run in progress, not verified: {name}" for name in report.in_progress]
    lines += [f"  left over by a dead run, removed by the next extract: {name}" for name in report.leftovers]
    return "\n".join(lines)


class _Verifier:
    """The state of one verification: the report, progress, and what the root says."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None, total_bytes: int | None = None) -> None:
        self.path = path
        self.report = VerifyReport()
        if entries := stale_entries(path):
            if is_locked(path):
                self.report.in_progress = list(map(str, entries))
            else:  # a run that has just ended has taken its own along
                self.report.leftovers = [str(entry) for entry in entries if entry.exists()]
        self.manifest: Manifest | None = None
        self.encoding: Encoding | None = None
        self.segment_ids: list[str] = []
        self._progress = progress
        if total_bytes is None:
            total_bytes = (
                sum(_size_of(file) for file in self._files_to_read() if file.name != CHECKSUMS_NAME) if progress else 0
            )
        self._total_bytes = total_bytes

    def problem(self, segment: str | None, sample: str | None, file: str | None, error: object) -> None:
        self.report.problems.append(Problem(segment, sample, file, str(error)))

    def verify_root(self) -> None:
        """Check manifest, calibration, frozen target, and the records of segments that were removed."""
        checksums = self._verify_files(self.path, None, self._root_files())
        sound = not self.report.problems
        for segment in sorted(consumed_segments(self.path)):
            self._verify_record(f"{CONSUMED}/{segment}.json")
        if (self.path / PLAN_NAME).exists() and read_plan(self.path) is None:
            self.problem(None, None, PLAN_NAME, "it is damaged; the next extract writes it anew")
        try:
            check_index(self.path)
        except ValueError as error:
            self.problem(None, None, INDEX_NAME, error)
        try:
            self.segment_ids = list_segments(self.path)
            self.report.num_segments = len(self.segment_ids)
            manifest = open_manifest(self.path)
            self.encoding = manifest_encoding(manifest)
            self.manifest = manifest
        except ValueError:
            if sound:
                raise  # intact, but of a newer version
            return
        if sound:
            for file, text in _root_errors(self.path, manifest, self.encoding, checksums):
                self.problem(None, None, file, text)

    def _verify_record(self, file: str) -> None:
        """Check what a removed segment held: no checksums.json lists it, it has a crc32c of its own."""
        try:
            read_record(self.path / file)
            self._advance((self.path / file).stat().st_size)
        except StoreError as error:
            self.problem(None, None, file, error)

    def _files_to_read(self) -> Iterator[Path]:
        """Neither what is being written nor what is on its way out."""
        yield from self._root_files()
        yield from (self.path / CONSUMED / f"{segment}.json" for segment in consumed_segments(self.path))
        for parent in (self.path / SEGMENTS, self.path / REFERENCE):
            if parent.is_dir():
                yield from (file for entry in parent.iterdir() for file in walk(entry))

    def _root_files(self) -> Iterator[Path]:
        """Files of the root that must be listed; unknown entries beside them are none of our business."""
        yield from (self.path / name for name in ("zarr.json", CHECKSUMS_NAME))
        for folder in (CALIBRATION, "frozen"):
            yield from walk(self.path / folder)
        for parent in (self.path / SEGMENTS, self.path / REFERENCE):
            if parent.is_dir():
                yield from (entry for entry in parent.iterdir() if not entry.is_dir())

    def verify_segment(self, folder: Path, name: str, encoding: Encoding | None) -> None:
        """Check one segment's files, and where its encoding is known table, samples and padding."""
        num_problems = len(self.report.problems)
        self._verify_files(folder, name, walk(folder))
        if encoding is None:
            return
        try:
            segment = Segment(folder, encoding)
            files = SegmentFiles(segment)
        except StoreError as error:
            if len(self.report.problems) == num_problems:
                self.problem(name, None, None, error)
            return
        try:
            files.check()
            if self.manifest is not None:
                self.manifest.check_origin(folder, segment.source)
        except StoreError as error:
            self.problem(name, None, None, error)
        if folder.parent.name == SEGMENTS:
            self.report.num_samples += segment.num_samples
        for sample in segment.samples.tolist():
            self._verify_sample(files, name, *sample)
        for array in segment.arrays:
            try:
                if any(rows.any() for rows in _padding(files, array)):
                    self.problem(name, None, array, f"{segment.path(array)} has padding rows that are not zero.")
            except StoreError as error:
                self.problem(name, None, array, error)

    def _verify_files(self, folder: Path, segment: str | None, files: Iterable[Path]) -> dict[str, Checksum]:
        """Compare a folder's files with its checksums.json: damaged, missing and unlisted ones are problems."""
        present = {file.relative_to(folder).as_posix() for file in files if file.exists()}
        try:
            checksums = read_checksums(folder)
        except StoreError as error:
            self.problem(segment, None, CHECKSUMS_NAME, error)
            return {}
        for name in sorted(present - checksums.keys() - {CHECKSUMS_NAME}):
            self.problem(segment, None, name, f"{folder / name} is not listed in {CHECKSUMS_NAME}.")
        for name in checksums:
            try:
                check_sum(folder, name, sum_file(folder / name, self._advance), checksums)
            except StoreError as error:
                self.problem(segment, None, name, error)
        return checksums

    def _advance(self, num_bytes: int) -> None:
        self.report.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self.report.num_bytes, max(self._total_bytes, self.report.num_bytes))

    def _verify_sample(
        self,
        files: SegmentFiles,
        segment: str,
        identity: int,
        group: int,
        first_row: int,
        length: int,
        supervised: int,
        crc32c: int,
    ) -> None:
        """Read one sample's rows; what follows the segment's name is its entry in the table."""
        sample, crc = format_id(identity), 0
        counted = 0
        for array in row_arrays(files.segment.encoding):
            try:
                rows = files.new_rows(array, first_row, length)
            except StoreError as error:
                return self.problem(segment, sample, array, error)
            crc = extend_crc(crc, rows)
            counted = int(np.count_nonzero(rows))  # of the last array, loss_mask
        if crc != crc32c:
            self.problem(segment, sample, None, f"Its rows have crc32c {crc:08x}, not {crc32c:08x}; they are damaged.")
        elif counted != supervised:
            self.problem(segment, sample, None, f"It has {counted} supervised tokens but the table says {supervised}.")
        return None


def _padding(files: SegmentFiles, array: str) -> Iterator[NDArray[Any]]:
    """Yield the rows of an array that belong to no sample, a bounded number at a time."""
    segment = files.segment
    starts = [*segment.samples[:, 2].tolist(), segment.num_rows]
    ends = [0, *(segment.samples[:, 2] + segment.samples[:, 3]).tolist()]
    if segment.arrays[array].sharded:
        starts[-1] = math.ceil(segment.num_rows / INNER_ROWS) * INNER_ROWS
    for end, start in zip(ends, starts, strict=True):
        for first_row in range(end, start, GAP_ROWS):
            yield files.new_rows(array, first_row, min(GAP_ROWS, start - first_row))


def _root_errors(
    path: Path, manifest: Manifest, encoding: Encoding, checksums: Mapping[str, Checksum]
) -> Iterator[tuple[str, str]]:
    """Yield (file, sentence) where intact files of the root contradict each other."""
    try:
        arrays = {name: read_array(path, f"{CALIBRATION}/{name}")[0] for name in calibration_shapes(encoding)}
        shapes = {name: array.shape for name, array in arrays.items()}
        if (
            shapes != calibration_shapes(encoding)
            or Calibration.from_arrays(**arrays).hash != manifest.calibration_hash
        ):
            found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            yield CALIBRATION, f"The calibration ({found}) is not the one of the manifest."
        for table in [EMBED_TOKENS] if manifest.tied_embeddings else [EMBED_TOKENS, LM_HEAD]:
            shape, wanted = read_array(path, table)[0].shape, (manifest.vocab_size, manifest.hidden_size)
            if shape != wanted:
                yield table, f"The frozen table has shape {list(shape)}, wanted {list(wanted)}."
    except StoreError as error:
        yield CHECKSUMS_NAME, str(error)
    for entry in checksums:
        if entry.startswith(TARGET_FILES) and entry.endswith(".json"):
            try:
                json.loads((path / entry).read_bytes())
            except ValueError as error:
                yield entry, f"{path / entry} is no JSON: {error}."


def _size_of(file: Path) -> int:
    """Bytes; 0 for a file that is missing, which is found when it is read."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, in order."""
    if folder.is_dir():
        yield from (entry for entry in sorted(folder.rglob("*")) if not entry.is_dir())
