"""Threads of which calls are taken until the process is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from infinity.storage.daemon_threads import DaemonThreads


def _named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_one_thread_carries_out_calls_in_order_behind_its_beginning() -> None:
    seen: list[object] = []
    threads = DaemonThreads(1, "in-order", lambda: seen.append("begun"))
    futures = [threads.submit(lambda n=n: seen.append(n) or -n) for n in range(50)]
    assert [future.result() for future in futures] == [-n for n in range(50)]
    assert seen == ["begun", *range(50)]
    threads.close()
    threads.close()
    assert not _named("in-order")
    with pytest.raises(RuntimeError, match="after close"):
        threads.submit(print)


def test_close_waits_for_calls() -> None:
    done: list[int] = []
    threads = DaemonThreads(2, "waited-for")
    for n in range(4):
        threads.submit(lambda n=n: (time.sleep(0.02), done.append(n)))
    threads.close()
    assert sorted(done) == [0, 1, 2, 3] and not _named("waited-for")


def test_an_error_is_that_of_the_call_or_of_the_beginning() -> None:
    threads = DaemonThreads(1, "failing")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
    assert threads.submit(lambda: 1).result() == 1
    threads.close()

    def refuse() -> None:
        raise OSError("of the test")

    threads = DaemonThreads(1, "refusing", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="of the test"):
            threads.submit(lambda: 1).result()
    threads.close()


def test_threads_end_with_an_object_that_nobody_closes() -> None:
    threads = DaemonThreads(2, "collected")
    threads.submit(lambda: None).result()
    assert len(_named("collected")) == 2
    del threads
    gc.collect()
    deadline_s = time.monotonic() + 60
    while _named("collected") and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _named("collected")


SCRIPT = """
import atexit
from infinity.storage.daemon_threads import DaemonThreads

begun, fresh = DaemonThreads(1, "begun"), DaemonThreads(1, "fresh")
begun.submit(int).result()

@atexit.register
def at_exit():
    print(begun.submit(lambda: 1).result() + fresh.submit(lambda: 2).result())
    begun.close()
    fresh.close()
"""


def test_calls_are_taken_in_exit_handlers() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")
