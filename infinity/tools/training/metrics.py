"""metrics.jsonl: one line per step, appended, and never shortened in place.

A resumed run writes a new file with the lines up to its step. The complete new file takes the name
of the old one, so a crash in between leaves the old file unchanged. A file that cannot be read
completely is kept under another name. If the file cannot be written, lines are kept in memory and
the run continues.

A line is the receipt of its step: numbers to the last bit, and digests of what the step was
computed from. A step that is computed again, after a crash or by `infinity replay`, has the same.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import json
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.bounded import MalformedError, open_regular
from infinity.checkpoint.durable import link_or_copy, sync_directory
from infinity.sizes import MIB
from infinity.storage.lock_file import is_same_file

_LONGEST_LINE_NBYTES = MIB  # Of some 1500 bytes and 20 for each row; longer is damage.
# The keys of a line that a step computed again must have alike, and what they are: causes first.
RECEIPT = {
    "rows": "the rows of the batches",
    "random": "the state of the random generators",
    "loss": "the loss",
    "grad_norm": "the norm of the gradients",
    "gradients": "the norms of the single gradients",
    "learning_rate": "the learning rate",
    "skipped": "what was skipped",
    "state": "weights, masters or moments after the step",
    "held_out_loss": "the held-out loss",
}
# Those of rank 0 alone, and norms, which are rounded otherwise over another number of ranks.
OF_RANKS = ("rows", "random", "grad_norm", "gradients")
_DIGEST_NBYTES = 8


# -- The receipt of a step -------------------------------------------------------------------------


def digest(*parts: Any) -> str:
    """Returns a digest of buffers, for comparisons with accidents rather than with forgers."""
    found = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def digests_of_rows(batch: Mapping[str, Any]) -> list[str]:
    """Returns a digest of each row of a micro-batch: of its integers, such as token ids, labels and
    masks. They are copied from a device, so call it where the device has ended its work."""
    import torch

    tensors = [t for _, t in sorted(batch.items()) if isinstance(t, torch.Tensor) and t.dim()]
    arrays = [t.detach().cpu().numpy() for t in tensors if not t.is_floating_point()]
    count = max(map(len, arrays), default=0)
    return [digest(*(a[row].tobytes() for a in arrays if row < len(a))) for row in range(count)]


def digest_of_random() -> str:
    """Returns a digest of the states of the default generators, without waiting for a device."""
    import torch

    from infinity.modules.accumulate.fiber import state_of_numpy

    _, internal, gauss = random.getstate()
    found = state_of_numpy()
    kind, keys, *rest = found if isinstance(found, tuple) else (found, b"")
    parts = [array.array("I", internal), repr((gauss, kind, rest)).encode(), keys]
    parts.append(torch.get_rng_state().numpy())
    if torch.cuda.is_initialized():
        parts.append(torch.cuda.get_rng_state().numpy())
    return digest(*parts)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Returns by key how two lines of one step differ in what both have, where None is nothing;
    causes first."""
    keys = [key for key in RECEIPT if key in was and key in now and was[key] != now[key]]
    keys = [key for key in keys if key == "skipped" or None not in (was[key], now[key])]
    return {key: _difference(key, RECEIPT[key], was[key], now[key]) for key in keys}


def _difference(key: str, name: str, was: Any, now: Any) -> str:
    if key == "rows" and len(was) == len(now):
        wrong = [row for row, pair in enumerate(zip(was, now, strict=True)) if len(set(pair)) > 1]
        return f"row {wrong[0]} of the step's {len(was)} differs, {len(wrong)} of them in all"
    if key in ("rows", "random", "gradients", "state"):
        return f"{name} differs" if key == "random" else f"{name} differ"
    return f"{name} is {now!r} and was {was!r}"


# -- The file --------------------------------------------------------------------------------------


