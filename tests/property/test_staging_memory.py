"""The two device memories for stored bytes: bytes that wait to be decoded are never overwritten.

All-gathers pass a memory when the ranks issue them, in any order, which may be long after they were
begun.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infinity.streaming.weights.decoding import WeightDecoding

NUM_UNITS = 6


def make() -> tuple[Any, list[Any]]:
    units = [
        SimpleNamespace(index=n, stored=SimpleNamespace(nbytes=64), weight_places=lambda: ())
        for n in range(NUM_UNITS)
    ]
    device = SimpleNamespace(
        shares_host_memory=False, torch_device="cpu", prepare_decoding=lambda nbytes, count: None
    )
    store: Any = SimpleNamespace(units=units)
    nothing: Any = None
    decoding: Any = WeightDecoding(store, nothing, device, nothing, nothing)  # type: ignore[arg-type]
    decoding.prepare(0, has_second_memory=True)
    region = SimpleNamespace(content=None)
    return decoding, [SimpleNamespace(unit=unit, region=region) for unit in units]


MOVES = st.tuples(
    st.sampled_from(["begin", "end", "stage", "attach", "fill"]), st.integers(0, NUM_UNITS - 1)
)


@given(st.lists(MOVES, max_size=40))
def test_no_all_gather_has_yet_to_pass_the_memory_of_staged_bytes(
    moves: list[tuple[str, int]],
) -> None:
    """begin, end: an all-gather into a unit's region. stage, attach: its bytes come and are decoded
    later. fill: they come from the host and are decoded at once."""
    decoding, weights = make()
    passing: dict[int, int] = {}
    staged: tuple[int, int] | None = None  # Unit and memory.
    for move, unit in moves:
        if unit in passing and move == "end":
            decoding.end_pass(weights[unit])
            del passing[unit]
        elif unit in passing:
            continue
        elif move == "stage" and staged is None and decoding.can_stage(weights[unit].unit):
            staged = unit, decoding.lend_staging(weights[unit])
        elif move == "attach" and staged is not None:
            assert decoding.on_device(weights[staged[0]]).memory == staged[1]
            decoding.free_staging()
            staged = None
        elif move in ("begin", "fill") and (staged is None or staged[0] != unit):
            memory = decoding.on_device(weights[unit]).memory
            assert staged is None or memory != staged[1]
            if move == "begin":
                decoding.begin_pass(weights[unit], memory)
                passing[unit] = memory
        assert staged is None or staged[1] not in passing.values()


def test_bytes_are_staged_where_nothing_has_yet_to_pass() -> None:
    decoding, weights = make()
    for unit in (0, 1):
        decoding.begin_pass(weights[unit], decoding.on_device(weights[unit]).memory)
    assert not decoding.can_stage(weights[2].unit)
    decoding.end_pass(weights[1])
    assert decoding.can_stage(weights[2].unit)
