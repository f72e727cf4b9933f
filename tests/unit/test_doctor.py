"""The doctor: every judgement from facts, every fact from a made-up /proc and /sys, the command."""

from __future__ import annotations

import errno
import json
import os
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity import uring
from infinity.config import SwapConfig
from infinity.config.machine import HostMemory, cpu_quota, read_field, read_int
from infinity.sizes import GIB, KIB, MIB
from infinity.storage.probe import Refusal
from infinity.tools.doctor import Finding, accelerator, machine, paths, worst
from infinity.tools.doctor.accelerator import Link
from infinity.tools.doctor.paths import DirectTrial, Drive, Health, Mount
from tests.support.commands import imported_by, run_command
from tests.support.forked import run_script

SECCOMP = Refusal("refused, so a seccomp profile blocks it", "Allow io_uring_setup.")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty machine to write files into."""
    return tmp_path / "root"


def put(root: Path, **contents: str) -> None:
    """Writes files; the key is the path with "__" for "/"."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def expect(finding: Finding, status: str, *words: str) -> None:
    """The status, every word somewhere in the line, and cost and remedy where they belong."""
    assert finding.status == status, finding
    text = f"{finding.found} {finding.cost} {finding.remedy}"
    assert [word for word in words if word not in text] == [], text
    assert bool(finding.cost) == (status != "ok")
    assert not (status == "ok" and finding.remedy)


def test_worst_line_is_the_status_of_all() -> None:
    good = Finding("a", "x")
    lines = [good, good.degraded("c"), good.missing("c")]
    assert [worst(lines[:count]) for count in range(4)] == ["ok", "ok", "degraded", "missing"]


def test_files_that_are_not_there_are_none(root: Path) -> None:
    put(root, number="12\n", words="max\n", fields="Seccomp:\t2\nOther: a:b\n")
    assert read_int(root / "number") == 12
    assert read_int(root / "words") is read_int(root / "absent") is None
    assert read_field(root / "fields", "Seccomp") == "2"
    assert read_field(root / "fields", "Other") == "a:b"
    assert read_field(root / "fields", "Absent") is None


def huge_pages(mode: str | None, share: float | None, *, is_wanted: bool = True) -> Finding:
    return machine.check_huge_pages(mode, is_wanted=is_wanted, share=share)


def memlock(limit: int | None, *, is_exempt: bool = False, has_ring: bool = True) -> Finding:
    return machine.check_memlock(limit, arena_nbytes=GIB, is_exempt=is_exempt, has_ring=has_ring)


def ring(engine: str, refusal: Refusal | None, **facts: Any) -> Finding:
    known = {"ring_flags": 1 << 12 | 1 << 13, "sysctl": "0", "seccomp": "2"}
    return machine.check_uring(engine, refusal, **known | facts)


def file_system(kind: str) -> Finding:
    return paths.check_file_system("/p", Mount("/mnt", kind, "/dev/x", "rw"))


def space(capacity: str, free_nbytes: int, total_nbytes: int) -> Finding:
    table = {"tiers": {"nvme": [{"path": "/p", "capacity": capacity}]}}
    return paths.check_space(SwapConfig.load(table).tiers.nvme[0], free_nbytes, total_nbytes)


THERE = HostMemory(8 * GIB, "the cgroup limit of 10 GiB")
BARE: dict[str, Any] = {"ring_flags": 0, "sysctl": None, "seccomp": None}
GPU = SimpleNamespace(name="H200", total_memory=141 * GIB)
FAST = Drive("nvme0n1", "Fast", False, "none", 512 * KIB, 1)
MADVISE = "always [madvise] never"
READS = uring.Probe(0, opcodes=frozenset({"READ", "WRITE"}), max_num_entries=32768)
release, direct = accelerator.check_release, paths.check_direct
cuda, drive = accelerator.check_cuda, paths.check_drive

# (finding, status, words of its line)
JUDGED: list[tuple[Finding, str, tuple[str, ...]]] = [
    (machine.check_kernel("6.18.44-fc"), "ok", ("6.18",)),
    (machine.check_kernel("6.1.0-13-amd64"), "ok", ("6.1",)),
    (machine.check_kernel("5.15.0-91-generic"), "degraded", ("DEFER_TASKRUN",)),
    (machine.check_kernel("5.11.0"), "degraded", ("DEFER_TASKRUN",)),
    (machine.check_kernel("5.10.0"), "degraded", ("2-3 times",)),
    (machine.check_kernel("unreadable"), "degraded", ("Boot Linux",)),
    (ring("auto", None), "ok", ("DEFER_TASKRUN", "io_uring_disabled=0", "seccomp filter")),
    (ring("auto", SECCOMP), "degraded", ("Allow", "2-3 times")),
    (ring("io_uring", SECCOMP), "missing", ("Allow", '"auto"')),
    (ring("threads", SECCOMP), "ok", ("not asked for",)),
    (ring("auto", None, **BARE), "ok", ("no flags", "no kernel.io_uring_", "not readable")),
    (machine.check_binding(None), "degraded", ("liburing-dev",)),
    (machine.check_binding(uring.Probe(errno.EPERM)), "ok", ("Operation not permitted",)),
    (machine.check_binding(READS), "ok", ("2 operations", "32768")),
    (release("torch", "2.9.1+cu128"), "missing", ("pip install 'torch>=2.10,<3'",)),
    (release("torch", "2.10.0+cu128"), "ok", ("tried: 2.10 to 2.15",)),
    (release("torch", "2.15.0"), "ok", ("2.15.0",)),
    (release("torch", "2.16.0.dev20261127"), "degraded", ("pip install 'torch<2.16'",)),
    (release("transformers", "5.15.1"), "missing", ("transformers>=5.16,<6",)),
    (release("transformers", "5.25.0"), "degraded", ("no test has run with it",)),
    (release("trl", "1.15.0"), "missing", ("trl>=1.16,<2",)),
    (release("peft", "0.22.0"), "degraded", ("peft<0.22",)),
    (machine.check_capacity(THERE, 4 * GIB), "ok", ("8.0 GiB", "4.0 GiB", "cgroup limit")),
    (machine.check_capacity(THERE, 9 * GIB), "missing", ("9.0 GiB", "tiers.host.capacity")),
    # What the engine refuses, too: nothing would be left for the program itself.
    (machine.check_capacity(THERE, 8 * GIB), "missing", ("7.6 GiB of it for an arena",)),
    (huge_pages(MADVISE, 1.0), "ok", ("madvise; 100%",)),
    (huge_pages("[always] madvise never", None), "ok", ("not tried",)),
    (huge_pages(MADVISE, 0.5), "degraded", ("compact_memory",)),
    (huge_pages("always madvise [never]", 0.0), "degraded", ("echo madvise",)),
    (huge_pages(None, 0.0), "degraded", ("CONFIG_TRANSPARENT_HUGEPAGE",)),
    (huge_pages(MADVISE, None, is_wanted=False), "degraded", ("tiers.host.huge_pages",)),
    (machine.check_sharing(True), "ok", ("each other's arenas",)),
    (machine.check_sharing(False), "degraded", ("copied twice", "shmem_enabled")),
    (machine.check_shared_files(GIB), "ok", ("1.0 GiB",)),
    (machine.check_shared_files(64 * MIB), "degraded", ("64.0 MiB", "--shm-size")),
    (machine.check_shared_files(None), "degraded", ("there is none",)),
    (memlock(None), "ok", ("none",)),
    (memlock(GIB), "ok", ("1.0 GiB",)),
    (memlock(8 * MIB, is_exempt=True), "ok", ("may exceed",)),
    (memlock(8 * MIB), "degraded", ("ulimit -l",)),
    (memlock(8 * MIB, has_ring=False), "ok", ("pins nothing",)),
    (paths.check_checksums(True, "vpclmul"), "ok", ("vpclmul",)),
    (paths.check_checksums(True, "table"), "degraded", ("without an instruction",)),
    (paths.check_checksums(False, "vpclmul"), "degraded", ("io.verify = false",)),
    (file_system("ext4"), "ok", ("/dev/x",)),
    (file_system("xfs"), "ok", ("/mnt",)),
    (file_system("tmpfs"), "degraded", ("memory",)),
    (file_system("nfs4"), "degraded", ("network",)),
    (file_system("fuse.sshfs"), "degraded", ("network",)),
    (file_system("overlay"), "degraded", ("docker run -v",)),
    (file_system("btrfs"), "degraded", ("chattr +C",)),
    (paths.check_file_system("/p", None), "ok", ("not readable",)),
    (direct("/p", "auto", DirectTrial(0, 4, 512)), "ok", ("memory 4, offset 512",)),
    (direct("/p", "auto", DirectTrial(0)), "ok", ("4096 is assumed",)),
    (direct("/p", "always", DirectTrial(0, 512, 4096)), "ok", ("offset 4096",)),
    (direct("/p", "always", DirectTrial(0, 512, 16384)), "missing", ("16384",)),
    (direct("/p", "auto", DirectTrial(errno.EINVAL)), "degraded", ("page cache",)),
    (direct("/p", "always", DirectTrial(errno.EINVAL)), "missing", ('direct = "auto"',)),
    (direct("/p", "never", DirectTrial(0, 512, 512)), "degraded", ('direct = "auto"',)),
    (space("auto", 50 * GIB, 100 * GIB), "ok", ("50.0 GiB of 100.0 GiB",)),
    (space("auto", 5 * GIB, 100 * GIB), "degraded", ("fstrim",)),
    (space("60GiB", 50 * GIB, 100 * GIB), "missing", ("60.0 GiB",)),
    (space("auto", 0, 0), "ok", ("does not say",)),
    (drive("/p", FAST), "ok", ("nvme0n1 Fast", "512.0 KiB", "NUMA node 1")),
    (drive("/p", Drive("vda", "", True, "", 0, None)), "ok", ("virtual",)),
    (drive("/p", None), "ok", ("not visible",)),
    (accelerator.check_torch("2.11.0", ""), "ok", ("2.11.0",)),
    (accelerator.check_torch(None, "No module"), "missing", ("No module", "pip install")),
    (cuda("auto", [GPU], built_for="13.0"), "ok", ("H200, 141.0 GiB", "13.0")),
    (cuda("cpu", [], built_for=None), "ok", ("not asked for",)),
    (cuda("auto", [], built_for=None), "degraded", ("pytorch.org",)),
    (cuda("auto", [], built_for="13.0"), "degraded", ("--gpus all",)),
    (cuda("cuda", [], built_for="13.0"), "missing", ("nvidia-smi",)),
]


@pytest.mark.parametrize(("finding", "status", "words"), JUDGED)
def test_each_judgement(finding: Finding, status: str, words: tuple[str, ...]) -> None:
    expect(finding, status, *words)


def test_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    new, far = tmp_path / "new", tmp_path / "no" / "new"
    absent, denied = errno.ENOENT, errno.EACCES
    cases = [
        (tmp_path, 0, 0, True, "ok", "writable"),
        (new, absent, 0, True, "ok", f"made in {tmp_path}"),
        (far, absent, absent, True, "missing", "mkdir -p"),
        (file, errno.ENOTDIR, 0, True, "missing", "Not a directory"),
        (far, denied, denied, True, "missing", "Permission denied"),
        (tmp_path, 0, 0, False, "missing", f"chown $USER {tmp_path}"),
        (new, absent, 0, False, "missing", f"chown $USER {tmp_path}"),
    ]
    for path, code, parent_code, is_writable, status, word in cases:
        found = paths.check_directory(
            path, code=code, parent_code=parent_code, is_writable=is_writable
        )
        expect(found, status, word)
    found_codes = [paths.directory_errno(path) for path in (tmp_path, new, far, file)]
    assert found_codes == [0, absent, absent, errno.ENOTDIR]
    assert paths.nearest_directory(tmp_path / "no" / "new") == tmp_path
    assert paths.nearest_directory(file) == tmp_path


MOUNTINFO = """\
27 1 254:0 / / rw - ext4 /dev/vda rw
30 27 0:25 / /dev/shm rw,relatime shared:5 - tmpfs tmpfs rw
31 27 259:1 / /mnt/my\\040drive rw - xfs /dev/nvme0n1p1 rw
32 27 259:2 / /mnt/my\\040drive rw - btrfs /dev/nvme1n1 rw
broken line
"""


def test_the_mount_of_a_path_is_the_nearest_and_newest() -> None:
    assert paths.find_mount("/home/x", MOUNTINFO) == Mount("/", "ext4", "/dev/vda", "rw")
    assert paths.find_mount("/dev/shm", MOUNTINFO) == Mount(
        "/dev/shm", "tmpfs", "tmpfs", "rw,relatime"
    )
    assert paths.find_mount("/dev/shmem", MOUNTINFO) == Mount("/", "ext4", "/dev/vda", "rw")
    newest = Mount("/mnt/my drive", "btrfs", "/dev/nvme1n1", "rw")
    assert paths.find_mount("/mnt/my drive/a/b", MOUNTINFO) == newest
    assert paths.find_mount("/home", "") is None


def test_direct_io_is_tried_and_leaves_nothing_behind(tmp_path: Path) -> None:
    trial = paths.try_direct(tmp_path)
    assert trial.errno in (0, errno.EINVAL)  # EINVAL: tmpfs before Linux 6.6.
    assert list(tmp_path.iterdir()) == []
    assert paths.try_direct(tmp_path / "absent").errno == errno.ENOENT


def make_block(root: Path, name: str, number: str, **contents: str) -> Path:
    """A block device in a made-up sysfs, with the link that leads from its number to it."""
    block = root / "sys/devices" / name
    (block / "slaves").mkdir(parents=True)
    put(block, **contents)
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(block)
    return block


def test_drive_is_found_from_its_partition_and_below_a_mapper(root: Path) -> None:
    disk = make_block(
        root, "nvme0n1", "259:0", queue__rotational="0\n", queue__max_sectors_kb="512\n",
        queue__scheduler="[none] mq-deadline\n", device__model="Fast 1T\n",
        device__numa_node="1\n",
    )  # fmt: skip
    part = make_block(root, "nvme0n1/nvme0n1p1", "259:1", partition="1\n")
    mapper = make_block(root, "dm-0", "253:0")
    (mapper / "slaves" / "nvme0n1p1").symlink_to(part)
    expected = Drive("nvme0n1", "Fast 1T", False, "none", 512 * KIB, 1)
    for number in ((259, 0), (259, 1), (253, 0)):
        assert paths.find_drive(root, os.makedev(*number)) == expected
    assert disk.is_dir() and paths.find_drive(root, os.makedev(8, 0)) is None


def test_drive_with_few_facts_is_reported(root: Path) -> None:
    make_block(root, "sda", "8:0", queue__rotational="1", device__device__numa_node="-1")
    drive = paths.find_drive(root, os.makedev(8, 0))
    assert drive == Drive("sda", "", True, "", 0, None)
    expect(paths.check_drive("/p", drive), "degraded", "sda", "spinning")


def make_log(*, warning: int = 0, spare: int = 100, used: int = 3, units: int = 2_000_000) -> bytes:
    log = bytearray(512)
    log[0], log[3], log[5] = warning, spare, used
    log[48:64] = units.to_bytes(16, "little")
    return bytes(log)


def test_wear_from_the_drive_s_log() -> None:
    """Byte positions: NVM Express Base Specification 2.0, figure "SMART / Health Information"."""
    health = paths.parse_health(make_log())
    assert health == Health(0, 100, 3, 2_000_000 * 512_000)
    expect(paths.check_wear("/p", health, 0), "ok", "3 %", "953.7 GiB")
    worn = paths.parse_health(make_log(used=97))
    expect(paths.check_wear("/p", worn, 0), "degraded", "97 %", "another drive")
    warned = paths.parse_health(make_log(warning=4, spare=2))
    expect(paths.check_wear("/p", warned, 0), "degraded", "0x04", "2 % spare")
    with pytest.raises(OSError, match="no health log"):
        paths.parse_health(bytes(512))


def test_wear_that_cannot_be_read_is_reported_with_the_cause() -> None:
    expect(paths.examine_wear("/p", "sda"), "ok", "no NVMe drive")
    expect(paths.check_wear("/p", None, errno.EACCES), "degraded", "denied", "root")
    expect(paths.examine_wear("/p", "nvme977n1"), "degraded", "No such file")


def test_cores(root: Path) -> None:
    assert cpu_quota(root) is None
    put(root / "a", **{"sys__fs__cgroup__cpu.max": "150000 100000\n"})
    put(root / "b", **{"sys__fs__cgroup__cpu.max": "max 100000\n"})
    put(
        root / "c",
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
        },
    )
    put(
        root / "d",
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "400000",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000",
        },
    )
    assert [cpu_quota(root / name) for name in "abcd"] == [1.5, None, None, 4.0]
    expect(machine.check_cores(8, None), "ok", "8")
    expect(machine.check_cores(2, 4.0), "ok", "2")
    expect(machine.check_cores(8, 1.5), "degraded", "1.5", "OMP_NUM_THREADS=1")


def test_instruction_sets(root: Path) -> None:
    put(root, proc__cpuinfo="model name\t: Some CPU\nflags\t\t: sse2 avx2 fma avx512f\n\n")
    model, flags = machine.describe_cpu(root)
    found = machine.check_instructions("x86_64", model, flags)
    expect(found, "ok", "Some CPU: avx2, fma, avx512f")
    expect(machine.check_instructions("x86_64", "Old", frozenset()), "degraded", "AVX2", "none")
    put(root, proc__cpuinfo="Features\t: fp asimd bf16\n")
    model, flags = machine.describe_cpu(root)
    expect(machine.check_instructions("aarch64", model, flags), "ok", "asimd, bf16")


def test_numa(root: Path) -> None:
    put(root, sys__devices__system__node__node0__cpulist="0-3\n")
    put(root, sys__devices__system__node__node1__cpulist="4-7\n")
    both = frozenset({0, 1})
    for cores, status, says in (("0,2", "ok", "node 0 of 2"), ("0-7", "degraded", "2 to run")):
        put(root, proc__self__status=f"Mems_allowed_list:\t0\nCpus_allowed_list:\t{cores}\n")
        *_, found = machine.examine_processor(root)
        expect(found, status, says)
    one = frozenset({0})
    expect(machine.check_numa(one, memory_nodes=one, cpu_nodes=one), "ok", "one node")
    expect(machine.check_numa(frozenset(), memory_nodes=one, cpu_nodes=one), "ok", "one node")
    expect(machine.check_numa(both, memory_nodes=one, cpu_nodes=one), "ok", "bound to node 0")
    for memory_nodes, cpu_nodes in ((both, both), (one, both), (both, one), (one, frozenset({1}))):
        found = machine.check_numa(both, memory_nodes=memory_nodes, cpu_nodes=cpu_nodes)
        expect(found, "degraded", "2 nodes", "numactl")


def test_link_speed(root: Path) -> None:
    def card(name: str, lanes: str, most: str, speed: str = "32.0 GT/s PCIe\n") -> Link | None:
        put(root / f"sys/bus/pci/devices/{name}", current_link_width=lanes, max_link_width=most)
        put(root / f"sys/bus/pci/devices/{name}", max_link_speed=speed, numa_node="0\n")
        return accelerator.find_link(root, name)

    full = card("0000:01:00.0", "16\n", "16\n")
    assert full == Link(16, 16, 32.0, 0)
    assert full.max_nbytes_s == pytest.approx(63.0e9, rel=0.001)
    expect(accelerator.check_link(0, full), "ok", "32 GT/s x16", "63.0 GB/s", "NUMA node 0")
    half = card("0000:02:00.0", "8\n", "16\n")
    expect(accelerator.check_link(1, half), "degraded", "only 8 lanes", "2 times")
    assert card("0000:03:00.0", "0\n", "255\n") is None
    assert card("0000:04:00.0", "16\n", "16\n", "Unknown\n") is None
    assert accelerator.find_link(root, "") is accelerator.find_link(root, "absent") is None
    expect(accelerator.check_link(0, None), "ok", "not visible")
    kernels = accelerator.check_kernels(0, {"MXFP4": "", "NF4": ""})
    expect(kernels, "ok", "Triton for MXFP4, NF4")
    kernels = accelerator.check_kernels(0, {"MXFP4": "", "NF4": "triton is not installed"})
    expect(kernels, "degraded", "Triton for MXFP4; NF4: triton is not installed", "for NF4")
    # Generations 1 to 6, x16, as their specifications put it (GB/s).
    for rate, gigabytes_s in ((2.5, 4), (5, 8), (8, 15.75), (16, 31.5), (64, 121)):
        link = Link(16, 16, rate, None)
        assert link.max_nbytes_s / 1e9 == pytest.approx(gigabytes_s, rel=0.001)


