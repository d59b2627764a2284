"""What is a URL of a store, and that no secret gets through."""

from pathlib import Path

import pytest

from dflash_train.errors import InputError
from dflash_train.store.location import StoreUrl, beside, located, parse_store, scrub


@pytest.mark.parametrize("text", ["store.zarr", "/a/b.zarr", "a:b", "s3:/bucket/store", "C://"[:2] + "x", "~/x"])
def test_paths_stay_paths(text: str) -> None:
    assert parse_store(text) == Path(text)


def test_urls_keep_two_slashes_and_lose_the_last() -> None:
    store = parse_store("S3://bucket/a/b.zarr/")
    assert store == StoreUrl("s3://bucket/a/b.zarr") and str(store) == "s3://bucket/a/b.zarr"
    assert isinstance(store, StoreUrl) and store.name == "b.zarr" and store.container == "s3://bucket"
    assert beside(store) == Path("b.zarr") and beside(Path("x/y")) == Path("x/y")
    assert parse_store("file:///a/b%20c.zarr") == Path("/a/b c.zarr")
    one, two = (located(parse_store(url), Path("cache"), 5) for url in ("s3://a/x", "s3://b/x"))
    assert isinstance(one, StoreUrl) and isinstance(two, StoreUrl)
    assert one.local_folder != two.local_folder and one.local_folder.parent == Path("cache") and one.cache_bytes == 5


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hunter2secret@bucket/s.zarr",
        "s3://hunter2secret@bucket/s.zarr",
        "s3://AKIA123:hunter2secret/with/slashes@bucket/s.zarr",
        "s3://AKIA123:8x/hunter2secret@bucket/s.zarr",
        "https://host/s.zarr?X-Amz-Signature=hunter2secret",
        "abfs://c/s.zarr?sig=hunter2secret",
        "gs://bucket/s.zarr#hunter2secret",
        "file://user:hunter2secret@host/s.zarr",
        "az://user:hunter2secret@host/s.zarr",
        "simplecache::s3://user:hunter2secret@bucket/s.zarr",
    ],
)
def test_secrets_in_a_url_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InputError, match="Leave (them|it) out") as error:
        parse_store(url)
    assert "hunter2secret" not in str(error.value) and "AKIA123" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket", "is no URL of a store. Give protocol, bucket and a name"),
        ("s3:///x", "is no URL of a store"),
        ("s3://bucket/a//b", "is no URL of a store"),
        ("s3://bucket/../b", "is no URL of a store"),
        ("simplecache::s3://bucket/s.zarr", "is a chain. Give its last part alone"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_store(url)


def test_messages_of_backends_lose_their_secrets() -> None:
    text = scrub(
        "failed: https://user:pw1@host/x?X-Amz-Signature=pw2&y=pw3 for key AKIAABCDEFGHIJKLMNOP,\n Authorization: pw4 "
        "token=pw5 password: pw6"
    )
    assert not any(f"pw{n}" in text for n in range(1, 7)) and "AKIA" not in text and "\n" not in text
    assert "https://…@host/x?…" in text
