"""The liburing binding: what a raw ring promises, and what the kernel answers through it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity import uring
from infinity.sizes import MIB, PAGE_NBYTES
from infinity.storage.probe import explain_missing_uring, probe_uring
from infinity.uring import Completion, Raw, Ring, RingError, SetupFlag

FLAG_SETS = [
    SetupFlag.NONE,
    SetupFlag.COOP_TASKRUN,
    SetupFlag.SINGLE_ISSUER | SetupFlag.DEFER_TASKRUN,
    SetupFlag.SQPOLL,
]


@pytest.fixture(autouse=True)
def _needs_a_kernel_with_rings() -> None:
    if (cause := explain_missing_uring()) is not None:
        pytest.skip(f"io_uring does not work here: {cause}")


@pytest.fixture(params=FLAG_SETS, ids=str)
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    with Ring(8, request.param) as ring:
        yield ring


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Descriptor of a file of 100,000 bytes that are all different by position."""
    path = tmp_path / "data"
    path.write_bytes(content(100_000))
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def content(nbytes: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(nbytes))


ZEROS = os.open("/dev/zero", os.O_RDONLY)


def prepare(ring: Ring, token: object = None) -> None:
    """Prepares an operation that succeeds at once."""
    ring.read(ZEROS, bytearray(1), 0, token=token)


def one(ring: Ring) -> Completion:
    (completion,) = ring.wait(1)
    return completion


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_binding_is_built_exactly_when_the_engine_has_uring() -> None:
    """cffi is a build requirement, so nothing but liburing may be missing."""
    assert uring.is_built() == (probe_uring()["step"] != "build")


def test_probe_agrees_with_the_engine_s_own() -> None:
    found, engine = uring.probe(), probe_uring()
    assert (found.is_usable, found.errno) == (engine["usable"], engine["errno"])
    assert engine["ring_flags"] & found.setup_flags == engine["ring_flags"]


def test_probe_names_what_the_engine_is_built_on() -> None:
    found = uring.probe()
    assert {"NOP", "READ", "WRITE", "READ_FIXED", "WRITE_FIXED", "FSYNC"} <= found.opcodes
    assert uring.Feature.NODROP in found.features
    assert found.max_num_entries >= 4096
    assert found.max_num_entries & (found.max_num_entries - 1) == 0


def test_opcode_names_are_the_header_s() -> None:
    """Method: the header's enumeration, read as text, in its order."""
    header = Path("/usr/include/liburing/io_uring.h")
    if not header.exists():
        pytest.skip("liburing's header is not in /usr/include")
    lines = header.read_text().split("enum io_uring_op {")[1].split("IORING_OP_LAST")[0]
    names = [
        line.strip().split(",")[0].split("=")[0].strip().removeprefix("IORING_OP_")
        for line in lines.splitlines()
        if line.strip().startswith("IORING_OP_")
    ]
    shared = min(len(names), len(uring.OPCODES))
    assert shared > 40
    assert list(uring.OPCODES[:shared]) == names[:shared]


def test_flag_and_feature_numbers_are_the_header_s() -> None:
    header = Path("/usr/include/liburing/io_uring.h")
    if not header.exists():
        pytest.skip("liburing's header is not in /usr/include")
    numbers = {}
    for line in header.read_text().splitlines():
        if line.startswith(("#define IORING_SETUP_", "#define IORING_FEAT_")):
            _, name, number = line.split(maxsplit=2)
            numbers[name] = 1 << int(number.split("<<")[1].split(")")[0])
    checked = 0
    for kind, prefix in ((SetupFlag, "IORING_SETUP_"), (uring.Feature, "IORING_FEAT_")):
        for member in kind:
            if prefix + str(member.name) in numbers:
                assert numbers[prefix + str(member.name)] == member
                checked += 1
    assert checked > 15


def test_bytes_written_are_read_back(ring: Ring, file: int) -> None:
    ring.write(file, b"hello", 10, token="write")
    assert one(ring) == Completion("write", 5)
    buffer = bytearray(7)
    ring.read(file, buffer, 9)
    assert one(ring).nbytes == 7
    assert buffer == content(10)[9:] + b"hello" + content(16)[15:]


