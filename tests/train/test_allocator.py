"""One heap for all threads: what one of them has freed the next one uses. So on a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from infinity.tools.training.process import expand_segments
from tests.support.forked import run_script

PROGRAM = """
import ctypes, re, threading
from infinity.tools.training.process import keep_freed_memory

if {is_tuned}:
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def work():  # Blocks below the size that is mapped by itself; the last one keeps the heap's top.
    blocks = [libc.malloc(100 << 10) for _ in range(200)]
    for block in blocks:
        ctypes.memset(block, 1, 100 << 10)
    for block in blocks[:-1]:
        libc.free(block)

threads = []
for _ in range(8):
    done, stay = threading.Event(), threading.Event()
    threads.append(stay)
    threading.Thread(target=lambda: (work(), done.set(), stay.wait())).start()
    done.wait()
print(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
for stay in threads:
    stay.set()
"""


def test_threads_in_turn_keep_the_memory_of_one() -> None:
    """Eight threads that need 20 MB each, one after the other, all still there at the end."""
    kept_kib = {
        is_tuned: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM.format(is_tuned=is_tuned)],
                capture_output=True, text=True, check=True,
            ).stdout
        )
        for is_tuned in (False, True)
    }  # fmt: skip
    assert kept_kib[False] - kept_kib[True] > 5 * 20_000


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_device_memory_expand_unless_the_user_has_configured_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chosen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", chosen)
    assert expand_segments() and chosen == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    configured = {name: "max_split_size_mb:512"}
    monkeypatch.setattr(os, "environ", configured)
    assert not expand_segments() and configured == {name: "max_split_size_mb:512"}


def test_torch_reads_the_setting_of_segments_after_its_import() -> None:
    """`infinity train` sets it when torch is imported, and no device has been used."""
    program = """
import os, torch
from infinity.tools.training.process import expand_segments
[os.environ.pop(name, None) for name in list(os.environ) if name.endswith("ALLOC_CONF")]
assert expand_segments()
print(torch._C._accelerator_getAllocatorSettings())
"""
    found = run_script(program)
    assert found.stdout.strip() == "expandable_segments:True", found.stderr
