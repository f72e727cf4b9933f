"""Engines and the world around them: forks, sandboxes, limits, the environment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infinity.errors import ConfigError
from infinity.storage.native_engine import open_engine
from infinity.storage.probe import explain_missing_uring, judge_probe_failure

RunPython = Callable[..., str]

PREAMBLE = """
import ctypes, logging, os, resource, sys, warnings
from infinity.errors import StorageError, UnsupportedError
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_engine
from infinity.storage.protocol import Priority, Segment

def round_trip(engine, arena, path):
    with open(path, "wb") as file:
        file.truncate(1 << 20)
    file = engine.open(path, direct=True)
    arena.memory(0, 1 << 20)[:] = bytes(range(256)) * 4096
    engine.submit("write", [Segment(file, 0, arena.address, 1 << 20)], Priority.STATE).wait()
    target = arena.address + (1 << 20)
    engine.submit("read", [Segment(file, 0, target, 1 << 20)], Priority.STATE).wait()
    assert arena.memory(1 << 20, 1 << 20) == arena.memory(0, 1 << 20)
    return file
"""

FORK = """
engine = open_engine(sys.argv[1], arena=(arena := Arena(4 << 20)))
file = round_trip(engine, arena, sys.argv[2])
segment = Segment(file, 0, arena.address, 4096)
done = engine.submit("read", [segment], Priority.FORWARD)
pid = os.fork()
if pid == 0:
    calls = [
        lambda: engine.submit("read", [segment], Priority.FORWARD),
        lambda: engine.open(sys.argv[2], direct=True),
        lambda: engine.sync(file),
        lambda: engine.close_file(file),
        engine.drain,
        engine.stats,
        engine.close,
        done.wait,
        done.done,
    ]
    for call in calls:
        try:
            call()
        except UnsupportedError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    # A child may open its own, and dies like any Python program: with finalizers.
    own = open_engine(sys.argv[1], arena=(own_arena := Arena(4 << 20)))
    round_trip(own, own_arena, sys.argv[2] + ".child")
    own.close()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
round_trip(engine, arena, sys.argv[2])  # The parent is not disturbed.
engine.close()
"""

SECCOMP = """
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

def refuse(syscall, code):
    # load the number; if equal answer the errno, else allow
    filter = (Instruction * 4)(
        Instruction(0x20, 0, 0, 0),
        Instruction(0x15, 0, 1, syscall),
        Instruction(0x06, 0, 0, 0x00050000 | code),
        Instruction(0x06, 0, 0, 0x7FFF0000),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(Program(4, filter))) == 0  # PR_SET_SECCOMP

refuse(425, int(sys.argv[1]))  # io_uring_setup, the same number on every architecture
arena = Arena(4 << 20)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        with open_engine("auto", arena=arena) as engine:
            assert engine.name == "threads"
            round_trip(engine, arena, sys.argv[2])
assert len(caught) == 1, caught
print(caught[0].message)
try:
    open_engine("io_uring", arena=arena)
except UnsupportedError as error:
    print(error)
else:
    sys.exit("io_uring was expected to be refused")
"""

MEMLOCK = """
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("pid", ctypes.c_int)]

def drop_ipc_lock():
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), (ctypes.c_uint * 6)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    sets[0] &= ~(1 << 14)  # effective
    sets[1] &= ~(1 << 14)  # permitted
    assert libc.capset(ctypes.byref(header), sets) == 0

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
drop_ipc_lock()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
with Arena(16 << 20) as arena, open_engine("io_uring", arena=arena) as engine:
    round_trip(engine, arena, sys.argv[1])
    assert not engine._core.lanes()[0]["has_registered_buffers"]
"""

PINNED = """
import tempfile

def pinned_nbytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmPin"))

clones = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 12)
with Arena(16 << 20) as arena, open_engine("io_uring", arena=arena) as engine:
    round_trip(engine, arena, sys.argv[1])
    assert pinned_nbytes() == 16 << 20, pinned_nbytes()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as other:
        engine.open(other.name, direct=False)
        assert pinned_nbytes() == (1 if clones else 2) * (16 << 20), pinned_nbytes()
    assert [lane["has_registered_buffers"] for lane in engine._core.lanes()] == [True, True]
