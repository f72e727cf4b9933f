"""One heap for all threads: what one of them has freed the next one uses."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, re, threading
from infinity.training.allocator import keep_freed_memory

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
