"""CUDA as the runtime of a stream device, and the arena pinned for it.

Everything but the pinning goes by the names that PyTorch gives to any accelerator's module
(`torch.get_device_module`), so another accelerator needs its own way to pin and no more. What is
in order before what is said in tiers/streams.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from infinity.config.machine import host_memory
from infinity.errors import UnsupportedError
from infinity.observe import Counters
from infinity.sizes import format_nbytes
from infinity.storage.arena import Arena
from infinity.tiers.device import ResizedRegion
from infinity.tiers.host import MAX_REGISTERED_NBYTES, HostPool
from infinity.tiers.streams import StreamDevice, Streams

_log = logging.getLogger("infinity")

# cudaHostRegisterPortable: pinned for every context of the process.
_HOST_REGISTER_PORTABLE = 1
_LONG_S = 2.0
_PRIORITY = -1  # Of the streams of transfers; those that compute have 0.


class StreamMemoryRegion(ResizedRegion):
    """A region whose memory comes from the allocator's pool of one stream."""

    def __init__(self, module: Any, stream: Any, nbytes: int, name: str = "") -> None:
        self._module = module
        self._stream = stream
        with _on_stream(module, stream):
            super().__init__(nbytes, stream.device, name)

    def _resize(self, nbytes: int) -> None:
        with _on_stream(self._module, self._stream):
            self.storage.resize_(nbytes)

    def _fill(self, byte: int) -> None:
        with _on_stream(self._module, self._stream):  # It has waited for the last uses.
            super()._fill(byte)


@contextlib.contextmanager
def _on_stream(module: Any, stream: Any) -> Iterator[None]:
    """Makes a stream the current one.

    The current device of a thread of the engine or the user is often device 0, and `stream` alone
    would go back to it at its end: that makes a context there, of some hundred MiB, for every other
    rank.
    """
    with module.device(stream.device), module.stream(stream):
        yield


class AcceleratorStreams(Streams):
    """Streams of one accelerator, by its module in torch (`torch.cuda`, `torch.xpu`).

    priority: of new streams; lower numbers run first
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.device = device
        self._priority = priority
        self._module: Any = torch.get_device_module(device)

    @override
    def new_stream(self, name: str) -> Any:
        return self._module.Stream(self.device, priority=self._priority)

    @override
    def new_event(self, *, is_timed: bool = False) -> Any:
        # A thread that waits gives up its core: the update of the optimizer wants it.
        return self._module.Event(enable_timing=is_timed, blocking=True)

    @override
    def current(self) -> Any:
        return self._module.current_stream(self.device)

    @override
    def copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        with _on_stream(self._module, stream):
            target.copy_(source, non_blocking=True)

    @override
    def run(
        self,
        stream: Any,
        work: Callable[[], None],
        used: Sequence[ResizedRegion],
        made: ResizedRegion | None = None,
    ) -> None:
        with _on_stream(self._module, stream), torch.no_grad():
            work()

    @override
    def empty_region(self, stream: Any, nbytes: int, name: str = "") -> ResizedRegion:
        return StreamMemoryRegion(self._module, stream, nbytes, name)

    @override
    def begin_thread(self) -> None:
        # INV-25: a thread begins with the first device. There even a look at an event of another
        # one makes a context, of half a gigabyte.
        self._module.set_device(self.device)

    @override
    def empty_cache(self) -> None:
        self._module.empty_cache()

    @override
    def synchronize(self) -> None:
        self._module.synchronize(self.device)


class CudaDevice(StreamDevice):
    """The device tier on the current CUDA device."""

    def __init__(self, host: HostPool, counters: Counters) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "tiers.device.kind is 'cuda' but PyTorch sees no CUDA device; "
                "install a CUDA build of torch, or set kind = 'cpu'"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        # What arrives is awaited: kernels of the exchange and of decoding go before those that
        # compute, as in FSDP2.
        streams = AcceleratorStreams(device, priority=_PRIORITY)
        super().__init__("cuda", host, counters, streams)
        pin(host.arena, torch.cuda.cudart(), device)

    @override
    def close(self) -> None:
        try:
            super().close()  # After a failed kernel every call of CUDA fails.
        finally:
            unpin(self.host.arena, torch.cuda.cudart())


def pin(
    arena: Arena,
    runtime: Any,
    device: torch.device,
    *,
    registered_nbytes: int = MAX_REGISTERED_NBYTES,
) -> None:
    """Page-locks the arena for the device: without it copies are neither asynchronous nor fast.

    The arena is registered in parts of `registered_nbytes`, whose ends no block crosses
    (tiers/ranges.py). All of it or nothing: after a refusal no page is locked; design note 0008 has
    the reasons. Takes seconds to minutes, which the log shows.
    `runtime`: `torch.cuda.cudart()`, whose functions return the error and raise nothing.
    Source: CUDA Runtime API, cudaHostRegister.
    """
    begun_s = time.monotonic()
    done_nbytes = 0
    for address, nbytes in _registrations(arena, registered_nbytes):
        code = _code(runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code != 0:
            _unregister(runtime, _registrations(arena, registered_nbytes), stop=address)
            _clear_error(device)
            raise UnsupportedError(
                f"the driver refused to page-lock {format_nbytes(nbytes)} of the host arena after "
                f"{format_nbytes(done_nbytes)} of {format_nbytes(arena.capacity_nbytes)}: "
                f"{_words(runtime, code)}. It needs kernel memory for its page tables as well "
                f"as for the pages ({format_nbytes(host_memory().nbytes)} are available now); "
                f"lower tiers.host.capacity{_most(done_nbytes)}, and give state that does not fit "
                "then a drive (tiers.nvme, placement). The limit of ulimit -l does not apply here"
            )
        done_nbytes += nbytes
        elapsed_s = time.monotonic() - begun_s
        if nbytes < arena.capacity_nbytes or elapsed_s > _LONG_S:
            _log.info(
                "page-locked %s of %s of the host arena in %.1f s",
                format_nbytes(done_nbytes), format_nbytes(arena.capacity_nbytes), elapsed_s,
            )  # fmt: skip


def unpin(arena: Arena, runtime: Any, *, registered_nbytes: int = MAX_REGISTERED_NBYTES) -> None:
    """Ends the registrations before the arena is unmapped. A failure is logged, not raised."""
    _unregister(runtime, _registrations(arena, registered_nbytes))


def _registrations(arena: Arena, registered_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields address and bytes of each registration."""
    for offset in range(0, arena.capacity_nbytes, registered_nbytes):
        yield arena.address + offset, min(registered_nbytes, arena.capacity_nbytes - offset)


def _unregister(
    runtime: Any, registrations: Iterator[tuple[int, int]], *, stop: int | None = None
) -> None:
    """Ends the registrations before the address `stop`."""
    for address, _ in registrations:
        if address == stop:
            return
        code = _code(runtime.cudaHostUnregister(address))
        if code != 0:
            _log.warning("cudaHostUnregister of the arena failed: %s", _words(runtime, code))


def _clear_error(device: torch.device) -> None:
    """The error stays behind as CUDA's "last error", and the next launch, which is not to blame,
    would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _most(done_nbytes: int) -> str:
    return f" to {format_nbytes(done_nbytes)} or less" if done_nbytes else ""


def _code(answer: Any) -> int:
    return int(getattr(answer, "value", answer))  # An enum, of one kind or another.


def _words(runtime: Any, code: int) -> str:
    try:
        return f"{runtime.cudaGetErrorString(runtime.cudaError(code))} (code {code})"
    except (AttributeError, TypeError, ValueError):
        return f"code {code}"
