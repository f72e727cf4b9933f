"""One ring: a submission queue, a completion queue, and the operations in flight; the numbers of
its flags, and how an operation names memory."""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from infinity.errors import InfinityError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer


# -- The cffi module that wraps liburing -----------------------------------------------------------


class RingError(InfinityError, OSError):
    """The kernel refused a call about the ring. A failed operation is a Completion instead."""

    def __init__(self, code: int, call: str, remedy: str = "") -> None:
        self.call = call
        advice = f"; {remedy}" if remedy else ""
        super().__init__(code, f"{call} failed: {os.strerror(code)}{advice}")


def is_built() -> bool:
    """Returns whether the binding is part of this installation."""
    try:
        load()
    except UnsupportedError:
        return False
    return True


def load() -> tuple[Any, Any]:
    """Returns (ffi, lib) of the binding. Raises UnsupportedError when it was not built."""
    try:
        from infinity import _uring
    except ImportError as error:
        raise UnsupportedError(
            "infinity.uring is not part of this build: liburing or cffi was missing. Install "
            "liburing-dev and cffi, then build infinity-offload again"
        ) from error
    return _uring.ffi, _uring.lib


def check(answer: int, call: str) -> None:
    """Raises RingError when `answer`, the result of `call`, is a negative errno."""
    if answer < 0:
        raise RingError(-answer, call)


# -- Numbers of include/uapi/linux/io_uring.h, which never change ----------------------------------


class SetupFlag(IntFlag):
    """Setup of a ring: IORING_SETUP_*, without the flags that change the layout of the ring."""

    NONE = 0
    IOPOLL = 1 << 0
    SQPOLL = 1 << 1
    CLAMP = 1 << 4
    SUBMIT_ALL = 1 << 7
    COOP_TASKRUN = 1 << 8
    TASKRUN_FLAG = 1 << 9
    SINGLE_ISSUER = 1 << 12
    DEFER_TASKRUN = 1 << 13


class Feature(IntFlag):
    """Features of the rings of a kernel: IORING_FEAT_*. Bits of newer kernels are kept."""

    NONE = 0
    SINGLE_MMAP = 1 << 0
    NODROP = 1 << 1
    SUBMIT_STABLE = 1 << 2
    RW_CUR_POS = 1 << 3
    CUR_PERSONALITY = 1 << 4
    FAST_POLL = 1 << 5
    POLL_32BITS = 1 << 6
    SQPOLL_NONFIXED = 1 << 7
    EXT_ARG = 1 << 8
    NATIVE_WORKERS = 1 << 9
    RSRC_TAGS = 1 << 10
    CQE_SKIP = 1 << 11
    LINKED_FILE = 1 << 12
    REG_REG_RING = 1 << 13
    RECVSEND_BUNDLE = 1 << 14
    MIN_TIMEOUT = 1 << 15
    RW_ATTR = 1 << 16
    NO_IOWAIT = 1 << 17


# IORING_OP_*, in the kernel's order, as of Linux 6.18.
OPCODES = (
    "NOP", "READV", "WRITEV", "FSYNC", "READ_FIXED", "WRITE_FIXED", "POLL_ADD", "POLL_REMOVE",
    "SYNC_FILE_RANGE", "SENDMSG", "RECVMSG", "TIMEOUT", "TIMEOUT_REMOVE", "ACCEPT", "ASYNC_CANCEL",
    "LINK_TIMEOUT", "CONNECT", "FALLOCATE", "OPENAT", "CLOSE", "FILES_UPDATE", "STATX", "READ",
    "WRITE", "FADVISE", "MADVISE", "SEND", "RECV", "OPENAT2", "EPOLL_CTL", "SPLICE",
    "PROVIDE_BUFFERS", "REMOVE_BUFFERS", "TEE", "SHUTDOWN", "RENAMEAT", "UNLINKAT", "MKDIRAT",
    "SYMLINKAT", "LINKAT", "MSG_RING", "FSETXATTR", "SETXATTR", "FGETXATTR", "GETXATTR", "SOCKET",
    "URING_CMD", "SEND_ZC", "SENDMSG_ZC", "READ_MULTISHOT", "WAITID", "FUTEX_WAIT", "FUTEX_WAKE",
    "FUTEX_WAITV", "FIXED_FD_INSTALL", "FTRUNCATE", "BIND", "LISTEN", "RECV_ZC", "EPOLL_WAIT",
    "READV_FIXED", "WRITEV_FIXED", "PIPE",
)  # fmt: skip


# -- Memory as operations of a ring name it: plain or registered -----------------------------------


class Raw(NamedTuple):
    """Memory by address. The caller keeps it alive and writable until the completion is taken."""

    address: int
    nbytes: int


class RegisteredBuffer(NamedTuple):
    """Memory that the ring has pinned, or a range of it."""

    index: int  # type: ignore[assignment]  # Hides tuple.index, which no caller uses.
    address: int
    nbytes: int

    def part(self, offset_nbytes: int, nbytes: int) -> RegisteredBuffer:
        """Returns a range of this buffer. Raises ValueError for a range outside the buffer."""
        if offset_nbytes < 0 or nbytes < 0 or offset_nbytes + nbytes > self.nbytes:
            raise ValueError(f"{offset_nbytes=}, {nbytes=} is outside a buffer of {self.nbytes}")
        return RegisteredBuffer(self.index, self.address + offset_nbytes, nbytes)


Memory: TypeAlias = "Buffer | Raw | RegisteredBuffer"


# -- The ring --------------------------------------------------------------------------------------


_MAX_UNSIGNED = 2**32 - 1
_MAX_OFFSET = 2**64 - 1
_CQSIZE = 1 << 3  # Set when `num_completions` is given.
_ALL_SETUP_FLAGS = sum(SetupFlag)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one operation. `result` is the kernel's: a count, or minus an errno."""

    token: Any
    result: int
    flags: int = 0

    @property
    def errno(self) -> int:
        """The errno of a failed operation, 0 of a successful one."""
        return max(0, -self.result)

    @property
    def nbytes(self) -> int:
        """Bytes moved; fewer than requested at the end of a file. Raises OSError on failure."""
        if self.result < 0:
            raise OSError(self.errno, os.strerror(self.errno))
        return self.result


class Ring:
    """One submission queue and one completion queue. One thread at a time; not after a fork.

    `num_entries` operations can be prepared before a submit; the kernel rounds up to a power of
    two. `num_completions` sizes the completion queue: twice `num_entries` by default. The ring
    keeps the memory of an operation alive until the completion is taken.

    Raises RingError when the kernel refuses, UnsupportedError when the binding was not built.
    """

    def __init__(
        self,
        num_entries: int = 8,
        flags: SetupFlag = SetupFlag.NONE,
        *,
        num_completions: int | None = None,
    ) -> None:
        self._is_open = False
        self._ffi, self._lib = load()
        self._next_id = 0
        self._num_prepared = 0
        # (token, memory) of every operation whose completion was not taken yet.
        self._operations: dict[int, tuple[Any, Any]] = {}
        self._registered: list[Any] = []
        if unknown := flags & ~_ALL_SETUP_FLAGS:
            raise ValueError(f"{flags=}: {unknown:#x} is not a SetupFlag")
        params = self._ffi.new("struct io_uring_params *")
        params.flags = flags
        if num_completions is not None:
            params.flags |= _CQSIZE
            params.cq_entries = num_completions
        self._ring = self._ffi.new("struct io_uring *")
        answer = self._lib.io_uring_queue_init_params(num_entries, self._ring, params)
        check(answer, "io_uring_setup")
        self._is_open = True
        self._pid = os.getpid()
        self._lib.io_uring_ring_dontfork(self._ring)
        self.flags = flags
        self.features = Feature(params.features)
        self.num_entries: int = params.sq_entries
        self.num_completions: int = params.cq_entries
        self._cqes = self._ffi.new("struct io_uring_cqe *[]", self.num_completions)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    @property
    def num_free_entries(self) -> int:
        """Operations that can be prepared before the next submit."""
        return int(self._lib.io_uring_sq_space_left(self._live()))

    @property
    def num_in_flight(self) -> int:
        """Operations that were submitted and whose completion was not taken yet."""
        return len(self._operations) - self._num_prepared

    def opcodes(self) -> frozenset[str]:
        """Returns the names of the operations of this kernel; "op 70" for one without a name."""
        found = self._lib.io_uring_get_probe_ring(self._live())
        if not found:
            raise RingError(errno.EINVAL, "io_uring_register(PROBE)", "Linux 5.6 is needed")
        try:
            return frozenset(
                OPCODES[op.op] if op.op < len(OPCODES) else f"op {op.op}"
                for op in (found.ops[index] for index in range(found.ops_len))
                if op.flags & self._lib.IO_URING_OP_SUPPORTED
            )
        finally:
            self._lib.io_uring_free_probe(found)

    def register_buffers(self, buffers: Sequence[Buffer | Raw]) -> list[RegisteredBuffer]:
        """Pins writable memory until `unregister_buffers`. One call names all buffers of the ring.

        A buffer has at most 1 GiB. Raises RingError; its errno is ENOMEM above the memlock limit.
        """
        ring = self._live()
        memories = [self._memory(buffer, is_written=True) for buffer in buffers]
        vectors = self._ffi.new("struct iovec[]", len(memories))
        for vector, (pointer, nbytes) in zip(vectors, memories, strict=True):
            vector.iov_base, vector.iov_len = pointer, nbytes
        check(
            self._lib.io_uring_register_buffers(ring, vectors, len(memories)),
            "io_uring_register(BUFFERS)",
        )
        self._registered = [pointer for pointer, _ in memories]
        return [
            RegisteredBuffer(index, int(self._ffi.cast("uintptr_t", pointer)), nbytes)
            for index, (pointer, nbytes) in enumerate(memories)
        ]

    def unregister_buffers(self) -> None:
        """Unpins all buffers, which no operation in flight may use. Raises RingError."""
        answer = self._lib.io_uring_unregister_buffers(self._live())
        check(answer, "io_uring_register(UNREGISTER_BUFFERS)")
        self._registered = []

    def read(self, file: int, memory: Memory, offset_nbytes: int, *, token: Any = None) -> None:
        """Prepares a read that fills `memory`. Raises RingError (EBUSY) when the queue is full."""
        self._transfer(file, memory, offset_nbytes, token, is_write=False)

    def write(self, file: int, memory: Memory, offset_nbytes: int, *, token: Any = None) -> None:
        """Prepares a write of all of `memory`. Raises RingError (EBUSY) when the queue is full."""
        self._transfer(file, memory, offset_nbytes, token, is_write=True)

    def submit(self) -> int:
        """Submits the prepared operations. Returns how many the kernel took. Raises RingError."""
        answer = self._lib.io_uring_submit(self._live())
        check(answer, "io_uring_enter")
        # With SQPOLL the result also counts operations that an earlier submit left for the kernel.
        num_taken = min(answer, self._num_prepared)
        self._num_prepared -= num_taken
        return int(num_taken)

    def wait(self, num: int = 1, *, timeout_s: float | None = None) -> list[Completion]:
        """Submits, waits for at least `num` completions, and takes all that have arrived.

        With `num` 0 the call does not wait. Raises TimeoutError, and takes no completion then;
        ValueError for a wait without end: `num` is more than the operations in flight, or more
        than the completion queue holds.
        """
        ring = self._live()
        most = min(len(self._operations), self.num_completions)
        if not 0 <= num <= most:
            raise ValueError(
                f"{num=}, expected 0..{most}: {len(self._operations)} operations are under way, "
                f"and {self.num_completions} completions can be held"
            )
        if timeout_s is not None and Feature.EXT_ARG not in self.features:
            raise UnsupportedError("waiting with a timeout needs Linux 5.11")
        self.submit()
        if num == 0:
            check(self._lib.get_events(ring), "io_uring_enter")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._lib.io_uring_cq_ready(ring) < num:
            self._wait_once(num, deadline_s)
        return self._take()

    def close(self) -> None:
        """Waits for the operations in flight, which use memory, then ends the ring. Idempotent.

        Operations that were prepared and not submitted are dropped.
        """
        if not self._is_open:
            return
        if os.getpid() != self._pid:  # A child has the descriptor, not the mappings.
            os.close(self._ring.ring_fd)
        else:
            while self.num_in_flight:
                self._wait_once(1, None)
                self._take()
            self._lib.io_uring_queue_exit(self._ring)
        self._is_open = False
        self._operations.clear()
        self._registered = []

    def _live(self) -> Any:
        if not self._is_open:
            raise ValueError("the ring is closed")
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "a ring cannot be used in a forked child; open one there, or start the process "
                "with the 'spawn' method"
            )
        return self._ring

    def _transfer(
        self, file: int, memory: Memory, offset_nbytes: int, token: Any, *, is_write: bool
    ) -> None:
        # Arguments are checked before an entry is taken: an entry cannot be returned.
        if not 0 <= offset_nbytes <= _MAX_OFFSET:
            raise ValueError(f"{offset_nbytes=}, expected 0..2**64 - 1")
        if not -(2**31) <= file < 2**31:
            raise ValueError(f"{file} cannot be a file descriptor")
        pointer, nbytes = self._memory(memory, is_written=not is_write)
        entry = self._entry()
        if isinstance(memory, RegisteredBuffer):
            prepare = (
                self._lib.io_uring_prep_write_fixed
                if is_write
                else self._lib.io_uring_prep_read_fixed
            )
            prepare(entry, file, pointer, nbytes, offset_nbytes, memory.index)
        else:
            prepare = self._lib.io_uring_prep_write if is_write else self._lib.io_uring_prep_read
            prepare(entry, file, pointer, nbytes, offset_nbytes)
        entry.user_data = self._next_id
        self._operations[self._next_id] = (token, pointer)
        self._next_id += 1
        self._num_prepared += 1

    def _memory(self, memory: Memory, *, is_written: bool) -> tuple[Any, int]:
        """Returns a pointer, which keeps memory with the buffer protocol alive, and the size."""
        if isinstance(memory, (Raw, RegisteredBuffer)):
            pointer, nbytes = self._ffi.cast("void *", memory.address), memory.nbytes
        else:
            pointer = self._ffi.from_buffer("char[]", memory, require_writable=is_written)
            nbytes = len(pointer)
        if not 0 <= nbytes <= _MAX_UNSIGNED:
            raise ValueError(f"{nbytes=} of memory, expected 0..2**32 - 1")
        return pointer, nbytes

    def _entry(self) -> Any:
        entry = self._lib.io_uring_get_sqe(self._live())
        if not entry:
            raise RingError(
                errno.EBUSY,
                "io_uring_get_sqe",
                f"all {self.num_entries} entries are prepared, submit() first",
            )
        return entry

    def _wait_once(self, num: int, deadline_s: float | None) -> None:
        """Waits in the kernel once. A signal ends the wait, so that Python's handlers can run."""
        span = self._ffi.NULL
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"fewer than {num} completions in time; wait again for them")
            span = self._ffi.new("struct __kernel_timespec *")
            span.tv_sec, span.tv_nsec = int(left_s), int(left_s % 1 * 1e9)
        first = self._ffi.new("struct io_uring_cqe **")
        answer = self._lib.io_uring_wait_cqes(self._ring, first, num, span, self._ffi.NULL)
        if answer not in (-errno.EINTR, -errno.ETIME):
            check(answer, "io_uring_enter")

    def _take(self) -> list[Completion]:
        num = self._lib.io_uring_peek_batch_cqe(self._ring, self._cqes, self.num_completions)
        taken = []
        for index in range(num):
            cqe = self._cqes[index]
            token, _ = self._operations.pop(cqe.user_data)
            taken.append(Completion(token, cqe.res, cqe.flags))
        self._lib.io_uring_cq_advance(self._ring, num)
        return taken


