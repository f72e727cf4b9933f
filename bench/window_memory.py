"""How much device memory does PyTorch's allocator keep for the weights of a window?

    python bench/window_memory.py --save bench/results/window_memory.json

Nothing is measured: the engine's rule of eviction goes through steps of shipped models, and a
model of the allocator gives and takes the memory. Reads ahead take it earlier, in the same order.
Like `c10/cuda/CUDACachingAllocator.cpp` it takes the smallest free block that is large enough,
splits what is left of it, and joins free neighbours. Segments are as large as what is asked for, or
there is one that grows in pages of 20 MiB (`expandable_segments`). The answer is the most memory
that is kept, over the window: 1 is best. The same is asked of one range of memory with the arena's
allocator, where a unit that finds only holes sends others away (`one range`): the bytes that are
fetched then, over those without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments, print_table, save

from infinity.plan import load_model
from infinity.simulate.cache import visits
from infinity.sizes import MIB, align_up

MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
SHARES = (0.05, 0.2, 0.5, 0.8)  # Of the weights beside the least window.
PASSES = 8
ROUNDED_NBYTES = 512
SMALL_NBYTES = MIB  # A smaller rest is not split off.
PAGE_NBYTES = 20 * MIB
SEGMENT_NBYTES = 2 * MIB


@dataclass(slots=True)
class Piece:
    """A part of a segment."""

    nbytes: int
    is_free: bool


class CachingAllocator:
    """The blocks of one stream. `kept_nbytes` never shrinks: nothing else needs the memory."""

    def __init__(self, *, is_expandable: bool) -> None:
        self._is_expandable = is_expandable
        self._segments: list[list[Piece]] = []
        self.kept_nbytes = 0

    def allocate(self, nbytes: int) -> Piece:
        nbytes = align_up(nbytes, ROUNDED_NBYTES)
        free = [
            (piece.nbytes, number, place)
            for number, segment in enumerate(self._segments)
            for place, piece in enumerate(segment)
            if piece.is_free and piece.nbytes >= nbytes
        ]
        _, number, place = min(free) if free else self._grow(nbytes)
        segment, piece = self._segments[number], self._segments[number][place]
        rest_nbytes = piece.nbytes - nbytes
        if rest_nbytes > SMALL_NBYTES:
            segment.insert(place + 1, Piece(rest_nbytes, True))
            piece.nbytes = nbytes
        piece.is_free = False
        return piece

    def _grow(self, nbytes: int) -> tuple[int, int, int]:
        if not self._is_expandable or not self._segments:
            self._segments.append([])
        segment = self._segments[-1]
        if self._is_expandable:
            tail = segment.pop() if segment and segment[-1].is_free else Piece(0, True)
            added_nbytes = align_up(nbytes - tail.nbytes, PAGE_NBYTES)
            segment.append(Piece(tail.nbytes + added_nbytes, True))
        else:
            added_nbytes = max(PAGE_NBYTES, align_up(nbytes, SEGMENT_NBYTES))
            segment.append(Piece(added_nbytes, True))
        self.kept_nbytes += added_nbytes
        return 0, len(self._segments) - 1, len(segment) - 1

    def free(self, freed: Piece) -> None:
        freed.is_free = True
        for segment in self._segments:
            for place, piece in enumerate(segment):
                if piece is freed:
                    _join(segment, place)
                    return


def _join(segment: list[Piece], place: int) -> None:
    for first in (place, place - 1):
        if 0 <= first < len(segment) - 1 and segment[first].is_free and segment[first + 1].is_free:
            segment[first].nbytes += segment.pop(first + 1).nbytes


def kept_nbytes(order: Sequence[int], sizes: Sequence[int], window: int, **how: bool) -> int:
    """The most memory that the allocator has for a window of so many bytes."""
    allocator, there = CachingAllocator(**how), dict[int, Piece]()
    seen = visits(tuple(order), tuple(sizes), window, num_passes=PASSES)
    for visit in seen:
        for gone in visit.evicts:
            allocator.free(there.pop(seen[gone].unit))
        if not visit.is_hit:
            there[visit.unit] = allocator.allocate(sizes[visit.unit])
    return allocator.kept_nbytes


def fetched_nbytes(
    order: Sequence[int], sizes: Sequence[int], window: int, *, is_arena: bool = False
) -> int:
    """The bytes of a pass that are fetched, after the first."""
    seen = visits(tuple(order), tuple(sizes), window, num_passes=PASSES, is_arena=is_arena)[
        len(order) :
    ]
    return sum(sizes[visit.unit] for visit in seen if not visit.is_hit) // (PASSES - 1)


def rows_of(model: str) -> Iterator[dict[str, Any]]:
    sizes = [unit.weight_nbytes for unit in load_model(model, torch.bfloat16).units]
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    least, total = max(sizes) + sorted(sizes)[len(sizes) // 2], sum(sizes)
    for share in SHARES:
        window = int(least + share * (total - least))
        yield {
            "model": model,
            "weights_nbytes": total,
            "largest_nbytes": max(sizes),
            "window_nbytes": window,
            "segments": kept_nbytes(order, sizes, window, is_expandable=False) / window,
            "expandable": kept_nbytes(order, sizes, window, is_expandable=True) / window,
            "one_range_fetched": fetched_nbytes(order, sizes, window, is_arena=True)
            / fetched_nbytes(order, sizes, window),
        }


def main() -> None:
    parser = arguments(__doc__, path=False)
    parser.add_argument("--models", nargs="+", default=MODELS)
    words = parser.parse_args()
    rows = [row for name in words.models for row in rows_of(name)]
    columns: dict[str, Any] = {
        "model": "{model}",
        **{
            title: lambda row, name=name: f"{row[name] / 1e9:.2f}"
            for title, name in {
                "weights GB": "weights_nbytes", "largest": "largest_nbytes",
                "window": "window_nbytes",
            }.items()
        },
        "segments": "{segments:.2f}", "expandable": "{expandable:.2f}",
        "one range": "{one_range_fetched:.2f}",
    }  # fmt: skip
    print_table("", columns, rows)
    save(words.save, words, rows=rows)


if __name__ == "__main__":
    main()
