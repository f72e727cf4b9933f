"""Process groups: of the devices, of the program, and what becomes of them; ranks on machines that
differ by more than their names."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.distributed import group
from infinity.distributed.collective import process_groups
from infinity.distributed.collective.process_groups import DeviceGroups
from infinity.distributed.group import RankTopology
from infinity.distributed.wire import addresses
from infinity.errors import ConfigError
from infinity.testing import SimulatedDevice

from .processes import run_ranks
from .work import Case, assert_same_run, build, expected, offload_case, train, train_model

BETWEEN = Case(3, simulated=True, exchange="collective", steps=2)


def _one_after_the_other(rank: int) -> list[tuple[Any, int]]:
    """Three engines, and after each one the number of device groups that were left."""
    left, leave = [0], DeviceGroups.leave

    def counted(groups: DeviceGroups) -> None:
        left[0] += 1
        leave(groups)

    DeviceGroups.leave = counted  # type: ignore[method-assign]
    return [(train(rank, BETWEEN), left[0]) for _ in range(3)]


def test_each_engine_has_a_group_of_devices_and_leaves_it() -> None:
    """Groups of the same ranks do not meet at addresses of an earlier one."""
    wanted = expected(BETWEEN, 3)
    for rank, runs in enumerate(run_ranks(3, _one_after_the_other)):
        assert [num_left for _, num_left in runs] == [1, 2, 3]
        for found, _ in runs:
            assert_same_run(found, wanted[rank], f"rank {rank}")


def _reversed(rank: int) -> tuple[int, Any]:
    """A group whose order is not that of the job: parts are in the order of the group."""
    ranks = [2, 0, 1]
    own = dist.new_group(ranks, sort_ranks=False)
    model = infinity.offload(build(BETWEEN), _config(), device=SimulatedDevice(7), group=own)
    place = dist.get_rank(own)
    run = train_model(model, place, BETWEEN)
    infinity.engine_of(model).close()
    return place, run


def _config() -> dict[str, Any]:
    return {
        "distributed": {"exchange": "collective"},
        "tiers": {"host": {"capacity": "48MiB", "huge_pages": False}, "device": {"kind": "cpu"}},
        "placement": dict.fromkeys(("parameters", "master", "moments"), "host"),
    }


def test_parts_are_in_the_order_of_the_callers_group() -> None:
    wanted = expected(BETWEEN, 3)
    for rank, (place, found) in enumerate(run_ranks(3, _reversed)):
        assert place == [2, 0, 1].index(rank)
        assert_same_run(found, wanted[place], f"rank {rank}")


def _after_groups_of_some(rank: int) -> Any:
    """Ranks 0 and 1 are in one more group when all three make the groups of the devices."""
    dist.new_group([0, 1])
    return train(rank, BETWEEN)


def test_ranks_in_unequally_many_groups_find_each_other() -> None:
    wanted = expected(BETWEEN, 3)
    for rank, found in enumerate(run_ranks(3, _after_groups_of_some)):
        assert_same_run(found, wanted[rank], f"rank {rank}")


def _on_some_ranks(rank: int) -> Any:
    """Ranks 0 and 1 offload a model, and rank 1 is in one more group than rank 0."""
    both, _ = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 2:
        return None
    try:
        infinity.offload(build(BETWEEN), _config(), device=SimulatedDevice(7), group=both)
    except ConfigError as error:
        return str(error)


def test_ranks_of_a_part_of_the_job_that_would_not_find_each_other_are_refused() -> None:
    for found in run_ranks(3, _on_some_ranks)[:2]:
        assert "rank 0 is in 2 process groups and rank 1 in 3" in found


def _some_ranks(rank: int) -> Any:
    both = dist.new_group([2, 0], sort_ranks=False)
    if rank == 1:
        return None
    model = infinity.offload(build(BETWEEN), _config(), device=SimulatedDevice(7), group=both)
    run = train_model(model, dist.get_rank(both), BETWEEN)
    infinity.engine_of(model).close()
    return run


def test_a_part_of_the_job_has_groups_of_its_own() -> None:
    second, _, first = run_ranks(3, _some_ranks)
    for rank, found in enumerate((first, second)):
        assert_same_run(found, expected(BETWEEN, 2)[rank], f"rank {rank}")


def _destroy_first(rank: int, exchange: str) -> dict[str, Tensor]:
    """The program destroys its groups, and then closes the engine."""
    case = replace(BETWEEN, simulated=exchange == "collective", exchange=exchange)
    model = offload_case(case, Path())
    run = train_model(model, rank, case)
    dist.destroy_process_group()
    infinity.engine_of(model).close()
    return run.weights


@pytest.mark.parametrize("exchange", ["collective", "one_sided"])
def test_an_engine_is_closed_after_the_program_has_destroyed_all_groups(exchange: str) -> None:
    first, second = run_ranks(2, _destroy_first, exchange)
    assert first.keys() == second.keys()


def _two_machines(rank: int, interface: str | None) -> Any:
    """Each rank is on a machine of its own: of one name, but booted on its own."""
    os.environ["MASTER_ADDR"] = "localhost"
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    own = replace(addresses.this_machine(), boot=f"boot {rank}")
    group.this_machine = lambda: own  # type: ignore[assignment]
    case = Case(3, steps=2, capacity="24MiB")  # Of a machine, not shared.
    try:
        return train(rank, case)
    except ConfigError as error:
        return str(error)


def test_machines_of_one_name_reach_each_other_by_the_named_interface() -> None:
    for rank, found in enumerate(run_ranks(2, _two_machines, "lo")):
        assert_same_run(found, expected(Case(3, steps=2), 2)[rank], f"rank {rank}")


def test_machines_without_an_address_for_others_are_refused_on_all_ranks() -> None:
    for found in run_ranks(2, _two_machines, None):
        assert "rank 0 on" in found and "loopback address" in found
    for found in run_ranks(2, _two_machines, "nothing0"):
        assert "GLOO_SOCKET_IFNAME=nothing0 names no interface" in found


# -- NCCL, as far as it can be looked at without one ---------------------------------------------


def _topology(count: int) -> RankTopology:
    return RankTopology(None, 0, count, 0, 4, 0, count, ())


def test_a_group_that_all_ranks_of_the_job_would_have_to_make_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = SimpleNamespace(bound_device_id="cuda:0")
    monkeypatch.setattr(process_groups.dist, "group", SimpleNamespace(WORLD=bound))
    process_groups._refuse_split(_topology(4))
    with pytest.raises(ConfigError, match="leave device_id out"):
        process_groups._refuse_split(_topology(2))
    bound.bound_device_id = None
    process_groups._refuse_split(_topology(2))


def test_what_makes_each_operation_wait_for_all_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_groups.refuse_blocking_calls()
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with pytest.raises(ConfigError, match="set it to INFO"):
            process_groups.refuse_blocking_calls()
    finally:
        dist.set_debug_level(level)
    for name in process_groups._BLOCKING:
        for value, is_refused in (("1", True), ("TRUE", True), ("0", False), ("", False)):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                with pytest.raises(ConfigError, match=name) if is_refused else nullcontext():
                    process_groups.refuse_blocking_calls()
    monkeypatch.setattr(process_groups, "use_torchcomms_enabled", lambda: True)
    with pytest.raises(ConfigError, match="TORCH_DISTRIBUTED_USE_TORCHCOMMS"):
        process_groups.refuse_blocking_calls()


def test_groups_of_nccl_share_a_device_with_the_programs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 of four on two nodes."""
    made: list[tuple[list[int], dict[str, Any]]] = []

    def new_group(ranks: list[int], **words: Any) -> Any:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        made.append((ranks, words))
        return ranks

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: "nccl")
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda made: 2 if made is None else made.index(2))
    topology: Any = SimpleNamespace(
        process_group=None, count=4, job_count=4, nodes=((0, 1), (2, 3))
    )
    groups = process_groups.device_groups(topology, torch.device("cuda"), over_nodes=True)
    assert [ranks for ranks, _ in made] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3]]
    assert groups.node_gathers == [2, 3]
    for _, words in made:
        assert words["backend"] == "nccl" and words["pg_options"].config.max_ctas == 16
        assert words["pg_options"]._timeout == words["timeout"]
        assert not words["use_local_synchronization"], "names that ranks count unlike"


@pytest.mark.parametrize("before", [None, "1"], ids=["unset", "as torchrun sets it"])
def test_the_watchdog_of_the_groups_ends_no_process(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with process_groups._watchdog_that_ends_no_process():
        assert os.environ[name] == "2"
    assert os.environ.get(name) == before


class Stuck:
    """A group whose abort does not end, and whose shutdown waits for it, as NCCL's."""

    def __init__(self) -> None:
        self.is_shut_down, self.end = False, threading.Event()

    def abort(self) -> None:
        self.end.wait()

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.end.wait()


def test_groups_whose_abort_has_not_ended_are_left_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "_ABORT_S", 0.1)
    monkeypatch.setattr(process_groups.dist, "get_backend", lambda group: "nccl")
    stuck = Stuck()
    groups = DeviceGroups(stuck, None)
    groups.abort()
    groups.abort()
    leaving = threading.Thread(target=groups.leave, daemon=True)
    leaving.start()
    leaving.join(5)
    assert not leaving.is_alive() and not stuck.is_shut_down
    stuck.end.set()
    other = Stuck()
    other.end.set()
    DeviceGroups(other, None).leave()
    assert other.is_shut_down
