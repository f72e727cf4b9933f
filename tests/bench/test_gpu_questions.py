"""Questions of bench/gpu.py and bench/gpu_ranks.py, small and without a GPU: they run and answer.

Trainer and a process for each rank take a quarter of a minute to start, so they do not run here:
`python bench/gpu.py --small --only trainer` and `python bench/gpu_ranks.py --small` do that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from infinity.sizes import GIB, MIB

BENCH = Path(__file__).resolve().parents[2] / "bench"
WORDS = SimpleNamespace(small=True, host="85%")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def asked(question: Any, scratch: Path, **changed: Any) -> Any:
    """What a question answers; the answer must be fit for the JSON file."""
    from gpu_common import SMALL  # type: ignore[import-not-found]

    sizes = dataclasses.replace(SMALL, rounds=1, tokens=(32,), micro_batch_tokens=64, **changed)
    found = question(sizes, WORDS, scratch, CPU, {}, Console(quiet=True))
    return json.loads(json.dumps(found))


def test_arenas_are_registered_in_each_way(tmp_path: Path) -> None:
    from gpu_pinning import pinning  # type: ignore[import-not-found]

    found = asked(pinning, tmp_path)
    names = {(row["nbytes"], row["name"]) for row in found["rows"]}
    assert names == {
        (16 * MIB, "huge pages, 1 registration"),
        (16 * MIB, "4 KiB pages, 1 registration"),
        (16 * MIB, "shared, 1 registration"),
        (64 * MIB, "huge pages, 2 registrations"),
        (64 * MIB, "huge pages, 1 registration"),
    }
    assert all(row["register_s"] >= 0 and "refused" not in row for row in found["rows"])
    [copied] = [row["pageable"] for row in found["rows"] if "pageable" in row]
    assert all(0 < copied[way]["issue_s"] <= copied[way]["s"] for way in ("in", "out"))


def test_arenas_are_as_large_as_the_host_allows() -> None:
    from gpu_common import FULL
    from gpu_pinning import cases

    def sizes(free_nbytes: int) -> set[int]:
        return {case.nbytes // GIB for case in cases(FULL, free_nbytes)}

    assert sizes(1000 * GIB) == {64, 256, 600}
    assert sizes(128 * GIB) == {64, 108}
    assert sizes(40 * GIB) == {34}


def test_clipping_has_a_step_with_and_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_clipping  # type: ignore[import-not-found]

    monkeypatch.setattr(gpu_clipping, "_TURNS", 1)
    found = asked(gpu_clipping.clipping, tmp_path)
    assert found.keys() == {"host", "moments on device", "device", "in memory"}
    rows = [row for rows in found.values() for row in rows]
    assert all(row["on_s"] > 0 and row["off_s"] > 0 and row["norm"] > 0 for row in rows)
    assert [row["norm"] for row in found["host"]] == [row["norm"] for row in found["device"]]


def test_decoding_has_a_row_for_each_format(tmp_path: Path) -> None:
    import gpu_decoding  # type: ignore[import-not-found]

    found = asked(gpu_decoding.decoding, tmp_path)
    assert [row["name"] for row in found] == ["copy", *gpu_decoding.FORMATS]
    assert all(row["share"] > 0 for row in found)


def test_ranks_are_started_in_each_way_and_one_dies_at_the_end() -> None:
    import gpu_ranks  # type: ignore[import-not-found]

    words = argparse.Namespace(ranks=8, threads=["unset", "1", "12"], small=False)
    found = gpu_ranks.launches(words)
    assert [launch.count for launch in found] == [1, 8, 8, 8, 8, 8]
    assert [launch.threads for launch in found[1:4]] == ["unset", "1", "12"]
    assert [launch.binding for launch in found[4:]] == ["none", "torchrun"]
    assert [launch.dies for launch in found] == [False] * 5 + [True]


def test_who_names_the_dead_rank_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_ranks

    rank = {
        "rank": 0, "steps_s": [1.0, 3.0, 2.0], "per_step": dict.fromkeys(
            gpu_ranks.COUNTED + gpu_ranks.WAITED, 0.0
        ),
        "binding": {
            "torch_threads": 1, "engine_threads": 6, "cores": [0, 1, 2, 8], "nodes": [0],
            "memory_nbytes": {"0": 2 << 30},
        },
        "death": {
            "victim": 3, "error": "RankError: rank 3 is gone", "rank": 3, "named_s": 1.25,
            "terminated_s": 0.5,
        },
    }  # fmt: skip
    unaware = rank | {"rank": 1, "death": rank["death"] | {"error": None}}
    silent = {name: value for name, value in rank.items() if name != "death"} | {"rank": 2}
    run = {"name": "4 ranks", "count": 4, "dies": True, "ranks": [rank, unaware, silent]}
    gpu_ranks.show(run, run)
    text = capsys.readouterr().out
    assert "2.000 s a step, 1.00 of one rank" in text and "0-2,8; [0]; 0: 2.0 GiB" in text
    assert "rank 0, 1.25 s after rank 3 was killed, names it" in text and "after 0.50 s" in text
    assert "rank 1 did NOT notice" in text and "rank 2 ended, and said nothing" in text
