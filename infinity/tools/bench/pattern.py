"""Bytes that say where they belong, so that a misplaced, stale or torn block is seen.

Every chunk of 1 MiB is one random chunk xor a number made of seed and chunk index: two chunks
differ in every word, and so do two seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from infinity.sizes import MIB

CHUNK_NBYTES = MIB
_POISON = 0xA5
# Odd, so that multiplication is a bijection: no two (seed, index) share a mask.
_Words = NDArray[np.uint64]
_ODD = 0x9E3779B97F4A7C15
_BASE = np.random.default_rng(20).integers(0, 1 << 63, CHUNK_NBYTES // 8, dtype=np.uint64)


def fill(memory: memoryview, *, offset_nbytes: int, seed: int) -> None:
    """Writes what belongs at `offset_nbytes` of a region. Offset and length: multiples of 8."""
    for words, base, mask in _chunks(memory, offset_nbytes, seed):
        np.bitwise_xor(base, mask, out=words)


def matches(memory: memoryview, *, offset_nbytes: int, seed: int) -> bool:
    """Returns True if every byte is the one that `fill` writes."""
    wanted = np.empty_like(_BASE)
    for words, base, mask in _chunks(memory, offset_nbytes, seed):
        np.bitwise_xor(base, mask, out=wanted[: len(words)])
        if not np.array_equal(words, wanted[: len(words)]):
            return False
    return True


def poison(memory: memoryview) -> None:
    """Overwrites with bytes that no pattern has, so that a read that did nothing is seen."""
    np.frombuffer(memory, dtype=np.uint8)[:] = _POISON


def _chunks(
    memory: memoryview, offset_nbytes: int, seed: int
) -> Iterator[tuple[_Words, _Words, np.uint64]]:
    """The words of each chunk that `memory` lies in, the part of the base, and its mask."""
    assert offset_nbytes % 8 == 0 and len(memory) % 8 == 0
    words = np.frombuffer(memory, dtype=np.uint64)
    first = offset_nbytes // 8  # word of the region
    per_chunk = CHUNK_NBYTES // 8
    at = 0
    while at < len(words):
        index, inside = divmod(first + at, per_chunk)
        count = min(per_chunk - inside, len(words) - at)
        mask = np.uint64((seed << 32 | index + 1) * _ODD % (1 << 64))
        yield words[at : at + count], _BASE[inside : inside + count], mask
        at += count
