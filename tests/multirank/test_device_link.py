"""Bytes over the link between a rank's host and its device in a step of stages 1 and 2, where every
rank keeps all weights on its device and updates 1/N of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

import infinity
from infinity.distributed.collective.exchange import DeviceExchange
from infinity.distributed.step import DistributedUpdater
from infinity.errors import InfinityError, RankError
from infinity.sizes import PAGE_NBYTES
from infinity.state.partition import Partition
from infinity.state.units import StateKind
from infinity.storage.protocol import Transfer
from infinity.streaming.updates import chunk_update
from infinity.streaming.updates.record import StepRecord
from infinity.testing import SimulatedDevice
from infinity.testing.simulated_device import UnorderedAccess
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers

from .models import WideBlocks, batch, loss_of
from .processes import run_ranks
from .work import LR, NVME, read_weights

LINK = ("device_in_nbytes", "device_out_nbytes")
ON_HOST = {"parameters": "device", "master": "host", "moments": "host", "gradients": "host"}
STATES = {
    "host": ON_HOST,
    "nvme": ON_HOST | {"master": "nvme", "moments": "nvme"},
    "device": dict.fromkeys(NVME, "device"),
}
CHANGED = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Way:
    """One way to keep and exchange state. `state`: the place of the optimizer's, by `STATES`."""

    stage: int
    exchange: str = "one_sided"
    state: str = "host"
    update_on: str = "host"
    dtype: torch.dtype = torch.bfloat16

    @property
    def has_full_master(self) -> bool:
        return self.dtype is torch.float16


@dataclass
class Run:
    """`moved`: bytes to the device and from it in the last update of a rank, with the exchange
    behind it. `expected`: these bytes, without the pages that a part shares with others."""

    weights: dict[str, Tensor]
    moved: tuple[float, float]
    expected: tuple[int, int]


def offloaded(way: Way, directory: Path) -> Any:
    torch.manual_seed(0)
    config: Mapping[str, Any] = {
        "distributed": {"zero_stage": way.stage, "exchange": way.exchange},
        "tiers": small_tiers(directory, "128MiB"),
        "placement": STATES[way.state],
        "precision": {"compute": "auto"},
        "schedule": {"update_on": way.update_on},
    }
    model = WideBlocks().to(way.dtype)
    return infinity.offload(model, config, device=SimulatedDevice(5, delay_s=1e-4))


@contextmanager
def counting_updates(engine: Any) -> Iterator[list[list[float]]]:
    """Yields what each update adds to the counters of `LINK`."""
    counted: list[list[float]] = []
    apply = DistributedUpdater.apply

    def counting(updater: DistributedUpdater, record: StepRecord) -> None:
        before = engine.counters.snapshot()
        apply(updater, record)
        after = engine.counters.snapshot()
        counted.append([after.get(name, 0) - before.get(name, 0) for name in LINK])

    with mock.patch.object(DistributedUpdater, "apply", counting):
        yield counted


def expected_nbytes(way: Way, partition: Partition) -> tuple[int, int]:
    """The bytes that have to pass the link, in each direction."""
    own_nbytes = sum(len(partition.own_part(unit.index)) for unit in partition.full_units)
    all_nbytes = sum(unit.trainable_nbytes for unit in partition.full_units)
    inward_nbytes = outward_nbytes = 0
    are_in_place = way.update_on == "device" and (not way.has_full_master or way.state == "device")
    if not are_in_place:
        inward_nbytes += own_nbytes
        outward_nbytes += 0 if way.has_full_master else own_nbytes
    if way.exchange == "one_sided":
        inward_nbytes += all_nbytes - own_nbytes
        outward_nbytes += (partition.count - 1) * own_nbytes
    if (way.state == "device") != (way.update_on == "device"):
        changed_nbytes, gradient_nbytes = state_nbytes(way, partition)
        to_update, from_update = changed_nbytes + gradient_nbytes, changed_nbytes
        is_inward = way.update_on == "device"
        inward_nbytes += to_update if is_inward else from_update
        outward_nbytes += from_update if is_inward else to_update
    return inward_nbytes, outward_nbytes


