"""verify_store: a sound store is clean, and any damage anywhere is reported with its place."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_train.store.checksums import CHECKSUMS_NAME, format_checksums, read_checksums, sum_file
from dflash_train.store.consumed import remove_segments
from dflash_train.store.creation import store_lock
from dflash_train.store.index import write_index
from dflash_train.store.manifest import StoreError
from dflash_train.store.opened import Segment, list_segments
from dflash_train.store.plan import Plan, write_plan
from dflash_train.store.reader import StoreReader
from dflash_train.store.verify import format_verification, verify_store, walk


def test_sound_store_is_clean_and_counted(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    steps = []
    report = verify_store(path, lambda done, total: steps.append((done, total)))
    assert report.problems == [] and report.leftovers == []
    assert (report.num_segments, report.num_samples) == (3, 14)
    assert report.num_bytes == StoreReader(path).num_bytes
    assert steps == sorted(steps, key=lambda step: step[0]) and steps[-1] == (report.num_bytes, report.num_bytes)


def sample_at(path: Path, encoding: Any, file: Path, offset: int) -> str | None:
    """The sample whose rows hold a byte of a segment's file; None where it is no sample's."""
    segment = Segment(path / "segments" / file.relative_to(path / "segments").parts[0], encoding)
    for array, info in segment.arrays.items():
        if segment.path(array) == file:
            for identity, _, first, length, *_ in segment.samples.tolist():
                if first <= offset // info.row_bytes < first + length:
                    return f"{identity:016x}"
    return None


def test_every_flipped_byte_is_reported(maker: Any, quick_path: Path) -> None:
    """270 places or more in each of the four encodings, with segment and sample; records of consumed segments, too."""
    path = maker.store(quick_path / "s.zarr", segments=1)
    name = maker.add_segment(path, [30, 31])
    gone = StoreReader(path).entry(name)
    remove_segments(path, {name: (gone.samples, [{"id": None, "row": 9, "reason": "empty"}])})
    write_plan(path, Plan(samples=9, tokens=99, longest=13, state="running", beat=1, run="a1"))
    assert write_index(path, list(StoreReader(path)._entries))
    files = sorted(file for file in walk(path) if ".consumer" not in file.parts)
    assert {path / "plan.json", path / ".index"} < set(files)
    assert path / "consumed" / f"{name}.json" in files
    generator = np.random.default_rng(11)
    places = [(file, offset) for file in files for offset in (0, file.stat().st_size - 1)]  # every file
    sizes = np.array([file.stat().st_size for file in files])
    for _ in range(100):  # any byte, of any file
        file = files[generator.integers(len(files))]
        places.append((file, int(generator.integers(file.stat().st_size))))
    for position in generator.integers(0, sizes.sum(), 80).tolist():  # any byte, of the large ones
        number = int(np.searchsorted(np.cumsum(sizes), position, side="right"))
        places.append((files[number], position - int(sizes[:number].sum())))
    segment = Segment(path / "segments" / list_segments(path)[0], maker.encoding)
    for _ in range(60):  # any byte of a sample's rows
        array = str(generator.choice(list(segment.arrays)))
        _, _, first, length, *_ = segment.samples[generator.integers(segment.num_samples)].tolist()
        row_bytes = segment.arrays[array].row_bytes
        places.append((segment.path(array), int(generator.integers(first * row_bytes, (first + length) * row_bytes))))
    assert len(places) >= 270
    num_in_samples = 0
    for file, offset in places:
        relative = file.relative_to(path).parts
        is_in_segment = relative[0] == "segments" and len(relative) > 2
        sample = sample_at(path, maker.encoding, file, offset) if is_in_segment else None
        data = file.read_bytes()
        mask = int(generator.integers(1, 256))
        file.write_bytes(data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :])
        problems = verify_store(path).problems
        file.write_bytes(data)
        assert problems, f"{file} byte {offset} ^ {mask:02x}"
        if is_in_segment:
            assert {problem.segment for problem in problems} == {relative[1]}
            assert problems[0].file == "/".join(relative[2:])
        else:
            assert problems[0].segment is None and problems[0].file == "/".join(relative)
        if sample is not None:
            assert [problem.sample for problem in problems] == [None, sample]
            num_in_samples += 1
    assert num_in_samples >= 60
    assert verify_store(path).problems == []


def test_damaged_rows_name_the_sample(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    name = maker.add_segment(path, [4, 5, 6])
    for array in ("features", "token_ids", "loss_mask"):
        shutil.copytree(path, tmp_path / "copy")
        segment = Segment(path / "segments" / name, maker.encoding)
        row = int(segment.samples[1, 2]) + 2
        file = tmp_path / "copy" / segment.path(array).relative_to(path)
        data = bytearray(file.read_bytes())
        data[row * segment.arrays[array].row_bytes] ^= 1
        file.write_bytes(data)
        report = verify_store(tmp_path / "copy")
        problems = report.problems
        assert f"segment {name}, sample {1005:016x}: Its rows have crc32c" in format_verification(report)
        assert "KiB read: 2 problems" in format_verification(report)
        assert [(problem.segment, problem.sample) for problem in problems] == [(name, None), (name, f"{1005:016x}")]
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_short_files_are_reported(maker: Any, tmp_path: Path, keep: int) -> None:
    path = maker.store(tmp_path / "s.zarr", segments=1)
    for file in sorted(walk(path)):
        data = file.read_bytes()
        if len(data) > abs(keep):
            file.write_bytes(data[:keep])
            assert verify_store(path).problems, file
            file.write_bytes(data)


def test_missing_and_unlisted_files_are_reported(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr", segments=1)
    for file in sorted(walk(path)):
        moved = file.rename(tmp_path / "moved")
        assert verify_store(path).problems, file
        moved.rename(file)
    segment = min((path / "segments").iterdir())
    for extra in (
        segment / "notes.txt",
        segment / "features" / "c" / "0" / "1",
        path / "frozen" / "more",
        path / "segments" / "x",
    ):
        extra.write_text("x")
        (problem,) = verify_store(path).problems
        assert "is not listed in checksums.json" in problem.text
        extra.unlink()
    (path / "notes.txt").write_text("not ours")
    assert verify_store(path).problems == []


def test_leftovers_are_told_but_no_problem(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr", segments=1)
    (path / ".staging" / "dead").mkdir()
    (tmp_path / ".tmp-s.zarr-0123").mkdir()
    report = verify_store(path)
    assert report.problems == []
    assert "left over by a dead run, removed by the next extract" in format_verification(report)
    assert report.leftovers == [str(path / ".staging" / "dead"), str(tmp_path / ".tmp-s.zarr-0123")]


def test_what_a_run_writes_is_no_leftover_while_it_holds_the_lock(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr", segments=1)
    (path / ".staging" / "open").mkdir()
    with store_lock(path):
        report = verify_store(path)
    assert (report.problems, report.leftovers, report.in_progress) == ([], [], [str(path / ".staging" / "open")])
    assert f"being written by a run in progress, not verified: {path / '.staging' / 'open'}" in format_verification(
        report
    )
    assert "dead" not in format_verification(report)
    assert verify_store(path).in_progress == []


def test_progress_counts_what_is_read_from_the_start(maker: Any, tmp_path: Path) -> None:
    """Neither open segments, nor a plan, nor what a consumer is deleting."""
    path = maker.store(tmp_path / "s.zarr", segments=2)
    for name in (".staging/open", ".consumer/trash/gone"):
        (path / name).mkdir(parents=True)
        (path / name / "rows").write_bytes(bytes(10_000))
    write_plan(path, Plan(samples=1, tokens=1, longest=1, state="running", beat=1, run="a"))
    told: list[tuple[int, int]] = []
    report = verify_store(path, lambda *count: told.append(count))
    assert {total for _done, total in told} == {report.num_bytes} and told[-1][0] == report.num_bytes


def rewrite(folder: Any, name: str, change: Any) -> None:
    """Change a file and list its new checksum: damage that only the contents betray."""
    file = folder / name
    file.write_bytes(change(file.read_bytes()))
    checksums = read_checksums(folder) | {name: sum_file(file, lambda num_bytes: None)}
    (folder / CHECKSUMS_NAME).write_bytes(format_checksums(checksums))


def test_counts_and_padding_are_checked_beyond_checksums(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    folder = path / "segments" / maker.add_segment(path, [1, 4, 5])

    def with_copy(name: str, change: Any) -> Any:
        shutil.copytree(folder, tmp_path / "backup")
        rewrite(folder, name, change)
        (problem,) = verify_store(path).problems
        shutil.rmtree(folder)
        (tmp_path / "backup").rename(folder)
        return problem

    row_bytes = maker.encoding.num_columns * maker.encoding.storage_dtype.itemsize
    at = 8 * row_bytes  # seven rows, then padding
    problem = with_copy("features/c/0/0", lambda data: data[:at] + b"\x01" + data[at + 1 :])
    assert problem.file == "features" and "padding rows that are not zero" in problem.text
    last = -(4 + 16 * (len((folder / "features/c/0/0").read_bytes()) // (32 * row_bytes))) - 1
    problem = with_copy("features/c/0/0", lambda data: data[:last] + b"\x01" + data[last + 1 :])
    assert "padding rows that are not zero" in problem.text
    problem = with_copy("features/c/0/0", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert "is no flat shard" in problem.text
    problem = with_copy("token_ids/c/0", lambda data: data[:32] + b"\x01" + data[33:])
    assert problem.file == "token_ids"

    def set_column(row: Any, column: Any, value: Any) -> Any:
        def change(data: Any) -> Any:
            table = np.frombuffer(data, np.int64).reshape(-1, 6).copy()
            table[row, column] = value
            return table.tobytes()

        return change

    problem = with_copy("samples/c/0/0", set_column(1, 4, 0))
    assert problem.sample == f"{1004:016x}" and "supervised tokens but the table says 0" in problem.text
    problem = with_copy("samples/c/0/0", set_column(1, 5, 7))
    assert "not 00000007" in problem.text
    for row, column, value in [
        (0, 3, 8),
        (0, 2, 1),
        (1, 2, 0),
        (0, 3, 0),
        (1, 3, 2**62),
        (1, 2, -64),
        (0, 4, 99),
        (0, 4, -1),
    ]:
        assert "samples" in with_copy("samples/c/0/0", set_column(row, column, value)).text

    def set_attribute(name: str, value: Any) -> Any:
        def change(data: Any) -> Any:
            metadata = json.loads(data)
            metadata["attributes"][name] = value
            return json.dumps(metadata).encode()

        return change

    counts: list[tuple[str, Any]] = [("num_samples", 4), ("num_tokens", 1), ("num_rows", 10**6), ("num_rows", "x")]
    columns = ["id", "group", "length", "first_row", "supervised", "crc32c"]
    for name, value in [*counts, ("quarantined", 1), ("sample_columns", columns)]:
        assert with_copy("zarr.json", set_attribute(name, value)).segment == folder.name
    problem = with_copy("features/zarr.json", set_attribute("dtype_view", "float8"))
    assert "features is " in problem.text
    problem = with_copy("samples/zarr.json", lambda data: data.replace(b"int64", b"uint64"))
    assert "samples has shape" in problem.text
    problem = with_copy("features/zarr.json", lambda data: data.replace(b"uint16", b"int16").replace(b"int8", b"uint8"))
    assert "features" in problem.text


def test_calibration_of_another_store_is_reported(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    rewrite(path, "calibration/channel_scale/c/0", lambda data: data[::-1])
    (problem,) = verify_store(path).problems
    assert "not the one of the manifest" in problem.text


def reshape(data: bytes, wanted: tuple[int, int], found: tuple[int, int]) -> bytes:
    """A zarr.json of as many values in another shape."""
    metadata = json.loads(data)
    assert tuple(metadata["shape"]) == wanted
    metadata["shape"] = metadata["chunk_grid"]["configuration"]["chunk_shape"] = list(found)
    return json.dumps(metadata).encode()


@pytest.mark.parametrize("table", ["frozen/embed_tokens", "frozen/lm_head"])
def test_a_frozen_table_of_another_shape_is_reported(with_: Any, tmp_path: Path, table: str) -> None:
    path = with_(tied=False).create(tmp_path / "s.zarr")
    rewrite(path, f"{table}/zarr.json", lambda data: reshape(data, (11, 8), (8, 11)))
    (problem,) = verify_store(path).problems
    assert problem.file == table and "has shape [8, 11], wanted [11, 8]" in problem.text


def test_a_projection_of_another_shape_is_reported(with_: Any, tmp_path: Path) -> None:
    """Its values, and so the manifest's hash of the calibration, are the same."""
    path = with_(encoding_name="projected-int8").create(tmp_path / "s.zarr")
    rewrite(path, "calibration/projection/zarr.json", lambda data: reshape(data, (7, 24), (24, 7)))
    (problem,) = verify_store(path).problems
    assert problem.file == "calibration" and "projection [24, 7]" in problem.text


def test_a_config_that_is_no_json_is_reported(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    rewrite(path, "frozen/target/config.json", lambda data: data[:-1])
    rewrite(path, "frozen/target/chat_template.jinja", lambda data: b"{")  # not JSON in any store
    (problem,) = verify_store(path).problems
    assert problem.file == "frozen/target/config.json" and "is no JSON" in problem.text


def test_nothing_to_verify_raises(bf16: Any, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        verify_store(tmp_path)
    path = bf16.create(tmp_path / "s.zarr")
    rewrite(path, "zarr.json", lambda data: data.replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(StoreError, match="format version 9"):
        verify_store(path)
