"""Partial gradients that wait for their sum stay within the budget, wherever the bytes rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import SwapConfig
from infinity.distributed.sums import partials as partials_module
from infinity.distributed.sums.partials import Fill, PartialGradients
from infinity.errors import CapacityError
from infinity.observe import Counters
from infinity.sizes import MIB
from infinity.state.budgets import (
    Budgets,
    MachineSizes,
    RankSizes,
    WeightsInUse,
    compute_budgets,
)
from infinity.state.partition import partition
from infinity.state.units import TensorFacts, layout_unit
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_engine
from infinity.storage.scratch_space import SLOT_NBYTES
from infinity.storage.volume import Volume, VolumePath
from infinity.tiers.host import HostPool

from .models import batch, loss_of
from .processes import run_ranks
from .work import LR, Case, offload_case

BUDGET = 10_000
WINDOW = 4096


@pytest.fixture
def host() -> Iterator[HostPool]:
    with Arena(MIB) as arena:
        yield HostPool(arena, Counters())


def filling(values: torch.Tensor) -> Fill:
    content, at = values.view(torch.uint8), 0

    def fill(memory: memoryview) -> None:
        nonlocal at
        memory[:] = content[at : at + memory.nbytes].numpy()
        at += memory.nbytes

    return fill


def test_beyond_the_budget_bytes_go_to_the_drive_and_come_back(
    host: HostPool, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine("threads", arena=host.arena))
        volume = stack.enter_context(Volume(engine, [VolumePath(path=str(tmp_path / "swap"))]))
        windows = [host.allocate(WINDOW, "window") for _ in range(5)]
        partials = PartialGradients(
            BUDGET, host=host, volume=volume, window=windows.pop(), counters=Counters()
        )

        def give(giver: int) -> None:
            """Sums of two, of lengths that are no whole pages, over and over."""
            for turn in range(8):
                both = [torch.randn(1300 + 7 * giver) for _ in range(2)]
                one = partials.receive(
                    torch.float32, both[0].nbytes, filling(both[0]), window=windows[giver]
                )
                other = partials.put(both[1].clone(), meanwhile=pytest.fail)
                assert all(map(torch.equal, both, map(partials.read, (one, other))))
                total = partials.merge((one, other), both[0] + both[1])
                assert torch.equal(partials.read(total), both[0] + both[1])
                assert 0 <= partials.kept_nbytes <= BUDGET
                done.append((giver, turn))
                partials.drop(total)

        done: list[tuple[int, int]] = []
        threads = [threading.Thread(target=give, args=(giver,)) for giver in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 32, "a thread failed"
        assert partials.kept_nbytes == 0
        grown = Path(volume.file_paths[0]).stat().st_size
        assert grown <= 4 * 3 * SLOT_NBYTES, "scratch is used again"


def test_without_a_drive_a_sender_waits_for_space(
    host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    partials = PartialGradients(BUDGET, host=host, volume=None, window=None, counters=Counters())
    window = host.allocate(WINDOW, "window")
    assert window is not None
    waiting = [partials.put(torch.zeros(2000), meanwhile=pytest.fail)]
    # The owner's own gradient waits until the owner has summed.
    first = partials.put(torch.zeros(2000), meanwhile=lambda: partials.drop(waiting.pop()))
    values, found = torch.randn(2000), []
    giver = threading.Thread(
        target=lambda: found.append(
            partials.receive(torch.float32, values.nbytes, filling(values), window=window)
        )
    )
    giver.start()
    giver.join(0.05)
    assert giver.is_alive()
    partials.drop(first)
    giver.join()
    assert torch.equal(partials.read(found[0]), values)
    monkeypatch.setattr(partials_module, "PATIENCE_S", 0.01)
    with pytest.raises(CapacityError, match="distributed.reduce_buffer"):
        partials.receive(torch.float32, values.nbytes, filling(values), window=window)
    assert partials.kept_nbytes == values.nbytes


def _without_room(rank: int) -> torch.Tensor:
    """Rank 1 has no batch, waits for the step at once, and has no space for half of what
    arrives."""
    model = offload_case(Case(2), None)  # type: ignore[arg-type]
    engine = infinity.engine_of(model)
    engine.store.partials.budget_nbytes = 24 << 10
    optimizer = infinity.AdamW(model, lr=LR)
    if rank == 0:
        loss_of(model, batch(0, model.width)).backward()
    optimizer.step()
    weight = engine.read_parameter("blocks.2.0.weight")
    engine.close()
    return weight


def test_a_rank_that_waits_for_the_step_frees_space() -> None:
    mine, theirs = run_ranks(2, _without_room)
    assert torch.equal(mine, theirs)


def budgets(reduce_buffer: str, *, host: str = "64MiB", placement: str = "host") -> Budgets:
    facts = TensorFacts("weight", (1 << 20,), (1,), torch.float32, is_trainable=True)
    divided = partition([layout_unit(0, "unit", [facts])], rank=0, count=2, stage=3)
    config = {
        "distributed": {"reduce_buffer": reduce_buffer},
        "tiers": {"host": {"capacity": host}, "nvme": [{"path": "/swap"}]},
        "placement": dict.fromkeys(("parameters", "master", "moments"), placement),
    }
    return compute_budgets(
        SwapConfig.load(config),
        divided.units,
        WeightsInUse(4 * MIB, 4 * MIB),
        MachineSizes(True, None, 64 * MIB),
        RankSizes(gathered_nbytes=4 * MIB, serving_nbytes=3 * MIB, received_nbytes=8 * MIB),
    )


def test_the_reduce_buffer_is_a_part_of_the_host_budget() -> None:
    """Of 4 MiB of weights: two backward passes, an eighth of the budget, at least two units."""
    for options, reduce_buffer_nbytes in (
        ({"reduce_buffer": "auto"}, 8 * MIB),
        ({"reduce_buffer": "auto", "placement": "nvme", "host": "48MiB"}, 6 * MIB),
        ({"reduce_buffer": "4KiB", "placement": "nvme"}, 4096),
        ({"reduce_buffer": "12MiB"}, 12 * MIB),
    ):
        found = budgets(**options)
        asked_nbytes = int(options.get("host", "64MiB")[:-3]) * MIB
        assert (found.reduce_buffer_nbytes, found.host_nbytes) == (
            reduce_buffer_nbytes,
            asked_nbytes - reduce_buffer_nbytes,
        )
    with pytest.raises(CapacityError, match="distributed.reduce_buffer"):
        budgets("4MiB")