def state_nbytes(way: Way, partition: Partition) -> tuple[int, int]:
    """The bytes of this rank's state that a step changes, and of its gradients."""
    changed_nbytes = gradient_nbytes = 0
    for shard in partition.local:
        # The host is given chunks, the device the tensors in them.
        numel = sum(share.part.numel for share in shard.shares)
        if way.update_on == "host":
            numel = shard.unit.state_numel
        if numel:
            changed_nbytes += sum(shard.unit.nbytes(kind, numel) for kind in CHANGED)
            gradient_nbytes += shard.unit.nbytes(StateKind.GRADIENTS, numel)
    return changed_nbytes, gradient_nbytes


def train(rank: int, ways: list[Way]) -> list[Run]:
    found = []
    for way in ways:
        model = offloaded(way, Path(tempfile.gettempdir(), "swap"))
        engine = infinity.engine_of(model)
        optimizer = infinity.AdamW(model, lr=LR)
        with counting_updates(engine) as counted:
            for step in range(2):
                x = batch(10 * step + rank, WideBlocks.width).to(way.dtype)
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        expected = expected_nbytes(way, engine.store.partition)  # type: ignore[attr-defined]
        inward_nbytes, outward_nbytes = counted[-1]
        found.append(Run(read_weights(model), (inward_nbytes, outward_nbytes), expected))
        engine.close()
    return found


WAYS = [
    Way(stage, exchange, state, update_on, dtype)
    for stage, exchange, state, update_on, dtype in [
        (1, "one_sided", "host", "host", torch.bfloat16),
        (2, "one_sided", "host", "host", torch.float16),
        (1, "one_sided", "nvme", "device", torch.bfloat16),
        (2, "one_sided", "device", "host", torch.bfloat16),
        (1, "one_sided", "device", "device", torch.float16),
        (2, "collective", "host", "host", torch.bfloat16),
        (1, "collective", "nvme", "host", torch.float16),
        (2, "collective", "nvme", "device", torch.float16),
        (1, "collective", "device", "host", torch.float32),
        (2, "collective", "device", "device", torch.bfloat16),
        (1, "collective", "device", "device", torch.float16),
    ]
]


# Two and three ranks each take a part of the ways, in which each stage, exchange, place of state and
# device of updates occurs; `make exhaustive` has all.
OF_TWO = [WAYS[at] for at in (0, 3, 4, 5, 6, 9)]
OF_THREE = [way for way in WAYS if way not in OF_TWO]
JOBS = [(2, OF_TWO), (3, OF_THREE), (2, OF_THREE), (3, OF_TWO)]


@pytest.mark.parametrize(
    ("count", "ways"),
    sampled(JOBS, JOBS[:2].__contains__),
    ids=["2", "3", "2-rest", "3-rest"],
)
def test_a_rank_s_link_carries_its_part_of_the_weights_it_updates(
    count: int, ways: list[Way]
) -> None:
    """Between hosts a rank reads its part once for each other rank, in whole pages. Between devices
    nothing but the updated part passes the link."""
    of_ranks = run_ranks(count, train, ways)
    num_units = 5
    for runs in of_ranks:
        for way, run in zip(ways, runs, strict=True):
            (inward, outward), (wanted_in, wanted_out) = run.moved, run.expected
            assert inward == wanted_in, (way, run.moved, run.expected)
            is_served = way.exchange == "one_sided"
            slack_nbytes = 2 * PAGE_NBYTES * num_units * (count - 1) if is_served else 0
            assert wanted_out <= outward <= wanted_out + slack_nbytes, (way, run)
    for at, way in enumerate(ways):
        for runs in of_ranks:
            first = next(i for i, other in enumerate(ways) if other.dtype is way.dtype)
            reference = of_ranks[0][first].weights
            assert all(torch.equal(reference[n], runs[at].weights[n]) for n in reference), way


