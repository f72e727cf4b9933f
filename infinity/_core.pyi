"""Native part of infinity: the I/O engine, the arena and its windows, the optimizer's update,
the decoders. Use `infinity.storage`, `infinity.ops` and `infinity.codecs`."""

from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, TypedDict, final

HAS_URING: bool

class UringProbe(TypedDict):
    usable: bool
    errno: int
    step: str
    ring_flags: int

class LaneInfo(TypedDict):
    device: int
    ring_flags: int
    has_registered_buffers: bool
    has_registered_files: bool
    has_fixed_vectors: bool
    register_buffers_errno: int
    num_pending: int
    num_in_flight: int
    queue_depth: int
    num_cancelled: int
    cpu_s: float
    stall_s: float
    queue_wait: list[int]

def probe_uring() -> UringProbe: ...
def can_remap() -> bool: ...
def stacks(threads: Sequence[int]) -> dict[int, list[FrameType]]:
    """The frames of each of these threads, the innermost first; of all threads for none. No thread
    runs Python code meanwhile."""

def direct_alignment(fd: int) -> tuple[int, int]:
    """Memory and offset alignment of an open file in bytes; (0, 0) when the kernel does not say."""

def crc32c_pages(address: int, nbytes: int, num_threads: int = 1) -> bytes:
    """CRC32C of each page of 4096 bytes, 4 bytes each, in native order."""

def first_bad_page(address: int, nbytes: int, expected: bytes, num_threads: int = 1) -> int:
    """Index of the first page without the expected checksum; -1 when there is none."""

@final
class PageDigests:
    """Checksums of the pages of a range that are taken as an update writes them. Until `finish`
    nobody else changes the memory."""

    def __init__(self, address: int, nbytes: int) -> None: ...
    def finish(self, num_threads: int = 1) -> bytes:
        """As `crc32c_pages` of the range; takes those that no update has taken."""

def crc32c_kernels() -> list[str]:
    """The kernels that this processor can run; the first one is used, the last is "table"."""

def crc32c_of_zeros() -> bytes:
    """The checksum of a page of zeros, 4 bytes."""

@final
class Arena:
    def __init__(
        self,
        capacity_nbytes: int,
        huge_pages: bool,
        num_threads: int,
        numa_node: int = -1,
        is_shared: bool = False,
    ) -> None: ...
    @property
    def descriptor(self) -> int: ...
    def close_file(self) -> None: ...
    @property
    def prefers_node(self) -> bool: ...
    @property
    def address(self) -> int: ...
    @property
    def capacity_nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class ArenaView:
    def __init__(self, descriptor: int, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Window:
    def __init__(self, capacity_nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def capacity_nbytes(self) -> int: ...
    def map(
        self, arena: Arena, arena_offset_nbytes: int, nbytes: int, window_offset_nbytes: int
    ) -> None: ...
    def unmap(
        self, arena: Arena, arena_offset_nbytes: int, nbytes: int, window_offset_nbytes: int
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Ticket:
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def passages(self) -> list[tuple[int, int, int, int]]:
        """(file, nbytes, issued_ns, completed_ns) of each file reached; empty until done()."""

    def wait(self, timeout_s: float | None = None) -> None: ...

@final
class Engine:
    def __init__(
        self,
        is_uring: bool,
        arena: Arena | None,
        block_nbytes: int,
        queue_depth: int,
        num_threads: int,
        max_pending: int,
        min_queue_depth: int = 0,
        max_queue_depth: int = 0,
    ) -> None: ...
    def open(self, path: str, direct: bool, read_only: bool = False) -> int: ...
    def close_file(self, file: int) -> None: ...
    def alignment_nbytes(self, file: int) -> int: ...
    def submit(
        self,
        is_write: bool,
        segments: Iterable[tuple[int, int, int, int]],
        priority: int,
        timeout_s: float | None = None,
    ) -> Ticket: ...
    def sync(self, file: int) -> None: ...
    def drain(self, timeout_s: float | None = None) -> bool: ...
    def close(self) -> None: ...
    def stats(self) -> list[tuple[Any, ...]]:
        """Fields of `FileStats` in order, the two histograms as lists of counts."""

    def lanes(self) -> list[LaneInfo]: ...

class update:  # noqa: N801 (a submodule)
    @staticmethod
    def instruction_sets() -> list[str]: ...
    @staticmethod
    def apply(
        rule: str,
        spans: Sequence[
            tuple[tuple[int, int, Sequence[int]], tuple[int, int, Sequence[int]], int, int]
        ],
        coefficients: Sequence[float],
        *,
        is_split: bool,
        is_gradient_bf16: bool,
        is_8bit: bool,
        gradient_scale: float,
        num_threads: int,
        simd: str,
        digests: Sequence[PageDigests] = (),
    ) -> None:
        """Spans are (arrays that are read, arrays that are written, gradient, numel). Arrays are
        (weight, residual or 0, states), addresses as integers; an array may be updated in place.
        8-bit states are two addresses each: codes and scales. `digests` take the checksums of what
        they have of the new weights, residuals and states."""

    SQUARES_NUMEL: int

    @staticmethod
    def sum_squares(values: int, numel: int, sums: int, *, num_threads: int) -> None:
        """Addresses of fp32 (numel,) and of fp64 (ceil(numel / SQUARES_NUMEL),), which is
        written."""

    @staticmethod
    def roots_of(sums: int, count: int, first: int) -> list[float]:
        """The roots of the blocks from `first` on. Address of their sums, fp64 (count,)."""

    @staticmethod
    def num_roots(first: int, last: int) -> int:
        """How many roots the blocks [first, last) have."""

    @staticmethod
    def tree_sum(roots: Sequence[float], bounds: Sequence[int]) -> float:
        """The sum of all blocks, from the roots of runs of blocks. `bounds`: 0, and the end of each
        run."""

    NUM_NORMS: int

    @staticmethod
    def norm_of_bf16(values: int, numel: int, *, simd: str, variant: int) -> float:
        """The 2-norm of bf16 (numel,), summed in fp32 in the lanes of an instruction set.
        `variant`, below `NUM_NORMS`: where products are fused with sums."""

    @staticmethod
    def add(total: int, term: int, numel: int, *, is_bf16: bool, num_threads: int) -> None:
        """Adds `term`, fp32 or bf16 (numel,), to `total`, fp32."""

    @staticmethod
    def multiply(
        product: int, values: int, factor: float, numel: int, *, is_bf16: bool, num_threads: int
    ) -> None:
        """Writes `values`, fp32 or bf16 (numel,), times the factor as fp32 to `product`, fp32."""

    @staticmethod
    def copy(target: int, source: int, nbytes: int, *, num_threads: int) -> None:
        """Copies so many bytes."""

class decode:  # noqa: N801 (a submodule)
    @staticmethod
    def codes(
        codes: int,
        scales: int,
        scale_format: str,
        shape: tuple[int, int, int],
        out: tuple[int, str, tuple[int, int, int]],
        *,
        is_float: bool,
        bits: int,
        packing: str,
        block: tuple[int, int],
        values: Sequence[float],
        product: str,
        zeros: tuple[int, str, int, int],
        order: tuple[int, bool],
        global_scales: tuple[int, bool],
        minima: tuple[int, bool],
        record: tuple[Any, ...] | None,
        times: float,
        num_threads: int,
        simd: str,
    ) -> None:
        """Decodes the codes of a `CodeLayout`. Addresses as integers, 0 for a part that is not
        there. Out is (address, format, strides of matrices, rows, columns)."""