def test_many_operations_complete_once_each_with_their_token(ring: Ring, file: int) -> None:
    buffers = [bytearray(100) for _ in range(40)]
    done: list[Completion] = []
    for index, buffer in enumerate(buffers):
        while ring.num_free_entries == 0:
            done += ring.wait(0)
        ring.read(file, buffer, 100 * index, token=index)
    while len(done) < 40:
        done += ring.wait(1)
    assert sorted(each.token for each in done) == list(range(40))
    assert all(each.nbytes == 100 for each in done)
    assert b"".join(buffers) == content(4000)
    assert ring.num_in_flight == 0


def test_registered_buffers(ring: Ring, file: int) -> None:
    memory = mmap.mmap(-1, 4 * PAGE_NBYTES)
    first, second = ring.register_buffers([memory, bytearray(64)])
    ring.read(file, first.part(PAGE_NBYTES, 1000), 500, token="read")
    assert one(ring) == Completion("read", 1000)
    assert memory[PAGE_NBYTES : PAGE_NBYTES + 1000] == content(1500)[500:]
    ring.write(file, first.part(PAGE_NBYTES, 64), 0)
    assert one(ring).nbytes == 64
    ring.read(file, second, 0)
    assert one(ring).nbytes == 64
    assert os.pread(file, 64, 0) == content(564)[500:]
    ring.unregister_buffers()
    ring.read(file, first, 0)
    assert one(ring).errno == errno.EFAULT


