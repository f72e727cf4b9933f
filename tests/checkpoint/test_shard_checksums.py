"""Checksums of a frozen base's files do not depend on how many ranks read them, or which parts."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from infinity.checkpoint.run.references import (
    SHARDS_NAME,
    check_reference,
    read_reference,
    reference_to_bytes,
)
from infinity.errors import CorruptionError
from infinity.sizes import KIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.checksums import digest, joined_crc32
from infinity.storage.native_engine import open_engine
from infinity.storage.protocol import Priority
from infinity.storage.shards import RunChecksum, ShardFiles, ShardIdentity, ShardRun

CHUNK_NBYTES = 32 * KIB
NUM_PAGES = 29  # Of the run: it begins and ends within a chunk.
START = 3 * PAGE_NBYTES


def test_a_crc_of_two_ranges_is_joined_from_those_of_each() -> None:
    for first, second in ((0, 0), (5, 0), (0, 9), (1, 1), (100, 4), (4096, 12_288)):
        left, right = random.Random(first).randbytes(first), random.Random(7).randbytes(second)
        joined = joined_crc32(zlib.crc32(left), zlib.crc32(right), second)
        assert joined == zlib.crc32(left + right)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in ("infinity.storage.shards", "infinity.checkpoint.run.references"):
        monkeypatch.setattr(f"{module}.CHUNK_NBYTES", CHUNK_NBYTES)
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(1).randbytes(40 * PAGE_NBYTES))
    return path


class Rank:
    """The shard files of one rank, and the memory that it reads them to."""

    def __init__(self, files: ShardFiles, arena: Arena) -> None:
        self.files, self._arena = files, arena

    def read(self, base: Path, pages: Sequence[int]) -> None:
        """Reads these pages of the run as runs between them: [0, 4, 29] are two."""
        for first, last in pairwise(pages):
            nbytes = (last - first) * PAGE_NBYTES
            run = ShardRun(str(base), START + first * PAGE_NBYTES, nbytes, 0)
            address = self._arena.address
            self.files.read([run], address=address, priority=Priority.STATE, label="w").wait()


@contextmanager
def rank_over(base: Path) -> Iterator[Rank]:
    found = os.stat(base)
    identity = ShardIdentity(str(base), found.st_size, found.st_mtime_ns, found.st_ino, "header")
    with Arena(1 << 20) as arena:
        engine = open_engine("threads", arena=arena)
        files = ShardFiles(engine, [identity], verify=True)
        try:
            yield Rank(files, arena)
        finally:
            files.close()
            engine.close()


def saved_by(
    directory: Path,
    of_ranks: Sequence[tuple[Path, Sequence[int]]],
    *,
    resumed: Path | None = None,
) -> Path:
    """A checkpoint's references of ranks, each of which has read these pages of its file."""
    for number, (base, pages) in enumerate(of_ranks):
        own = directory / f"rank-{number:05d}"
        own.mkdir(parents=True)
        with rank_over(base) as rank:
            if resumed is not None:
                check_reference(resumed, rank.files)
            rank.read(base, pages)
            save(own, rank, number)
    return directory


def save(own: Path, rank: Rank, number: int) -> None:
    content = reference_to_bytes(rank.files, is_first_rank=number == 0)
    (own / SHARDS_NAME).write_bytes(content)


def flip(base: Path, page: int) -> None:
    content = bytearray(base.read_bytes())
    content[START + page * PAGE_NBYTES + 17] ^= 1
    base.write_bytes(content)


@pytest.mark.parametrize("page", [0, 3, 4, 9, 10, 20, 28])
def test_a_rank_alone_compares_its_reads_with_those_of_two(
    base: Path, tmp_path: Path, page: int
) -> None:
    saved = saved_by(tmp_path / "saved", [(base, [0, 10]), (base, [10, NUM_PAGES])])
    with rank_over(base) as rank:
        check_reference(saved, rank.files)
        rank.read(base, [0, NUM_PAGES])
    flip(base, page)
    with rank_over(base) as rank:
        check_reference(saved, rank.files)
        with pytest.raises(CorruptionError, match="or the one that it continues") as caught:
            rank.read(base, [0, NUM_PAGES])
        assert caught.value.path == str(base)
        assert 0 <= START + page * PAGE_NBYTES - caught.value.offset_nbytes < CHUNK_NBYTES


def test_a_read_that_the_checksum_of_its_whole_run_refuses_leaves_no_checksums(base: Path) -> None:
    run = RunChecksum(str(base), START, NUM_PAGES * PAGE_NBYTES, 0)  # As old checkpoints have it.
    with rank_over(base) as rank:
        rank.files.expect([run])
        with pytest.raises(CorruptionError, match="or the one that it continues"):
            rank.read(base, [0, NUM_PAGES])
        assert rank.files.checksums(with_earlier=True) == [
            run
        ]  # A checkpoint that is saved now has no others.


