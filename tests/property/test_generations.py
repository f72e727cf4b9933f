"""Generation maps against a table with one entry per page, under any order of writes and commits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from infinity.storage.generations import GenerationMap, GenerationRun, choose_targets

SIZE = 24

ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda pair: (pair[0], min(pair[1], SIZE - pair[0]))
)
puts = st.lists(st.tuples(ranges, st.integers(0, 3)), max_size=30)


def expand(runs: list[GenerationRun]) -> list[int]:
    return [run.generation for run in runs for _ in range(run.nbytes)]


@given(puts, ranges)
def test_a_map_is_a_table(puts, asked):
    table, found = [0] * SIZE, GenerationMap()
    for (start, nbytes), generation in puts:
        before = found.copy()
        expected_before = table.copy()
        table[start : start + nbytes] = [generation] * nbytes
        found.put(GenerationRun(generation, start, nbytes))
        assert expand(before.of(0, SIZE)) == expected_before, "a copy changed"
    assert expand(found.of(0, SIZE)) == table
    assert [found.at(offset) for offset in range(SIZE)] == table
    assert found.at(SIZE + 5) == 0
    start, nbytes = asked
    runs = found.of(start, nbytes)
    assert expand(runs) == table[start : start + nbytes]
    assert all(a.generation != b.generation and a.end_nbytes == b.offset_nbytes
               for a, b in pairwise(runs))  # fmt: skip
    changes = sum(a != b for a, b in zip([*table, 0], [*table[1:], 0], strict=False))
    assert len(found) <= 1 + changes, "neighbours of one generation are one interval"


steps = st.lists(
    st.one_of(ranges, st.just("commit"), st.integers(0, 2).map(lambda which: ("drop", which))),
    max_size=60,
)


@given(steps, st.integers(1, 3))
def test_what_a_commit_points_to_is_never_written_and_a_generation_is_always_free(steps, keep):
    """Files as tables of write numbers: a frozen map always reads what it read when it was frozen,
    the current map reads what was written last, with one generation more than frozen maps."""
    files = [[0] * SIZE for _ in range(keep + 1)]
    current, expected = GenerationMap(), [0] * SIZE
    frozen: list[tuple[GenerationMap, list[int]]] = []
    for number, step in enumerate(steps, 1):
        if step == "commit":
            frozen.append((current.copy(), expected.copy()))
            del frozen[:-keep]
        elif step[0] == "drop":
            del frozen[step[1] : step[1] + 1]
        else:
            start, nbytes = step
            runs = choose_targets(
                current,
                [each for each, _ in frozen],
                offset_nbytes=start,
                nbytes=nbytes,
                num_generations=len(files),
            )
            assert runs is not None, "n + 1 generations are enough for n commits"
            assert (runs[0].offset_nbytes, runs[-1].end_nbytes) == (start, start + nbytes)
            for run in runs:
                for at in range(run.offset_nbytes, run.end_nbytes):
                    files[run.generation][at] = number
                current.put(run)
            expected[start : start + nbytes] = [number] * nbytes
        for each, content in [*frozen, (current, expected)]:
            assert [files[each.at(at)][at] for at in range(SIZE)] == content


def test_without_commits_everything_is_written_in_place():
    current = GenerationMap()
    current.put(GenerationRun(1, 4, 4))
    where = {"offset_nbytes": 0, "nbytes": 12, "num_generations": 1}
    assert choose_targets(current, [], **where) == [
        GenerationRun(0, 0, 4),
        GenerationRun(1, 4, 4),
        GenerationRun(0, 8, 4),
    ]


def test_no_generation_is_left():
    frozen = [GenerationMap()]
    where = {"offset_nbytes": 0, "nbytes": 12, "num_generations": 1}
    assert choose_targets(GenerationMap(), frozen, **where) is None
