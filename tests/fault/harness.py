"""A training loop over tiny models, and a storage engine that fails on command."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.config import SwapConfig
from infinity.engine.build import build
from infinity.engine.engine import Engine
from infinity.errors import CapacityError, InfinityError, StorageError
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.testing.faulty_engine import WrappedEngine
from tests.support import offloading
from tests.support.models import Mlp
from tests.support.offloading import units_in_use
from tests.support.two_sides import Side

WIDTH = 96  # A block of it is some 150 KiB: larger than a chunk of the update.

Named = dict[str, Tensor]


# -- Storage that fails ----------------------------------------------------------------------------


class Trap(WrappedEngine):
    """Wraps a storage engine; `set` makes one later operation fail, counted from that moment.

    A read that fails leaves NaN in the memory it should have filled, so that who uses it is found
    out.
    """

    def __init__(self, engine: StorageEngine) -> None:
        super().__init__(engine, "trap")
        self._lock = threading.Lock()
        self._left = 0  # Operations until the one that fails; 0: none will.
        self._operation = ""
        self._errno = 0
        self.error: StorageError | None = None  # What the trap has answered with.

    def set(self, operation: str, nth: int, code: int) -> None:
        """The `nth` read, write or sync from now on fails with `code`."""
        with self._lock:
            self._operation, self._left, self._errno, self.error = operation, nth, code, None

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        with self._lock:
            if self._left and operation == self._operation:
                self._left -= 1
                if self._left == 0:
                    return self._fail(operation, segments)
        return self._engine.submit(operation, segments, priority)

    def _fail(self, operation: Operation, segments: Sequence[Segment]) -> Ticket:
        first = segments[0]
        self.error = StorageError(
            self._errno,
            operation=operation,
            path=self._paths[first.file],
            offset_nbytes=first.offset_nbytes,
            nbytes=first.nbytes,
        )
        if operation == "read":
            for segment in segments:
                ctypes.memset(segment.address, 0xFF, segment.nbytes)
        return _Failed(self.error)


class _Failed:
    """A ticket that is not done when it is first asked, as on a real drive; then it raises."""

    def __init__(self, error: StorageError) -> None:
        self._error = error
        self._asked = False

    def done(self) -> bool:
        was_asked, self._asked = self._asked, True
        return was_asked

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return []

    def wait(self) -> None:
        self._asked = True
        raise self._error


# -- Models and configurations ---------------------------------------------------------------------


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(width=WIDTH, layers=6).train()


def swap_config(
    directory: Path | None,
    *,
    host_nbytes: int | str = "1MiB",
    moments: str = "float32",
    checkpoint: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`offloading.swap_config` with a host budget that holds little, and state on one small drive."""
    options = {"nvme_nbytes": "64MiB", "stripe": "32KiB", **options}
    config = offloading.swap_config(directory, host_nbytes=host_nbytes, **options)
    config["precision"]["moments"] = moments
    config["schedule"]["update_on"] = "auto"
    return config | ({} if checkpoint is None else {"checkpoint": checkpoint})


def offload(model: nn.Module, config: dict[str, Any], **options: Any) -> Engine:
    """`infinity.offload` with the storage engine wrapped by `wrap_storage`."""
    arguments = {"weights": None, "seed": 0, "units": "auto", "device": None, **options}
    return build(model, SwapConfig.load(config), **arguments)


@contextmanager
def trapped(
    model: nn.Module, config: dict[str, Any], **options: Any
) -> Iterator[tuple[Engine, Trap]]:
    """An offloaded model on storage with a trap in it. Closed at the end, and nothing is left."""
    traps: list[Trap] = []

    def wrap(engine: StorageEngine) -> StorageEngine:
        traps.append(Trap(engine))
        return traps[-1]

    engine = offload(model, config, wrap_storage=wrap, **options)
    try:
        yield engine, traps[0]
    finally:
        engine.close()
        for tier in config["tiers"].get("nvme", ()):
            assert swap_files(tier["path"]) == []


def swap_files(directory: str | Path) -> list[str]:
    """What is left in a swap directory beside the lock file."""
    if not os.path.isdir(directory):
        return []
    return sorted(name for name in os.listdir(directory) if name != "infinity.lock")


# -- Training --------------------------------------------------------------------------------------


def loss_of(model: nn.Module, seed: int) -> Tensor:
    answer = model(**model.inputs(seed))  # type: ignore[operator]
    return _sum_of_squares(answer)


def _sum_of_squares(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree.float().square().mean()
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    parts = [
        _sum_of_squares(each) for each in tree if isinstance(each, (Tensor, Mapping, tuple, list))
    ]
    return torch.stack(parts).sum()


MAX_NORM = 0.5


def plain_steps(model: nn.Module, count: int) -> Named:
    """Weights after `count` steps of plain PyTorch."""
    side = Side(model, is_plain=True)
    side.adamw()
    for step in range(count):
        loss_of(model, step).backward()
        side.step(MAX_NORM)
    return side.values()


def optimizer_of(model: nn.Module) -> infinity.AdamW:
    return infinity.AdamW(model, lr=1e-2, weight_decay=0.1, max_grad_norm=MAX_NORM)


def offloaded_step(model: nn.Module, optimizer: infinity.AdamW, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def offloaded_steps(model: nn.Module, count: int) -> Named:
    """The same training of an offloaded model."""
    optimizer = optimizer_of(model)
    for step in range(count):
        offloaded_step(model, optimizer, step)
    return weights_of(model)


def weights_of(model: nn.Module) -> Named:
    return Side(model).values()


# -- What must hold after a failure ----------------------------------------------------------------


def assert_describes(error: BaseException, *, operation: str, code: int, directory: Path) -> None:
    """The error names what failed, where, and the errno of the kernel."""
    assert isinstance(error, StorageError)
    assert error.errno == code and error.operation == operation
    assert Path(error.path).parent == directory and Path(error.path).name.startswith("infinity-")
    assert error.offset_nbytes >= 0 and error.offset_nbytes % 4096 == 0
    assert error.nbytes > 0 and error.nbytes % 4096 == 0
    for part in (operation, error.path, str(error.offset_nbytes), str(error.nbytes)):
        assert part in str(error)
    assert os.strerror(code) in str(error)


def lent(engine: Engine) -> list[str]:
    return engine.pool.lent()


def settle(engine: Engine) -> None:
    """Waits for writes that run behind, those that fail included."""
    for _ in range(100):
        try:
            engine.flush()
            return
        except StorageError:
            continue  # Of one write; those behind it are still to be waited for.
        except InfinityError as torn:
            assert "halfway" in str(torn) and isinstance(torn.__cause__, StorageError)
            return


def assert_nothing_leaked(engine: Engine) -> None:
    """No unit is in use, and a block is lent at most once for the weights or the gradients of a
    unit and for the optimizer."""
    assert units_in_use(engine) == []
    settle(engine)
    labels = lent(engine)
    assert len(labels) == len(set(labels)), f"lent twice: {labels}"
    allowed = {
        f"{what} of {unit.name}"
        for unit in engine.store.units
        for what in ("parameters", "gradients")
    } | {"chunks of the optimizer"}
    assert set(labels) <= allowed, f"leaked: {sorted(set(labels) - allowed)}"


def assert_everything_comes_back(engine: Engine) -> None:
    """Where all state rests on NVMe, the full arena can be lent as one block."""
    pool = engine.pool
    capacity_nbytes = pool.capacity_nbytes
    try:
        block = pool.require(capacity_nbytes, "everything")
    except CapacityError as error:
        raise AssertionError(f"still lent: {lent(engine)}") from error
    pool.free(block)


def assert_poisoned(engine: Engine, work: Callable[[], object], code: int) -> None:
    """After a failed write nothing pretends that all is well."""
    try:
        work()
        engine.flush()
    except InfinityError as error:
        cause = error if isinstance(error, StorageError) else error.__cause__
        assert isinstance(cause, StorageError) and cause.errno == code
        return
    raise AssertionError("a failed write was forgotten")


EIO, ENOSPC = errno.EIO, errno.ENOSPC
FAULTS = [("read", EIO), ("write", EIO), ("write", ENOSPC)]