def test_three_ranks_compare_whole_chunks_and_find_the_others_when_they_save(
    base: Path, tmp_path: Path
) -> None:
    saved = saved_by(tmp_path / "saved", [(base, [0, 10]), (base, [10, NUM_PAGES])])
    cuts = [[0, 11], [11, 19], [19, NUM_PAGES]]

    def save_again(name: str) -> Path:
        return saved_by(tmp_path / name, [(base, pages) for pages in cuts], resumed=saved)

    assert read_reference(save_again("same")) is not None
    flip(base, 6)  # In the chunk [5, 13), of which no rank reads all.
    with pytest.raises(CorruptionError, match="ranks have read different bytes") as caught:
        read_reference(save_again("other"))
    assert caught.value.path == str(base)
    flip(base, 6)
    flip(base, 14)  # In the chunk [13, 21), which the second rank reads to page 19.
    flip(base, 2)  # In the first chunk, which the first rank reads.
    with pytest.raises(CorruptionError, match="or the one that it continues"):
        save_again("changed")


def test_after_a_resume_the_first_rank_alone_passes_on_the_checksums_of_the_run_before(
    base: Path, tmp_path: Path
) -> None:
    saved = saved_by(tmp_path / "two", [(base, [0, 10]), (base, [10, NUM_PAGES])])
    cuts = [[0, 11], [11, 19], [19, NUM_PAGES]]

    def rows(directory: Path, number: int) -> set[tuple[int, ...]]:
        content = (directory / f"rank-{number:05d}" / SHARDS_NAME).read_text()
        return {tuple(row) for row in json.loads(content)["files"][0]["checksums"]}

    known = {
        (checksum.offset_nbytes, checksum.nbytes, checksum.crc32c)
        for _, checksums in read_reference(saved) or []
        for checksum in checksums
    }
    alone = saved_by(tmp_path / "three", [(base, pages) for pages in cuts])
    again = saved_by(tmp_path / "again", [(base, pages) for pages in cuts], resumed=saved)
    assert rows(again, 0) == rows(alone, 0) | known
    for number in (1, 2):
        assert rows(again, number) == rows(alone, number) - known
    last = saved_by(tmp_path / "last", [(base, cuts[0])], resumed=again)
    assert rows(last, 0) >= rows(alone, 1) | rows(alone, 2) | known, "also what it has not read"


def test_ranks_that_have_read_different_files_of_one_name_are_refused(
    base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / base.name
    other.parent.mkdir()
    other.write_bytes(base.read_bytes())
    same = saved_by(tmp_path / "same", [(base, [0, 20]), (other, [0, 20])])
    assert read_reference(same) is not None
    flip(other, 12)
    saved = saved_by(tmp_path / "saved", [(base, [0, 20]), (other, [0, 20])])
    with pytest.raises(CorruptionError, match="ranks have read different bytes") as caught:
        read_reference(saved)
    assert str(other) in str(caught.value) and str(base) in str(caught.value)


def test_reads_are_compared_with_a_checkpoint_of_whole_runs(base: Path, tmp_path: Path) -> None:
    """As checkpoints were written before checksums were of chunks."""
    with rank_over(base) as rank:
        rank.read(base, [0, NUM_PAGES])
        table = json.loads(reference_to_bytes(rank.files, is_first_rank=True))
        nbytes = NUM_PAGES * PAGE_NBYTES
        of_run = zlib.crc32(digest(rank._arena.address, nbytes))
    table["files"][0]["checksums"] = [[START, nbytes, of_run]]
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / SHARDS_NAME).write_text(json.dumps(table))
    with rank_over(base) as rank:
        check_reference(saved, rank.files)
        rank.read(base, [0, NUM_PAGES])
    flip(base, 12)
    with rank_over(base) as rank:
        check_reference(saved, rank.files)
        with pytest.raises(CorruptionError, match="or the one that it continues"):
            rank.read(base, [0, NUM_PAGES])


def test_a_checkpoint_with_other_checksums_than_this_run_is_refused(
    base: Path, tmp_path: Path
) -> None:
    saved = saved_by(tmp_path / "saved", [(base, [0, NUM_PAGES]), (base, [0, 10])])
    flip(base, 12)
    with rank_over(base) as rank:
        rank.read(base, [0, NUM_PAGES])
        with pytest.raises(CorruptionError, match="before the checkpoint was loaded"):
            check_reference(saved, rank.files)