class MetricsFile:
    """The metrics of one run; close it.

    resumed_at: lines of an earlier run up to this step are kept; 0 keeps none
    say: called once when writing fails, and once when it works again
    """

    def __init__(
        self, path: Path, *, resumed_at: int = 0, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._name = path
        self._path = path  # The file itself, if the name is a link.
        self._resumed_at = resumed_at
        self._say = say
        self._file: int | None = None
        self._pending: list[tuple[int, bytes]] = []
        self._again: dict[int, bytes] = {}  # Lines of steps that are to be computed again.
        self._end_nbytes = 0  # Of the lines that the file has as a whole.
        self._error: OSError | None = None
        self._attempt(self._begin)

    def append(self, step: int, line: str) -> None:
        """Writes the line of a step, or keeps it until it can be written. Says once that a step
        which an interrupted run had computed has another result."""
        self._pending.append((step, line.encode() + b"\n"))
        self._attempt(self._write)
        if step in self._again:
            was, now = json.loads(self._again.pop(step)), json.loads(line)
            if len(was.get("rows", ())) != len(now.get("rows", ())):  # Over other ranks.
                was |= dict.fromkeys(OF_RANKS)
            found = differences(was, now)
            if found:
                self._again.clear()
                self._say(
                    f"warning: step {step} is computed again, and not as before: "
                    f"{'; '.join(found.values())}"
                )

    def sync(self) -> None:
        """Makes the written lines durable against a power cut."""
        if self._file is not None:
            self._attempt(lambda: os.fdatasync(self._file or 0))

    @property
    def lost(self) -> str | None:
        """Describes the lines that are not in the file by now."""
        if self._error is None:
            return None
        reason = self._error.strerror or str(self._error)
        if not self._pending:
            return f"{self._name} may not survive a power cut: {reason}"
        first = self._pending[0][0]
        return f"{len(self._pending)} lines of {self._name}, from step {first} on: {reason}"

    def close(self) -> None:
        """Writes what waits, syncs and closes the file. Reports a failure instead of raising it,
        and how many lines are lost. Idempotent."""
        if self._file is not None or self._pending:
            self._attempt(self._write)
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None
        if self._pending:
            self._say(f"lost: {self.lost}")
            self._pending = []

    def _attempt(self, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            if self._error is None:
                reason = error.strerror or str(error)
                self._say(
                    f"warning: {self._name} cannot be written: {reason}; the run goes on, and its "
                    "lines wait in memory"
                )
            self._error = error
        else:
            if self._error is not None and not self._pending:
                self._error = None
                self._say(f"{self._name} is written again; nothing of it is lost")

    def _write(self) -> None:
        if self._file is None:
            self._begin()
        elif not is_same_file(self._file, str(self._path)):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.dup(self._file), "rb") as file:  # What the removed one has.
                file.seek(0)
                self._replace(line for line in file if line.endswith(b"\n"))
            self._say(f"{self._name} was removed; it was written again, with all its lines")
        while self._pending:
            self._append(self._pending[0][1])
            del self._pending[0]

    def _append(self, line: bytes) -> None:
        """Writes the complete line or nothing: what is there of a line that failed is removed, at
        the latest before another one is written."""
        fd, rest = self._file or 0, memoryview(line)
        if os.fstat(fd).st_size > self._end_nbytes:
            os.ftruncate(fd, self._end_nbytes)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end_nbytes)
            raise
        self._end_nbytes += len(line)

    def _begin(self) -> None:
        """Begins a new file with the kept lines of the previous one."""
        if self._name.is_symlink() and self._name.is_file():
            self._path = Path(os.path.realpath(self._name))
        elif os.path.lexists(self._name) and not (
            stat.S_ISREG(os.lstat(self._name).st_mode) and os.access(self._name, os.R_OK)
        ):
            aside = _free_name(self._name)
            os.rename(self._name, aside)
            self._say(f"{self._name} was no file that can be read; it is kept as {aside}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        damaged: list[int] = []
        self._replace(self._kept_lines(damaged), damaged)

    def _kept_lines(self, damaged: list[int]) -> Iterator[bytes]:
        """Yields the lines of an earlier file up to the resumed step. Notes the numbers of damaged
        lines; a last line that a crash has cut short is none of them."""
        if self._resumed_at == 0 or not self._path.is_file():
            return
        with self._path.open("rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(_LONGEST_LINE_NBYTES)):
                    return
                step, is_complete = _step_of(line), line.endswith(b"\n")
                if step is None and (is_complete or file.read(1)):
                    damaged.append(number)
                elif step is not None and step <= self._resumed_at:
                    yield line if is_complete else line + b"\n"
                elif step is not None:
                    self._again[step] = line

    def _replace(self, lines: Iterator[bytes], damaged: Sequence[int] = ()) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(partial, flags, 0o666)
        try:
            with open(fd, "ab", closefd=False) as file:
                file.writelines(lines)
            os.fsync(fd)
            if damaged:
                aside = _free_name(self._path)
                link_or_copy(self._path, aside)
                self._say(
                    f"{self._name} is damaged: {len(damaged)} lines cannot be read, the first "
                    f"is line {damaged[0]}; it is kept as {aside}, the others stay"
                )
            os.replace(partial, self._path)
            sync_directory(self._path.parent)
            end_nbytes = os.fstat(fd).st_size
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        if self._file is not None:
            os.close(self._file)
        self._file, self._end_nbytes = fd, end_nbytes


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line, or None for a line that no run has written."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


class MetricsReader:
    """Reads the metrics of a run while it writes them; also over a mount, where a line may be seen
    in part. A file that was replaced, as by a resumed run, is read again from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: tuple[int, int] | None = None  # Device and inode.
        self._offset_nbytes = 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Adds the lines that are whole by now to `lines`. Raises OSError if the file cannot be
        opened."""
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            place = found.st_dev, found.st_ino
            if place != self._place or found.st_size < self._offset_nbytes:
                self._place, self._offset_nbytes, self.lines = place, 0, []
            file.seek(self._offset_nbytes)
            while (line := file.readline(_LONGEST_LINE_NBYTES)).endswith(b"\n"):
                self._offset_nbytes += len(line)
                if _step_of(line) is not None:
                    self.lines.append(json.loads(line))


def is_metrics(path: Path) -> bool:
    """Whether the file is empty or begins with a line that a run has written."""
    try:
        with open(open_regular(path), "rb") as file:
            line = file.readline(_LONGEST_LINE_NBYTES)
    except (OSError, MalformedError):
        return False
    # A crash may have cut the line short.
    return not line or line.startswith(b'{"step": ') or _step_of(line) is not None


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside
