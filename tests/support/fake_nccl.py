"""NCCL without devices: communicators of many ranks in one process, on virtual time.

A communicator keeps NCCL's rules. Operation number n of a communicator is the same on all ranks;
another one raises `OrderMismatch`, where NCCL hangs or mixes bytes up. To issue an operation takes
no time. Its kernel waits in the stream of the communicator until all ranks have issued it, reads its
sources then, and ends at once on all ranks. An abort releases the rank that aborts, and no other. It
waits for what is on the rank's device: kernels of other communicators too (`share_device`), until
these are over or aborted.

Time is virtual: a kernel begins when the last rank is ready for it and the one before it is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

STUCK_S = 120.0  # No test waits so long for a kernel: the ranks have locked each other out.


class OrderMismatch(RuntimeError):
    """Two ranks issued unlike operations at one place of the order of a communicator."""


class Aborted(RuntimeError):
    """The kernel will not run: this rank has aborted its side of the communicator."""


@dataclass(eq=False)
class Kernel:
    """One operation of all ranks. `what`: its kind and the bytes of a rank."""

    what: tuple[str, int]
    number: int
    first: int  # The rank that issued it first.
    sources: dict[int, torch.Tensor] = field(default_factory=dict)
    targets: dict[int, torch.Tensor] = field(default_factory=dict)
    ready_s: float = 0.0
    end_s: float = 0.0
    is_over: bool = False


class FakeCommunicator:
    """The communicator of `count` ranks. `duration_s`: of an operation, by kind and bytes."""

    def __init__(self, name: str, count: int, duration_s: Callable[[str, int], float]) -> None:
        self.name, self.count = name, count
        self.changed = threading.Condition()
        self.failure: OrderMismatch | None = None
        self._duration_s = duration_s
        self._kernels: list[Kernel] = []
        self._issued = [0] * count
        self.end_s = 0.0  # Of the last kernel.

    def rank(self, rank: int) -> FakeGroup:
        """Returns the side of a rank."""
        return FakeGroup(self, rank)

    def issue(
        self, rank: int, what: tuple[str, int], target: torch.Tensor, source: torch.Tensor,
        ready_s: float,
    ) -> Kernel:  # fmt: skip
        """Puts the next operation of a rank behind its earlier ones."""
        with self.changed:
            number = self._issued[rank]
            self._issued[rank] += 1
            if number == len(self._kernels):
                self._kernels.append(Kernel(what, number, rank))
            kernel = self._kernels[number]
            if kernel.what != what:
                self.failure = OrderMismatch(
                    f"{self.name}: operation {number} is {what} on rank {rank} "
                    f"and {kernel.what} on rank {kernel.first}"
                )
                self.changed.notify_all()
                raise self.failure
            kernel.sources[rank], kernel.targets[rank] = source, target
            kernel.ready_s = max(kernel.ready_s, ready_s)
            if len(kernel.sources) == self.count:  # So all earlier kernels are over.
                self._run(kernel)
            return kernel

    def _run(self, kernel: Kernel) -> None:
        kind, nbytes = kernel.what
        self.end_s = max(self.end_s, kernel.ready_s) + self._duration_s(kind, nbytes)
        rows = torch.stack([kernel.sources[rank].flatten() for rank in range(self.count)])
        if kind == "all_to_all":
            rows = rows.view(self.count, self.count, -1).transpose(0, 1)
        for rank, target in kernel.targets.items():
            target.view(-1).copy_((rows if kind == "all_gather" else rows[rank]).reshape(-1))
        kernel.sources, kernel.targets = {}, {}
        kernel.end_s, kernel.is_over = self.end_s, True
        self.changed.notify_all()


class FakeGroup:
    """A rank's side of a communicator, as torch.distributed calls a process group. The thread that
    issues operations sets `ready_s`, the time from which on the rank's stream can run the next one.
    """

    def __init__(self, communicator: FakeCommunicator, rank: int) -> None:
        self.communicator, self._rank = communicator, rank
        self.ready_s = 0.0
        self.last: Kernel | None = None  # The last one that this rank issued.
        self._is_aborted = False
        self._on_device: Sequence[FakeGroup] = (self,)

    def all_gather_single(self, target: torch.Tensor, source: torch.Tensor, _: Any) -> None:
        """Issues an all-gather."""
        assert target.numel() == self.communicator.count * source.numel()
        self._issue("all_gather", target, source)

    def all_to_all_single(
        self, target: torch.Tensor, source: torch.Tensor, _out: Any, _in: Any, _: Any
    ) -> None:
        """Issues an all-to-all of rows."""
        assert target.shape == source.shape and len(source) == self.communicator.count
        self._issue("all_to_all", target, source)

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single  # Up to PyTorch 2.12.

    def _issue(self, kind: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._is_aborted:
            raise Aborted(f"{self.communicator.name}: rank {self._rank} issues after its abort")
        what = kind, source.nbytes
        self.last = self.communicator.issue(self._rank, what, target, source, self.ready_s)

    def abort(self) -> None:
        """Ends this rank's waits. Returns when its device has nothing to do."""
        with self.communicator.changed:
            self._is_aborted = True
            self.communicator.changed.notify_all()
        deadline_s = time.monotonic() + STUCK_S
        while any(group.is_busy for group in self._on_device):
            assert time.monotonic() < deadline_s, "nobody aborts the other communicator"
            time.sleep(0.001)

    @property
    def is_busy(self) -> bool:
        """Whether a kernel of this communicator is on the rank's device."""
        return self.last is not None and not self.last.is_over and not self._is_aborted

    @staticmethod
    def share_device(groups: Sequence[FakeGroup]) -> None:
        """Puts groups of one rank on one device."""
        for group in groups:
            group._on_device = groups

    def wait(self, kernel: Kernel) -> float:
        """Blocks the host until the kernel is over. Returns the time of its end. Raises `Aborted`,
        and `OrderMismatch` for any rank's operation."""
        changed, failure = self.communicator.changed, lambda: self.communicator.failure
        with changed:
            in_time = changed.wait_for(
                lambda: kernel.is_over or self._is_aborted or failure(), STUCK_S
            )
            if kernel.is_over:
                return kernel.end_s
            missing = sorted(set(range(self.communicator.count)) - kernel.sources.keys())
            if (mismatch := failure()) is not None:
                raise mismatch
            assert in_time, f"operation {kernel.number}: ranks {missing} never issue it"
            raise Aborted(f"operation {kernel.number} waited for the ranks {missing}")