def test_registered_part_outside_the_buffer_is_refused(ring: Ring) -> None:
    (buffer,) = ring.register_buffers([bytearray(100)])
    for offset, nbytes in ((0, 101), (-1, 1), (100, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            buffer.part(offset, nbytes)


def test_registering_beyond_the_memlock_limit_is_answered_with_enomem(
    run_python: Callable[..., str],
) -> None:
    """Method: a child without privileges and with a limit of 64 KiB."""
    printed = run_python("""
        import os, resource
        from infinity import uring
        uring.is_built()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        print(uring.try_registering(1 << 20))
    """)
    assert int(printed) == errno.ENOMEM
    assert uring.try_registering(PAGE_NBYTES) == 0


def test_reads_are_short_at_the_end_and_empty_after_it(ring: Ring, file: int) -> None:
    buffer = bytearray(1000)
    ring.read(file, buffer, 99_900)
    assert one(ring).nbytes == 100
    assert buffer[:100] == content(100_000)[-100:] and not any(buffer[100:])
    for offset_nbytes in (100_000, 1 << 40):
        ring.read(file, buffer, offset_nbytes)
        assert one(ring).nbytes == 0


def test_failures_are_answers_with_the_kernel_s_errno(ring: Ring, file: int, tmp_path) -> None:
    path = tmp_path / "data"
    read_only, write_only = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
    direct, folder = os.open(path, os.O_RDWR | os.O_DIRECT), os.open(tmp_path, os.O_RDONLY)
    closed = os.dup(file)
    os.close(closed)
    cases = [
        (ring.write, read_only, b"x", errno.EBADF),
        (ring.read, write_only, bytearray(1), errno.EBADF),
        (ring.read, closed, bytearray(1), errno.EBADF),
        (ring.read, -1, bytearray(1), errno.EBADF),
        (ring.read, folder, bytearray(1), errno.EISDIR),
        (ring.read, file, Raw(PAGE_NBYTES, 100), errno.EFAULT),
        (ring.write, file, Raw(PAGE_NBYTES, 100), errno.EFAULT),
        (ring.read, direct, bytearray(100), errno.EINVAL),
    ]
    for operation, fd, memory, code in cases:
        operation(fd, memory, 0)
        completion = one(ring)
        assert completion.errno == code, (operation.__name__, fd)
        with pytest.raises(OSError) as caught:
            _ = completion.nbytes
        assert caught.value.errno == code
    for fd in (read_only, write_only, direct, folder):
        os.close(fd)


def test_full_queue_is_refused_and_goes_on_after_submit(file: int) -> None:
    with Ring(4) as ring:
        for _ in range(4):
            prepare(ring)
        assert ring.num_free_entries == 0
        with pytest.raises(RingError, match="submit") as caught:
            ring.read(file, bytearray(1), 0)
        assert caught.value.errno == errno.EBUSY
        assert ring.submit() == 4
        assert ring.num_free_entries == 4
        prepare(ring, "fifth")
        assert [each.token for each in ring.wait(5)] == [None] * 4 + ["fifth"]


def test_completions_beyond_their_queue_are_not_lost() -> None:
    with Ring(4, num_completions=4) as ring:
        for batch in range(5):
            for index in range(4):
                prepare(ring, 4 * batch + index)
            ring.submit()
        with pytest.raises(ValueError, match="can be held"):
            ring.wait(20)
        done: list[Completion] = []
        while ring.num_in_flight:
            done += ring.wait(1)
    assert sorted(each.token for each in done) == list(range(20))


def test_bad_arguments_leave_the_queue_as_it_was(ring: Ring, file: int) -> None:
    free = ring.num_free_entries
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="offset_nbytes"):
            ring.read(file, bytearray(1), bad)
    with pytest.raises(ValueError, match="descriptor"):
        ring.read(2**40, bytearray(1), 0)
    with pytest.raises(BufferError):
        ring.read(file, b"not writable", 0)
    with pytest.raises(ValueError, match="memory"):
        ring.write(file, Raw(PAGE_NBYTES, 2**32), 0)
    assert (ring.num_free_entries, ring.num_in_flight) == (free, 0)


def test_waiting_for_more_than_there_is_is_refused(ring: Ring) -> None:
    assert ring.wait(0) == []
    prepare(ring)
    with pytest.raises(ValueError, match="1 operations"):
        ring.wait(2)
    with pytest.raises(ValueError, match="expected"):
        ring.wait(-1)


def test_wait_gives_up_in_time_and_loses_nothing() -> None:
    """Method: a pipe that is written only after the first wait has timed out."""
    reader, writer = os.pipe()
    with Ring(4) as ring:
        buffer = bytearray(5)
        prepare(ring, "there")
        ring.read(reader, buffer, 0, token="pipe")
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ring.wait(2, timeout_s=0.05)
        assert time.monotonic() - started_s > 0.04
        assert ring.num_in_flight == 2
        os.write(writer, b"hello")
        assert {each.token for each in ring.wait(2, timeout_s=60)} == {"there", "pipe"}
        assert buffer == b"hello"
    os.close(reader)
    os.close(writer)


def test_signal_handler_runs_and_the_wait_goes_on() -> None:
    reader, writer = os.pipe()

    def answer(*unused: object) -> None:
        os.write(writer, b"x")

    before = signal.signal(signal.SIGALRM, answer)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with Ring(4) as ring:
            ring.read(reader, bytearray(1), 0)
            assert one(ring).nbytes == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(reader)
        os.close(writer)


def test_close_waits_for_what_uses_memory() -> None:
    reader, writer = os.pipe()
    buffer = bytearray(5)
    ring = Ring(4)
    ring.read(reader, buffer, 0)
    ring.submit()
    later = threading.Timer(0.1, os.write, (writer, b"hello"))
    later.start()
    ring.close()
    assert buffer == b"hello"
    later.join()
    os.close(reader)
    os.close(writer)


def test_memory_lives_until_its_completion_is_taken(file: int) -> None:
    """A buffer that nobody else knows cannot be resized or freed under the kernel."""
    with Ring(4) as ring:
        buffer = bytearray(100)
        ring.read(file, buffer, 0)
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        one(ring)
        buffer.extend(b"more")


def test_close_is_idempotent_and_final(file: int) -> None:
    ring = Ring(4)
    prepare(ring)  # Not submitted: dropped.
    ring.close()
    ring.close()
    for call in (ring.submit, lambda: prepare(ring), ring.opcodes, lambda: ring.wait(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_forgotten_ring_is_reported_and_closed() -> None:
    before = num_descriptors()
    with pytest.warns(ResourceWarning, match="not closed"):
        Ring(4)
        gc.collect()
    assert num_descriptors() == before


def test_open_and_close_leak_nothing(file: int) -> None:
    """Method: descriptors and mappings after 300 rings, used in every way, are those before."""

    def use() -> None:
        with Ring(4, SetupFlag.SINGLE_ISSUER) as ring:
            (buffer,) = ring.register_buffers([bytearray(100)])
            ring.read(file, buffer, 0)
            assert one(ring).nbytes == 100
        with pytest.raises(RingError):
            Ring(1 << 30)

    def num_mappings() -> int:
        return sum("io_uring" in line for line in Path("/proc/self/maps").read_text().splitlines())

    use()
    descriptors, mappings = num_descriptors(), num_mappings()
    for _ in range(300):
        use()
    assert (num_descriptors(), num_mappings()) == (descriptors, mappings)


def test_refused_setup_names_call_and_errno() -> None:
    with pytest.raises(RingError, match="io_uring_setup") as caught:
        Ring(4, SetupFlag.DEFER_TASKRUN)  # Needs SINGLE_ISSUER.
    assert (caught.value.errno, caught.value.call) == (errno.EINVAL, "io_uring_setup")
    with pytest.raises(ValueError, match="SetupFlag"):
        Ring(4, SetupFlag(1 << 11))  # CQE32 would change the layout of completions.


def test_single_issuer_refuses_another_thread() -> None:
    with Ring(4, SetupFlag.SINGLE_ISSUER | SetupFlag.DEFER_TASKRUN) as ring:
        prepare(ring)
        ring.wait(1)
        caught: list[BaseException] = []

        def intrude() -> None:
            prepare(ring)
            try:
                ring.submit()
            except RingError as error:
                caught.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert [error.errno for error in caught] == [errno.EEXIST]


def test_ring_in_a_forked_child_is_refused(run_python: Callable[..., str]) -> None:
    printed = run_python("""
        import os
        from infinity.errors import UnsupportedError
        from infinity.uring import Ring
        ring = Ring(4)
        ring.read(os.open("/dev/zero", os.O_RDONLY), bytearray(1), 0)
        child = os.fork()
        if child == 0:
            try:
                ring.submit()
            except UnsupportedError as error:
                ring.close()
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), len(ring.wait(1)))
        ring.close()
    """)
    assert printed.split() == ["7", "1"]


def test_absent_binding_is_an_error_that_names_the_remedy(run_python: Callable[..., str]) -> None:
    printed = run_python("""
        import sys
        sys.modules["infinity._uring"] = None  # What an import of it then raises: ImportError.
        from infinity import uring
        from infinity.errors import UnsupportedError
        assert not uring.is_built()
        for call in (uring.Ring, uring.probe):
            try:
                call()
            except UnsupportedError as error:
                print(error)
    """)
    assert printed.count("Install liburing-dev and cffi") == 2


def test_no_descriptor_left_is_an_answer_of_the_probe(run_python: Callable[..., str]) -> None:
    printed = run_python("""
        import os, resource
        from infinity import uring
        uring.is_built()
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        found = uring.probe()
        print(found.is_usable, found.errno, len(found.opcodes))
    """)
    assert printed.split() == ["False", str(errno.EMFILE), "0"]


def test_raw_ring_reads_direct_in_large_blocks(tmp_path: Path) -> None:
    """What benchmarks do with it: registered memory, O_DIRECT, several blocks in flight."""
    path = tmp_path / "large"
    data = os.urandom(4 * MIB)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = mmap.mmap(-1, 4 * MIB)
    with Ring(8, SetupFlag.SINGLE_ISSUER | SetupFlag.DEFER_TASKRUN) as ring:
        is_pinned = uring.try_registering(4 * MIB) == 0
        assert is_pinned or soft < 4 * MIB
        whole = ring.register_buffers([memory])[0] if is_pinned else None
        view = memoryview(memory)
        for at in range(0, 4 * MIB, MIB):
            ring.read(fd, whole.part(at, MIB) if whole else view[at : at + MIB], at)
        assert all(each.nbytes == MIB for each in ring.wait(4))
    assert memory[:] == data
    os.close(fd)