assert not pinned_nbytes()
"""


def test_forked_child_gets_an_error_and_the_parent_goes_on(
    run_python: RunPython, open_any, native_name, tmp_path
) -> None:
    open_any(native_name)
    run_python(PREAMBLE + FORK, native_name, str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("code", "words"), [(1, ["EPERM", "seccomp", "Docker"]), (38, ["ENOSYS", "gVisor"])]
)
def test_blocked_io_uring_falls_back_to_threads_with_one_warning(
    run_python: RunPython, tmp_path, code: int, words: list[str]
) -> None:
    """A real seccomp filter that refuses io_uring_setup, as container runtimes install it."""
    printed = run_python(PREAMBLE + SECCOMP, str(code), str(tmp_path / "data"))
    for line in printed.strip().splitlines():
        for word in words:
            assert word in line
    assert "threads" in printed


def test_small_memlock_limit_costs_registered_buffers_only(
    run_python: RunPython, open_any, tmp_path
) -> None:
    open_any("io_uring")
    printed = run_python(PREAMBLE + MEMLOCK, str(tmp_path / "data"))
    assert printed.count("without registered buffers") == 1
    assert "ulimit -l" in printed


def test_all_rings_of_all_drives_pin_the_arena_once_and_unpin_it_on_close(
    run_python: RunPython, open_any, tmp_path
) -> None:
    """Where the kernel can clone buffers of a ring, from 6.12 on."""
    open_any("io_uring")
    run_python(PREAMBLE + PINNED, str(tmp_path / "data"))


def test_environment_overrides_auto_only(run_python: RunPython) -> None:
    script = """
    from infinity.storage.native_engine import open_engine
    print(open_engine("auto", arena=None).name, open_engine("threads", arena=None).name)
    """
    assert run_python(script, INFINITY_IO_ENGINE="threads").split() == ["threads", "threads"]


def test_bad_environment_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_IO_ENGINE", "libaio")
    with pytest.raises(ConfigError, match="INFINITY_IO_ENGINE='libaio'"):
        open_engine("auto", arena=None)
    open_engine("threads", arena=None).close()


def test_program_that_forgets_to_close_ends(run_python: RunPython, native_name, tmp_path) -> None:
    script = """
    engine = open_engine(sys.argv[1], arena=(arena := Arena(4 << 20)))
    round_trip(engine, arena, sys.argv[2])
    """
    run_python(PREAMBLE + script.replace("\n    ", "\n"), native_name, str(tmp_path / "data"))


LITTLE_MEMLOCK = """
os.chdir(sys.argv[1])
os.chmod(".", 0o777)
import infinity.storage.native_engine, infinity.storage.probe
for limit in (0, 8192, 16384, 32768):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        continue
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.getuid() == 0:
        os.setuid(65534)  # Root has no such limit.
    warnings.simplefilter("always")
    try:
        open_engine("io_uring", arena=None).close()
    except UnsupportedError as error:
        assert "memlock limit" in str(error) and "ulimit -l" in str(error), error
    with Arena(4 << 20) as arena, warnings.catch_warnings(record=True) as caught:
        engine = open_engine("auto", arena=arena)
        round_trip(engine, arena, f"data-{limit}")
        engine.close()
    if engine.name == "threads":
        assert "memlock limit" in str(caught[0].message), caught
    print(limit, engine.name, flush=True)
    os._exit(0)
"""


def test_too_little_memlock_for_rings_is_named_and_auto_goes_on_with_threads(
    run_python: RunPython, tmp_path
) -> None:
    if explain_missing_uring() is not None:
        pytest.skip("io_uring does not work here")
    printed = run_python(PREAMBLE + LITTLE_MEMLOCK, str(tmp_path)).split()
    assert len(printed) == 8


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ({"code": 1, "sysctl": "2"}, ["io_uring_disabled=2", "administrator"]),
        ({"code": 1, "sysctl": "0"}, ["seccomp", "io_uring_register"]),
        ({"code": 1, "sysctl": None}, ["seccomp"]),
        ({"code": 38, "sysctl": None}, ["ENOSYS", "5.4.0"]),
        ({"code": 12, "sysctl": "0"}, ["ENOMEM", "ulimit -l"]),
        ({"code": 12, "sysctl": "0", "memlock_nbytes": 8192}, ["8.0 KiB", "LimitMEMLOCK"]),
        ({"code": 24, "sysctl": "0"}, ["EMFILE", "ulimit -n"]),
        ({"code": 38, "sysctl": "0", "step": "features"}, ["5.4.0", "5.11"]),
        ({"code": 38, "sysctl": None, "step": "build"}, ["liburing-dev"]),
        ({"code": 5, "sysctl": "0"}, ["EIO"]),
    ],
)
def test_every_refusal_names_cause_and_remedy(failure: dict[str, object], words: list[str]) -> None:
    text = str(judge_probe_failure(**{"step": "io_uring_setup", "kernel": "5.4.0", **failure}))
    for word in words:
        assert word in text