# -- Questions to the kernel about its rings -------------------------------------------------------


# The flag that each of these needs beside itself.
_COMPANIONS = {
    SetupFlag.TASKRUN_FLAG: SetupFlag.COOP_TASKRUN,
    SetupFlag.DEFER_TASKRUN: SetupFlag.SINGLE_ISSUER,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The capabilities of this kernel for this process; all empty when `errno` is not 0.

    `errno` is the kernel's refusal of a small ring, or 0. `setup_flags` are the flags that the
    kernel grants; `opcodes` the names of its operations; `max_num_entries` the largest ring.
    """

    errno: int
    features: Feature = Feature.NONE
    setup_flags: SetupFlag = SetupFlag.NONE
    opcodes: frozenset[str] = frozenset()
    max_num_entries: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether the kernel did what was tried."""
        return self.errno == 0


def probe() -> Probe:
    """Sets up rings to find what the kernel grants. A refusal is a result: `Probe.errno`.

    Raises UnsupportedError when the binding was not built.
    """
    try:
        with Ring(4) as ring:
            features, opcodes = ring.features, ring.opcodes()
    except RingError as error:
        return Probe(error.errno or errno.EINVAL)
    granted = SetupFlag.NONE
    for flag in SetupFlag:
        if _sets_up(4, flag | _COMPANIONS.get(flag, SetupFlag.NONE)):
            granted |= flag
    return Probe(0, features, granted, opcodes, _max_num_entries())


def try_registering(nbytes: int) -> int:
    """Pins `nbytes` of new memory as one buffer, and unpins it. Returns 0 or the errno.

    Raises RingError when the kernel refuses the ring.
    """
    with mmap.mmap(-1, nbytes) as memory, Ring(4) as ring:
        try:
            ring.register_buffers([memory])
        except RingError as error:
            return error.errno or errno.EINVAL
        ring.unregister_buffers()
        return 0


def _max_num_entries() -> int:
    num_entries = 1 << 16
    while num_entries > 4:
        try:
            with Ring(num_entries, SetupFlag.CLAMP) as ring:
                return ring.num_entries
        except RingError:  # ENOMEM: before 5.12 the queues count against the memlock limit.
            num_entries //= 2
    return num_entries


def _sets_up(num_entries: int, flags: SetupFlag) -> bool:
    try:
        Ring(num_entries, flags).close()
    except RingError:
        return False
    return True
