"""The manifest: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.checkpoint.run.format import (
    SCHEMA,
    FileEntry,
    Manifest,
    StoredRange,
    digest_line,
    manifest_to_bytes,
    parse_manifest,
)
from infinity.errors import CorruptionError, UnsupportedError

printable = st.characters(categories=("L", "N", "S"), exclude_characters="/")
words = names = st.text(printable, min_size=1, max_size=40)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def file_entries(draw, name):
    extents, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        nbytes = draw(st.integers(0, 2**50))
        kind = draw(st.sampled_from(["header", "parameters", "moments"]))
        extents.append(StoredRange(draw(texts), kind, end, nbytes, draw(digests)))
        end += nbytes
    return FileEntry(name, end, tuple(extents))


@st.composite
def manifests(draw):
    file_names = draw(st.lists(names, unique=True, max_size=4))
    files = tuple(draw(file_entries(name)) for name in file_names)
    return Manifest(draw(st.integers(0, 2**39)), draw(words), draw(words), files)


def read(content: bytes) -> Manifest:
    return parse_manifest(content, digest_line(content), path="manifest.json")


@given(manifests())
def test_what_is_written_is_read(manifest):
    assert read(manifest_to_bytes(manifest)) == manifest
    by_kind = manifest.nbytes_by_kind()
    assert sum(by_kind.values()) == manifest.nbytes


@given(manifests(), st.data())
def test_any_changed_byte_is_found(manifest, data):
    """Of the manifest and of its digest, cut-off ends included."""
    content = manifest_to_bytes(manifest)
    digest = digest_line(content)
    whole = content + digest
    place = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(whole)
    changed[place] ^= flip
    with pytest.raises(CorruptionError, match=r"'manifest\.json'.*damaged"):
        parse_manifest(
            bytes(changed[: len(content)]), bytes(changed[len(content) :]), path="manifest.json"
        )
    is_whole = place >= len(content)  # The manifest is, and the digest ends early.
    with pytest.raises(CorruptionError):
        parse_manifest(
            content[:place], digest[: place - len(content)] if is_whole else digest,
            path="manifest.json",
        )  # fmt: skip


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_foreign_json_is_refused_by_name(value):
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        read(json.dumps(value).encode())


@given(manifests(), st.data())
def test_a_manifest_with_something_missing_is_refused(manifest, data):
    body = json.loads(manifest_to_bytes(manifest))
    key = data.draw(st.sampled_from(sorted(body)))
    del body[key]
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        read(json.dumps(body).encode())


def test_a_newer_schema_is_refused_with_the_remedy():
    body = json.loads(manifest_to_bytes(Manifest(1, "", "", ())))
    body["schema"] = SCHEMA + 1
    body["whatever"] = "comes later"
    with pytest.raises(UnsupportedError, match="upgrade"):
        read(json.dumps(body).encode())


def extent(start: int, nbytes: int) -> StoredRange:
    return StoredRange("t", "parameters", start, nbytes, "0" * 64)


FILE = FileEntry("a", 3, (extent(0, 1), extent(1, 2)))


@pytest.mark.parametrize(
    "files",
    [
        (replace(FILE, name="../a"),),
        (replace(FILE, name="/etc/a"),),
        (replace(FILE, nbytes=4),),
        (replace(FILE, extents=(extent(0, 1), extent(2, 1))),),
        (replace(FILE, extents=(extent(0, 4), extent(4, -1))),),
        (FILE, FILE),
        (replace(FILE, name=".."),),
        (replace(FILE, nbytes=2**80, extents=(extent(0, 2**80),)),),
    ],
)
def test_places_that_cannot_be_are_refused(files):
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        read(manifest_to_bytes(Manifest(1, "now", "me", files)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 1e30),
        ("step", -1),
        ("step", True),
        ("step", float("nan")),
        ("schema", -1),
        ("schema", None),
        ("created", "\x1b[2J"),
        ("ranks", "rank-00000"),
        ("ranks", ["..", "a"]),
        ("files", {}),
        ("files", [[[[]]]]),
    ],
)
def test_absurd_values_are_damage(key, value):
    body = json.loads(manifest_to_bytes(Manifest(1, "now", "me", (FILE,)))) | {key: value}
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        read(json.dumps(body).encode())
