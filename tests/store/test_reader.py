"""The reader against zarr-python, the slow twin: every value of every store."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from dflash_train.store.arrays import read_array_info
from dflash_train.store.checksums import format_checksums, read_checksums, sum_contents
from dflash_train.store.encoding import from_stored
from dflash_train.store.manifest import StoreError
from dflash_train.store.reader import StoreReader
from dflash_train.store.segment import SegmentWriter

ODD_LENGTHS = (1, 7, 31, 32, 33, 100, 507)


def assert_equals_zarr(path: Path) -> None:
    """Compare each value that the reader gives, and each row between samples, with zarr.open_group."""
    reader = StoreReader(path)
    root: Any = zarr.open_group(path, mode="r")
    assert root.attrs["weights_fingerprint"] == reader.manifest.weights_fingerprint
    np.testing.assert_array_equal(root["calibration/channel_scale"][:], reader.channel_scale)
    embed = from_stored(root["frozen/embed_tokens"][:], root["frozen/embed_tokens"].attrs.get("dtype_view"))
    assert torch.equal(embed, reader.frozen_embed_tokens())
    if not reader.manifest.tied_embeddings:
        head = from_stored(root["frozen/lm_head"][:], root["frozen/lm_head"].attrs.get("dtype_view"))
        assert torch.equal(head, reader.frozen_lm_head())
    covered: dict[str, Any] = {}
    for index, entry in enumerate(reader.samples):
        name = reader.segment_ids[entry["segment"]]
        group = root[f"segments/{name}"]
        rows = slice(entry["first_row"], entry["first_row"] + entry["length"])
        sample = reader.read(index)
        np.testing.assert_array_equal(group["token_ids"][rows], sample.token_ids)
        np.testing.assert_array_equal(group["loss_mask"][rows], sample.loss_mask)
        np.testing.assert_array_equal(group["features"][rows], sample.features)
        if sample.scales is not None:
            np.testing.assert_array_equal(group["feature_scale"][rows], sample.scales)
        covered.setdefault(name, np.zeros(group["features"].shape[0], bool))[rows] = True
    for name, rows in covered.items():
        assert not root[f"segments/{name}/features"][:][~rows].any()
        assert not root[f"segments/{name}/token_ids"][:][~rows].any()


def test_reader_equals_zarr_in_every_value(maker: Any, tmp_path: Path) -> None:
    assert_equals_zarr(maker.store(tmp_path / "s.zarr"))


@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_segments_of_one_odd_sample_equal_zarr(maker: Any, tmp_path: Path, length: int) -> None:
    path = maker.create(tmp_path / "s.zarr")
    maker.add_segment(path, [0], [length])
    assert_equals_zarr(path)


@pytest.mark.parametrize("encoding_name", ["bf16", "int8"])
def test_untied_store_with_wide_aligned_rows_equals_zarr(with_: Any, tmp_path: Path, encoding_name: str) -> None:
    maker = with_(encoding_name=encoding_name, num_layers=2, hidden_size=256, tied=False)
    assert maker.encoding.align_tokens == 1
    assert_equals_zarr(maker.store(tmp_path / "s.zarr", segments=1))


def test_values_are_those_that_were_appended(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    reader = StoreReader(path)
    assert reader.samples["id"].tolist() == list(range(1000, 1014))
    for number in range(14):
        sample, wanted = reader.read(number), maker.sample(number, ODD_LENGTHS[number % 7])
        assert (sample.id, sample.group) == (wanted["sample_id"], wanted["group"])
        np.testing.assert_array_equal(sample.token_ids, wanted["token_ids"])
        np.testing.assert_array_equal(sample.loss_mask, wanted["loss_mask"])
        np.testing.assert_array_equal(sample.features.view(wanted["features"].dtype), wanted["features"])
        assert reader.samples["supervised"][number] == wanted["loss_mask"].sum()
        assert reader.samples["first_row"][number] % maker.encoding.align_tokens == 0
    assert reader.num_tokens == 2 * sum(ODD_LENGTHS)
    assert reader.quarantined() == [{"id": None, "row": 3, "reason": "no supervised tokens"}]
    assert reader.target_config()["model_type"] == "llama"
    assert (reader.tokenizer_path() / "tokenizer.json").read_bytes() == b'{"version": "1.0"}'


def test_frozen_head_is_the_embedding_when_tied(bf16: Any, with_: Any, tmp_path: Path) -> None:
    tied = StoreReader(bf16.create(tmp_path / "tied.zarr"))
    assert torch.equal(tied.frozen_lm_head(), tied.frozen_embed_tokens())
    untied = StoreReader(with_(tied=False).create(tmp_path / "untied.zarr"))
    assert not torch.equal(untied.frozen_lm_head(), untied.frozen_embed_tokens())


def test_read_into_fills_slices_of_a_row_buffer_from_many_threads(maker: Any, tmp_path: Path) -> None:
    path = maker.store(tmp_path / "s.zarr")
    reader, encoding = StoreReader(path), maker.encoding
    ends = np.cumsum(reader.samples["length"])
    features = np.zeros((ends[-1], encoding.num_columns), "i2" if maker.encoding_name == "bf16" else "i1")
    scales = np.zeros((ends[-1], encoding.num_scales), np.float32) if encoding.num_scales else None
    token_ids, loss_mask = np.zeros(ends[-1], np.int32), np.zeros(ends[-1], np.uint8)

    def fill(indices: Any) -> None:
        for index in indices:
            rows = slice(ends[index] - reader.samples["length"][index], ends[index])
            part = None if scales is None else scales[rows]
            reader.read_into(index, token_ids[rows], loss_mask[rows], features[rows], part)

    threads = [threading.Thread(target=fill, args=(range(start, 14, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [reader.read(index) for index in range(14)]
    np.testing.assert_array_equal(token_ids, np.concatenate([sample.token_ids for sample in wanted]))
    np.testing.assert_array_equal(features.view(wanted[0].features.dtype), np.concatenate([s.features for s in wanted]))


def test_short_reads_are_continued(maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = maker.store(tmp_path / "s.zarr")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:13]], offset))
    assert_equals_zarr(path)


def test_duplicate_ids_keep_the_first(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    first = bf16.add_segment(path, [0, 1, 1])
    bf16.add_segment(path, [1, 2], [40, 41])
    reader = StoreReader(path)
    assert reader.samples["id"].tolist() == [1000, 1001, 1002] and reader.num_duplicates == 2
    assert reader.samples["length"].tolist() == [1, 7, 41]
    assert reader.segment_ids[reader.samples["segment"][1]] == first


def test_samples_stand_in_the_order_of_their_rows_beside_duplicates_too(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    bf16.add_segment(path, [5, 3])
    bf16.add_segment(path, [4, 3, 1])
    samples = StoreReader(path).samples
    assert samples["id"].tolist() == [1005, 1003, 1004, 1001]
    assert samples["segment"].tolist() == [0, 0, 1, 1] and np.diff(samples["first_row"])[[0, 2]].min() > 0


def test_segment_list_fixes_the_order_and_refresh_appends(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    names = [bf16.add_segment(path, [number]) for number in range(3)]
    reader = StoreReader(path, segments=[names[2], names[0]])
    assert reader.segment_ids == [names[2], names[0]] and reader.samples["id"].tolist() == [1002, 1000]
    assert reader.refresh() == 1 and reader.samples["id"].tolist() == [1002, 1000, 1001]
    names.append(bf16.add_segment(path, [3]))
    assert reader.refresh([names[3]]) == 1 and reader.refresh() == 0
    assert reader.samples["id"].tolist() == [1002, 1000, 1001, 1003]
    assert reader.stored_ids() == {1000, 1001, 1002, 1003}
    with pytest.raises(StoreError, match="has no segment gone"):
        StoreReader(path, segments=["gone"])


def num_open() -> Any:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_more_segments_than_may_be_open(bf16: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_train.store.reader.MAX_OPEN_SEGMENTS", 2)
    path = bf16.create(tmp_path / "s.zarr")
    for number in range(5):
        bf16.add_segment(path, [number])
    before = num_open()
    reader = StoreReader(path)
    for index in [0, 1, 2, 3, 4, 0, 3]:
        assert reader.read(index).id == 1000 + index
    assert num_open() - before <= 2 * 3
    del reader
    assert num_open() == before


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damaged_rows_name_sample_and_segment(maker: Any, tmp_path: Path) -> None:
    path = maker.create(tmp_path / "s.zarr")
    name = maker.add_segment(path, [4, 5])
    damage(path / "segments" / name / "features/c/0/0", 3)
    reader = StoreReader(path)
    with pytest.raises(StoreError, match=f"Sample 00000000000003ec in segment {name} .* is damaged: crc32c"):
        reader.read(0)
    assert reader.read(1).id == 1005
    assert StoreReader(path, verify=False).read(0).id == 1004


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_damaged_files_of_the_target_are_not_handed_out(bf16: Any, tmp_path: Path, name: str) -> None:
    reader = StoreReader(bf16.create(tmp_path / "s.zarr"))
    damage(reader.folder / "frozen/target" / name, 3)
    with pytest.raises(StoreError, match=rf"frozen/target/{name} has crc32c .* it is damaged"):
        reader.tokenizer_path()


@pytest.mark.parametrize(
    ("change", "found"),
    [(("float32", "int32"), r"int32 of shape \[24\]"), (("float32", "uint32"), "uint32"), (("24", "23"), r"\[23\]")],
)
def test_a_channel_scale_of_another_kind_is_refused(bf16: Any, tmp_path: Path, change: Any, found: str) -> None:
    """However sound its files are: features would be divided by nonsense."""
    path = bf16.create(tmp_path / "s.zarr")
    name, rows = "calibration/channel_scale/zarr.json", "calibration/channel_scale/c/0"
    (path / name).write_text((path / name).read_text().replace(*change))
    (path / rows).write_bytes((path / rows).read_bytes()[: 92 if change[0] == "24" else None])
    sums = {file: sum_contents([(path / file).read_bytes()]) for file in (name, rows)}
    (path / "checksums.json").write_bytes(format_checksums(read_checksums(path) | sums))
    with pytest.raises(StoreError, match=rf"channel_scale is .*{found}.*, wanted float32 of shape \[24\]"):
        StoreReader(path)


@pytest.mark.parametrize(
    "name",
    [
        "calibration/channel_scale/c/0",
        "calibration/eigenvalues/c/0",
        "frozen/embed_tokens/c/0/0",
        "frozen/target/config.json",
    ],
)
def test_damage_in_a_stores_own_files_is_refused(with_: Any, tmp_path: Path, name: str) -> None:
    path = with_(encoding_name="projected-int8").create(tmp_path / "s.zarr")
    damage(path / name, 5)
    with pytest.raises(StoreError, match=rf"{name} has crc32c .* it is damaged"):
        reader = StoreReader(path)
        _ = reader.calibration, reader.frozen_embed_tokens(), reader.target_config()


def test_a_manifest_that_was_edited_is_refused(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text.replace('"embedding_scale": 1.0', '"embedding_scale": 8.0'))
    with pytest.raises(StoreError, match=r"s\.zarr/zarr\.json has crc32c .* it is damaged"):
        StoreReader(path)


def test_shard_rewritten_by_zarr_in_another_order_is_refused(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    name = bf16.add_segment(path, [6])
    shard = path / "segments" / name / "features/c/0/0"
    data = bytearray(shard.read_bytes())
    index = -(4 + 16 * 16)  # 507 tokens are 16 inner chunks
    data[index : index + 16], data[index + 16 : index + 32] = data[index + 16 : index + 32], data[index : index + 16]
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="is no flat shard"):
        StoreReader(path).read(0)
    shard.write_bytes(data[:-100])
    with pytest.raises(StoreError, match=r"has [\d,]+ bytes, wanted"):
        StoreReader(path).read(0)
    shard.unlink()
    with pytest.raises(StoreError, match="could not be opened: No such file"):
        StoreReader(path).read(0)


def test_other_codecs_are_refused(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    name = bf16.add_segment(path, [4])
    folder = path / "segments" / name
    compressed = zarr.create_array(
        folder / "token_ids", data=np.zeros(33, np.int32), overwrite=True, zarr_format=3, chunks=(33,)
    )
    assert compressed.compressors
    with pytest.raises(StoreError, match="damaged"):
        StoreReader(path)
    with pytest.raises(StoreError, match="describes other chunks or codecs"):
        read_array_info(folder, "token_ids")


@pytest.mark.parametrize(
    ("array", "change"),
    [
        ("features", lambda at: at["codecs"].append({"name": "crc32c"})),
        ("features", lambda at: at["codecs"][0]["configuration"].update(index_location="start")),
        ("features", lambda at: at["codecs"][0]["configuration"].update(chunk_shape=[64, 24])),
        ("features", lambda at: at["codecs"][0]["configuration"].update(chunk_shape=[32, 12])),
        ("features", lambda at: at["codecs"][0]["configuration"]["codecs"][0]["configuration"].update(endian="big")),
        ("features", lambda at: at["codecs"][0]["configuration"]["codecs"].append({"name": "crc32c"})),
        ("features", lambda at: at["codecs"][0]["configuration"]["index_codecs"].pop()),
        ("features", lambda at: at["codecs"][0]["configuration"]["index_codecs"].pop(0)),
        (
            "features",
            lambda at: at["codecs"][0]["configuration"]["index_codecs"][0]["configuration"].update(endian="big"),
        ),
        ("features", lambda at: at["chunk_grid"]["configuration"].update(chunk_shape=[96, 24])),
        ("features", lambda at: at["chunk_grid"]["configuration"].update(chunk_shape=[64, 12])),
        ("token_ids", lambda at: at["chunk_grid"]["configuration"].update(chunk_shape=[32])),
        ("token_ids", lambda at: at["chunk_grid"]["configuration"].update(chunk_shape=[34])),
        ("token_ids", lambda at: at["chunk_grid"].update(name="rectangular")),
        ("token_ids", lambda at: at["chunk_key_encoding"].update(name="v2")),
        ("token_ids", lambda at: at["chunk_key_encoding"]["configuration"].update(separator=".")),
        ("token_ids", lambda at: at["codecs"][0].update(name="packbits")),
        ("token_ids", lambda at: at["codecs"][0]["configuration"].update(endian="big")),
        ("samples", lambda at: at["chunk_grid"]["configuration"].update(chunk_shape=[1, 3])),
    ],
)
def test_metadata_of_another_layout_is_refused(bf16: Any, tmp_path: Path, array: str, change: Any) -> None:
    """It would be valid zarr whose values lie elsewhere, or with other bytes, than this package reads them."""
    path = bf16.create(tmp_path / "s.zarr")
    folder = path / "segments" / bf16.add_segment(path, [4])
    text = folder / array / "zarr.json"
    metadata = json.loads(text.read_text())
    change(metadata)
    text.write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match="describes other chunks or codecs"):
        read_array_info(folder, array)


def test_zarr_metadata_in_its_shorter_spellings_is_read(bf16: Any, tmp_path: Path) -> None:
    """Other zarr v3 writers leave out defaults and spell extension points without configuration as strings."""
    path = bf16.create(tmp_path / "s.zarr")
    name = bf16.add_segment(path, [4])
    text = path / "segments" / name / "features" / "zarr.json"
    metadata = json.loads(text.read_text())
    wanted = read_array_info(text.parent.parent, "features")
    inner = metadata["codecs"][0]["configuration"]
    del inner["index_location"]
    inner["index_codecs"][1] = "crc32c"
    metadata["chunk_key_encoding"] = {"name": "default"}
    text.write_text(json.dumps(metadata))
    assert read_array_info(text.parent.parent, "features") == wanted


def test_half_written_store_is_no_store(bf16: Any, tmp_path: Path) -> None:
    path = bf16.create(tmp_path / "s.zarr")
    (path / "checksums.json").unlink()
    with pytest.raises(StoreError, match=r"checksums\.json could not be read"):
        StoreReader(path)


def test_empty_store_opens(maker: Any, tmp_path: Path) -> None:
    reader = StoreReader(maker.create(tmp_path / "s.zarr"))
    assert len(reader.samples) == 0 and reader.num_tokens == 0 and reader.segment_ids == []
    assert SegmentWriter(reader.folder, reader.encoding, {}).commit() is None