# -------------------------------------------------------------------------------- the command


def run(*arguments: str | Path) -> Any:
    return run_command("doctor", *arguments)


def subjects(report: dict[str, Any]) -> dict[str, str]:
    return {row["subject"]: row["status"] for row in report["findings"]}


def test_json_holds_every_subject_once(tmp_path: Path) -> None:
    result = run("--json", "--path", tmp_path)
    report = json.loads(result.stdout)
    names = [row["subject"] for row in report["findings"]]
    assert len(names) == len(set(names))
    assert {
        "kernel", "io_uring", "liburing binding", "host memory", "huge pages",
        "memory of ranks", "/dev/shm", "memlock limit",
        f"{tmp_path}: direct I/O", f"{tmp_path}: free space", "cores", "instruction sets", "NUMA",
        "torch", "CUDA",
    } <= set(names)  # fmt: skip
    assert result.exit_code == (1 if report["status"] == "missing" else 0)
    for row in report["findings"]:
        assert bool(row["cost"]) == (row["status"] != "ok"), row


def test_what_a_configuration_needs_and_lacks_is_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('[tiers.host]\ncapacity = "900TiB"\n[[tiers.nvme]]\npath = "a/b/c"\n')
    result = run("--json", file)
    found = subjects(json.loads(result.stdout))
    assert (result.exit_code, found["host memory"]) == (1, "missing")
    assert found[f"{tmp_path}/a/b/c: directory"] == "missing"
    assert f"{tmp_path}/a/b/c: direct I/O" not in found  # Nothing to try.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["swap.toml"]
    printed = run(file)
    assert printed.exit_code == 1
    assert f"remedy: Mount the drive, or: mkdir -p {tmp_path}/a/b" in printed.stdout


def test_several_paths_or_a_file_but_not_both(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    report = json.loads(
        run("--json", "--path", tmp_path / "one", "--path", tmp_path / "two").stdout
    )
    assert {f"{tmp_path}/one: directory", f"{tmp_path}/two: directory"} <= set(subjects(report))
    file = tmp_path / "swap.toml"
    file.write_text("")
    assert run(file, "--path", tmp_path).exit_code == 2


def test_faulty_configuration_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text("[io]\nthread = 3\n")
    result = run(file)
    assert result.exit_code == 2 and "io.thread" in result.stderr


def test_in_an_unprivileged_container(tmp_path: Path) -> None:
    """No privileges, little memlock, io_uring refused by seccomp: a report, and no exception."""
    script = """
    import ctypes, os, resource, struct, sys, warnings
    import torch  # Before privileges are gone: the library's folder may be the owner's only.
    import infinity.tools.doctor
    from infinity.tools.cli import main

    # Load the syscall's number; io_uring_setup (425): EPERM; everything else: allowed.
    program = b"".join(struct.pack("HBBI", *each) for each in (
        (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000),
    ))
    filter = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(filter))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header) == 0  # PR_SET_SECCOMP, a filter
    sys.argv = ["infinity", "doctor", "--json", "--path", sys.argv[1]]
    main()
    """
    done = run_script(textwrap.dedent(script), tmp_path)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    rows = {row["subject"]: row for row in report["findings"]}
    assert rows["io_uring"]["status"] == "degraded"
    assert "seccomp profile" in rows["io_uring"]["found"]
    assert "seccomp filter" in rows["io_uring"]["found"]
    if os.geteuid() == 0:  # Then the directory is somebody else's to that process.
        assert rows[f"{tmp_path}: directory"]["status"] == "missing"
        assert done.returncode == 1


def test_help_imports_no_torch() -> None:
    code = "from infinity.tools.cli import app; app(['doctor', '--help'])"
    found, printed = imported_by(code, ["torch"])
    assert not found and "--help" in printed
