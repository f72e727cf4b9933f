"""Bytes that say where they belong, so that a misplaced, stale or torn block is seen.

Every chunk of 1 MiB is one random chunk xor a number made of seed and chunk index: two chunks
differ in every word, and so do two seeds.
"""

from __future__ import annotations

import numpy as np

from infinity.sizes import MIB

CHUNK_NBYTES = MIB
_POISON = 0xA5
# Odd, so that multiplication is a bijection: no two (seed, index) share a mask.
_ODD = 0x9E3779B97F4A7C15
_BASE = np.random.default_rng(20).integers(0, 1 << 63, CHUNK_NBYTES // 8, dtype=np.uint64)


def fill(memory: memoryview, *, offset_nbytes: int, seed: int) -> None:
    """Writes what belongs at `offset_nbytes` of a region. Offset: a multiple of 1 MiB."""
    for words, mask in _chunks(memory, offset_nbytes, seed):
        np.bitwise_xor(_BASE[: len(words)], mask, out=words)


def matches(memory: memoryview, *, offset_nbytes: int, seed: int) -> bool:
    """Whether every byte is what `fill` writes."""
    wanted = np.empty_like(_BASE)
    for words, mask in _chunks(memory, offset_nbytes, seed):
        np.bitwise_xor(_BASE[: len(words)], mask, out=wanted[: len(words)])
        if not np.array_equal(words, wanted[: len(words)]):
            return False
    return True


def poison(memory: memoryview) -> None:
    """Overwrites with bytes that no pattern has, so that a read that did nothing is seen."""
    np.frombuffer(memory, dtype=np.uint8)[:] = _POISON


def _chunks(memory: memoryview, offset_nbytes: int, seed: int):
    assert offset_nbytes % CHUNK_NBYTES == 0 and len(memory) % 8 == 0
    words = np.frombuffer(memory, dtype=np.uint64)
    step = CHUNK_NBYTES // 8
    for at in range(0, len(words), step):
        index = offset_nbytes // CHUNK_NBYTES + at // step + 1
        yield words[at : at + step], np.uint64((seed << 32 | index) * _ODD % (1 << 64))
