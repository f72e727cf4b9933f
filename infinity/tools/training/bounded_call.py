"""Calls a function that runs a stranger's code, such as a chat template, with bounds.

A template is a program. Python cannot end a loop of it, nor the computation of one large number,
and a string that doubles forty times takes all memory. So a forked child makes the calls: the
kernel ends it when a call takes too much processor time, and refuses it more memory. The limits
count what the calls take beyond the state of the process at the fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from infinity.errors import ConfigError
from infinity.sizes import GIB, format_nbytes

MOST_CPU_S = 5.0
MOST_NBYTES = 2 * GIB
_NBYTES_PER_S = 200_000  # A slow tokenizer's.

_Renew = Callable[[int], None]


def call_bounded(
    function: Callable[[Any, _Renew], Any],
    values: Sequence[Any],
    *,
    place_of: Callable[[Any], str],
) -> Iterator[Any]:
    """Yields `function(value, renew)` for each value, as a child process computes them in order.

    The child may use `MOST_CPU_S` of processor time for a value, and after each `renew(nbytes)` as
    much again with what so long a text needs, and `MOST_NBYTES` of memory beyond that of this
    process. `place_of` names a value in messages. Results are pickled.

    Raises ConfigError: that of `function`, or for a call that exceeds a bound or fails.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # The child takes no lock that another thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _serve(function, values, writer, place_of)
    os.close(writer)
    try:
        with open(reader, "rb") as stream:
            for value in values:
                try:
                    is_done, content = pickle.load(stream)
                except (EOFError, pickle.UnpicklingError):
                    raise _exceeded(pid, place_of(value)) from None
                if not is_done:
                    raise ConfigError(content or _too_large(place_of(value)))
                yield content
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # `_exceeded` has waited for it.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(
    function: Callable[[Any, _Renew], Any],
    values: Sequence[Any],
    writer: int,
    place_of: Callable[[Any], str],
) -> NoReturn:
    """Is the child process."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust writes pages when memory ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends the child.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.freeze()  # Objects of the parent are not finalized here.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Its threads are the parent's.
        used_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = used_nbytes + MOST_NBYTES
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        with open(writer, "wb") as stream:
            for value in values:
                _renew(0)
                try:
                    answer = (True, function(value, _renew))
                except ConfigError as error:
                    answer = (False, str(error))
                except MemoryError:
                    answer = (False, "")
                except Exception as error:
                    answer = (False, f"{place_of(value)}: the chat template fails: {error!r}")
                pickle.dump(answer, stream)
                stream.flush()
    finally:
        os._exit(0)


def _renew(nbytes: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S + nbytes / _NBYTES_PER_S)


def _exceeded(pid: int, place: str) -> ConfigError:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return ConfigError(
            f"{place}: the chat template takes more than {MOST_CPU_S:.0f} s of processor time, and "
            f"1 s for each {_NBYTES_PER_S // 1000} kB; expected one that ends. Repair its loops"
        )
    return ConfigError(_too_large(place))


def _too_large(place: str) -> str:
    return (
        f"{place}: the chat template takes more than {format_nbytes(MOST_NBYTES)} of memory; "
        "expected one that writes the record and little else. Repair its loops, or shorten the "
        "record"
    )
