"""Every section, small: results come, bytes are right, nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from infinity.errors import ConfigError
from infinity.observe import Counters
from infinity.sizes import MIB
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.host import HostPool
from infinity.tools.bench import fio, memory, nvme, suite
from infinity.tools.bench.measure import Lab
from infinity.tools.bench.report import rows_of
from tests.bench.conftest import all_equal


def simulated(lab: Lab, kind: type[SimulatedDevice] = SimulatedDevice) -> SimulatedDevice:
    counters = Counters()
    device = kind(0, delay_s=0.001)
    device.open(HostPool(lab.arena, counters), counters)
    return device


def test_sections_run_in_their_own_order() -> None:
    assert suite.check_sections(["sweep", "read"], quick=False) == ("read", "sweep")
    assert suite.check_sections([], quick=False) == suite.SECTIONS
    assert suite.check_sections([], quick=True) == suite.QUICK_SECTIONS
    assert suite.check_sections(["sweep"], quick=True) == ("sweep",)


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--only reed: expected some of read, write"):
        suite.check_sections(["reed"], quick=False)


def test_drive_sections(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    results = list(suite.run(lab, ("read", "write", "mixed", "sweep", "latency")))
    assert all_equal(results)
    sections = [result.section for result in results]
    sweeps = [f"sweep {kind}" for kind in nvme.KINDS for _ in lab.effort.extents_nbytes]
    assert sections == ["nvme read", "nvme write", "nvme mixed", *sweeps, *["latency"] * 3]
    assert list(lab.directories[0].iterdir()) == []


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_fio_is_searched_once_per_kind_and_then_a_ceiling(make_lab: Callable[..., Lab]) -> None:
    results = list(suite.run(make_lab(with_fio=True), ("read", "sweep")))
    assert all_equal(results)
    searches = [each.labels["operation"] for each in results if "fio" in each.section]
    assert sorted(searches) == ["mixed", "read", "write"]
    for row in rows_of(results):
        if row.section != "fio search":
            assert any(ceiling.name.startswith("fio") for ceiling in row.ceilings)


def test_stripes_grow_path_by_path(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    results = list(suite.run(lab, ("stripes",)))
    assert all_equal(results)
    counts = [result.labels["num_paths"] for result in results]
    assert counts == [1, 1, 1, 2, 2, 2]
    # Two directories of one drive are no scaling, and the result says so.
    assert all("share a drive" in result.note for result in results)
    alone = replace(lab, directories=lab.directories[:1], weights=lab.weights[:1])
    assert list(suite.run(alone, ("stripes",))) == []


def test_reports_of_buffered_files_name_the_page_cache(
    make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.tools.bench.scratch._takes_direct", lambda _: False)
    (result,) = suite.run(make_lab(), ("read",))
    assert "page cache" in result.note


def test_host_sections(make_lab: Callable[..., Lab]) -> None:
    results = list(suite.run(make_lab(), ("host", "optimizer")))
    assert [result.section for result in results] == ["host copy", "optimizer"]
    assert all_equal(results)


def test_a_wrong_update_is_seen(
    make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory.step_

    def slightly_off(spans, *rest) -> None:
        real(spans, *rest)
        spans[0].weight[-1].mul_(1.0001)

    monkeypatch.setattr(memory, "step_", slightly_off)
    assert memory.optimizer_pass(make_lab().arena).run().ok is False


def test_device_copies_and_the_way_from_the_drive(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    there = simulated(lab)
    results = list(memory.device_copies(lab, there))
    with nvme.open_drives(lab, lab.directories) as drives:
        results += memory.pipeline(drives, there, 4 * MIB)
    assert all_equal(results)
    directions = [result.labels["operation"] for result in results]
    assert directions == ["in", "out", "both", "read"]


@pytest.mark.parametrize("direction", ["in", "out", "both"])
def test_a_copy_that_did_not_happen_is_seen(make_lab: Callable[..., Lab], direction: str) -> None:
    class Lazy(SimulatedDevice):
        """Loses what goes one way, once the clock runs."""

        def copy(self, source: torch.Tensor, target: torch.Tensor):
            self.calls = getattr(self, "calls", 0) + 1
            is_timed = self.calls == (1 if direction == "in" else 2)
            return super().copy(source, target.clone() if is_timed else target)

    lab = make_lab()
    contender = memory.arena_to_device(simulated(lab, Lazy), lab.arena, direction, 16 * MIB)
    assert contender.run().ok is False