class _Lost(Transfer):
    """A transfer of other ranks' weights that ends with one of these ranks."""

    @override
    def done(self) -> bool:
        return True

    @override
    def wait(self) -> None:
        raise RankError(1, "is gone, in a test")


def _lose_in_exchange(rank: int, way: Way) -> tuple[str, list[bool]]:
    """The error of a step in which rank 0 gets no weights of rank 1; and of each unit of rank 0,
    whether its own part is new, that of rank 1 old, and its host copy gone."""
    model = offloaded(way, Path(tempfile.gettempdir(), "swap"))
    engine, kept, message = infinity.engine_of(model), list[bool](), ""
    store: Any = engine.store
    try:
        with closing(engine):
            optimizer, memory = infinity.AdamW(model, lr=LR), {}
            loss_of(model, batch(rank, WideBlocks.width).to(way.dtype)).backward()
            for unit in store.partition.full_units:
                memory[unit] = store.location(unit, StateKind.PARAMETERS).memory
            before = {unit: content.clone() for unit, content in memory.items()}

            def lose(index: int, full: Tensor, **_: bool) -> Transfer:
                full.fill_(255)  # A part has come.
                return _Lost()

            if rank == 0:
                store.gather_weights = lose
            try:
                optimizer.step()
            except InfinityError as error:
                message = str(error)
            for unit, content in memory.items():
                own = store.partition.own_part(unit.index)
                rest = store.partition.remote_parts(unit.index)
                is_old = [torch.equal(content[p.start : p.stop], before[unit][p.start : p.stop])
                          for p in (own, *rest)]  # fmt: skip
                held = engine.weight_cache.weights[unit.index].host_copy
                kept.append(is_old == [not own, *(True for _ in rest)] and held is None)
    except (InfinityError, UnorderedAccess):  # Closing raises the error of the step once more.
        pass
    return message, kept


def test_a_rank_that_is_lost_in_the_exchange_leaves_no_part_of_its_weights() -> None:
    (message, kept), (remote, _) = run_ranks(2, _lose_in_exchange, Way(1))
    assert "is gone, in a test" in message and "rank 0" in remote
    assert kept == [True] * 5


def _gathers_after_updates(rank: int, way: Way) -> list[bool]:
    """Whether each gather of a shard follows, on its stream, the update that wrote the shard."""
    written: dict[int, int] = {}  # By the address of a weight: the moment of its update.
    followed: list[bool] = []
    update, gather = chunk_update.update_on_device, DeviceExchange.gather

    def noted_update(device: Any, spans: Any, *rest: Any) -> None:
        update(device, spans, *rest)
        stream = device.streams.current()
        stream.submit(lambda: None)  # The kernel: here the arithmetic is over at once.
        written.update((span.weight.data_ptr(), stream.seen["compute"]) for span in spans)

    def checked_gather(self: Any, region: Any, local: Tensor, *rest: Any, **options: Any) -> Any:
        own = range(local.data_ptr(), local.data_ptr() + local.nbytes)
        moments = [moment for address, moment in written.items() if address in own]
        if moments:
            followed.append(self._link.seen.get("compute", 0) >= max(moments))
        return gather(self, region, local, *rest, **options)

    model = offloaded(way, Path(tempfile.gettempdir(), "swap"))
    optimizer = infinity.AdamW(model, lr=LR)
    with (
        mock.patch.object(chunk_update, "update_on_device", noted_update),
        mock.patch.object(DeviceExchange, "gather", checked_gather),
        closing(infinity.engine_of(model)),
    ):
        for step in range(2):
            loss_of(model, batch(10 * step + rank, WideBlocks.width).to(way.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return followed


def test_a_gather_of_a_shard_on_a_device_follows_its_update_there() -> None:
    for followed in run_ranks(
        2, _gathers_after_updates, Way(3, "collective", "device", "device", torch.bfloat16)
    ):
        assert followed and all(followed)
