"""The output directory: its owner, its lock, and the check that a run may write there."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infinity.bounded import (
    MAX_TEXT_NBYTES,
    MalformedError,
    field,
    integer,
    list_of,
    read_json,
    table_of,
)
from infinity.checkpoint.durable import make_directory, replace_file
from infinity.config import ConfigSource, JobConfig, SwapConfig
from infinity.config.paths import RUN_NAMES
from infinity.config.source import override
from infinity.errors import ConfigError, StorageError, listed, refusing, reporting
from infinity.storage.lock_file import is_same_file, try_lock
from infinity.tools.training.metrics import is_metrics

_log = logging.getLogger(__name__)

MARKER_NAME, SUMMARY_NAME = RUN_NAMES[:2]
BEST_NAME = "best"  # The directory of the lowest held-out loss.
LOCK_NAME = ".infinity-run.lock"
# The error numbers of file systems without locks, such as some network mounts.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def config_of_run(directory: Path, overrides: Sequence[str] = ()) -> JobConfig | None:
    """Returns the configuration that `infinity train` has left in an output directory; None for
    another directory. `overrides` are KEY=VALUE. Raises ConfigError if it cannot be used."""
    marker = directory / MARKER_NAME
    if not marker.is_file():
        return None
    table = _marked(marker, "config", None, table_of)
    for text in overrides:
        override(table, text)
    return JobConfig.of(SwapConfig.from_table(table, ConfigSource("file", str(marker), directory)))


def receipts_of_run(directory: Path) -> list[dict[str, Any]]:
    """Returns what `Job.receipt` said to the processes that have made the steps of a run, in order.
    `after` of each is the step that it went on from, and `has_accepted` whether with other settings
    than those of its checkpoint. Raises ConfigError."""
    found: list[dict[str, Any]] = _marked(directory / MARKER_NAME, "receipts", [], _receipts)
    return found


def _receipts(value: Any, what: str) -> list[dict[str, Any]]:
    found = [table_of(row, f"one of {what}") for row in list_of(value, what)]
    for row in found:
        for key in ("after", "threads", "ranks"):
            integer(field(row, key), key)
        integer(row.get("tile", 0), "tile")
        for key in ("has_accepted", "tokens_sha256", "base", "versions", "device"):
            field(row, key)
        table_of(row["versions"], "versions")
        table_of(row["base"] or {}, "base")
        table_of(row.get("others", {}), "others")
    return found


def _marked(marker: Path, key: str, default: Any, kind: Callable[[Any, str], Any]) -> Any:
    kinds = (OSError, MalformedError)
    with refusing(f"{marker} cannot be used", *kinds, remedy="; give --config"):
        content = table_of(read_json(marker, max_nbytes=MAX_TEXT_NBYTES), "it")
        return kind(content.get(key, default), f"'{key}' in it")


class OutputDirectory:
    """The output directory of a run, locked until `close`. The constructor changes nothing else in
    it.

    Accepted are a directory that is new, empty or marked by an earlier run, and the directory
    around `resumed`, the checkpoint to continue from. Raises ConfigError for a foreign directory,
    for one that the run also reads from, and for one that another process uses; StorageError if it
    cannot be written.
    """

    def __init__(self, config: JobConfig, *, resumed: Path | None = None) -> None:
        self.path = config.output.directory
        self._config = config
        self._lock: int | None = None
        self.is_unmarked = False  # Accepted without a mark, for the checkpoint in it.
        self._marker = self.path / MARKER_NAME
        self._receipts: list[dict[str, Any]] = []
        with reporting("open", self.path):
            self._claim(resumed)

    def _claim(self, resumed: Path | None) -> None:
        directory, config = self.path, self._config
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"output.directory: {directory} is no directory")
        for key, place in _directories_of_others(config):
            if os.path.realpath(directory) == os.path.realpath(place):
                raise ConfigError(f"output.directory and {key} are the same directory, {directory}")
        _refuse_metrics(config, is_new=resumed is None)
        make_directory(directory)
        with reporting("write", directory), tempfile.TemporaryFile(dir=directory):
            pass
        names = sorted(set(os.listdir(directory)) - {LOCK_NAME})
        self.is_unmarked = bool(names) and MARKER_NAME not in names
        is_inside = resumed is not None and resumed.resolve().is_relative_to(directory.resolve())
        if self.is_unmarked and not is_inside:
            raise ConfigError(
                f"output.directory: {directory} has files that no run of infinity wrote "
                f"({listed(names)}): there is no {MARKER_NAME}, by which the directory of a run "
                "is known. Name another directory, or empty it; if a run of yours wrote it and "
                f"only that file was lost, go on after `touch {directory / MARKER_NAME}`"
            )
        self._lock = locked(directory)

    def mark(
        self, receipt: dict[str, Any] | None = None, *, after: int = 0, has_accepted: bool = False
    ) -> None:
        """Writes the marker of this program, with the configuration, and the receipt of a process
        that makes the steps after `after`: see `receipts_of_run`."""
        if receipt is not None:
            with contextlib.suppress(ConfigError):  # Somebody has made the marker.
                earlier = receipts_of_run(self.path) if after else []
                self._receipts = [found for found in earlier if found["after"] < after]
            self._receipts.append({"after": after, "has_accepted": has_accepted, **receipt})
        table, adapter = self._config.to_dict(), self._config.adapter
        if adapter is not None:  # What the file leaves out is decided by a saved adapter.
            table["adapter"] = {k: table["adapter"][k] for k in adapter.set_keys}
        content = {"program": "infinity train", "config": table, "receipts": self._receipts}
        with reporting("write", self._marker):
            replace_file(self._marker, json.dumps(content, indent=2) + "\n")

    def restore(self) -> bool:
        """Makes a removed directory again. Returns whether it was removed. Raises as the
        constructor does."""
        with reporting("open", self.path):
            if self._marker.exists():
                return False
            make_directory(self.path)
            self.close()
            self._lock = locked(self.path)
        self.mark()
        return True

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        if self._lock is None:
            return
        unlock(self._lock, self.path)
        self._lock = None


def _refuse_metrics(config: JobConfig, *, is_new: bool) -> None:
    """Raises ConfigError for a place of metrics that has another use. A new run replaces metrics of
    an earlier one; a resumed one keeps a file of anything else under another name."""
    path, inputs = config.output.metrics_path, (*config.data.paths, *config.data.eval_paths)
    # What a run reads, and what it writes beside its metrics.
    places = [("checkpoint.directory", config.checkpoint_directory)]
    places += [*_directories_of_others(config), *(("data", of.location) for of in inputs)]
    real, output = (Path(os.path.realpath(p)) for p in (path, config.output.directory))
    for key, place in places:
        own = Path(os.path.realpath(place))
        is_inside = real.is_relative_to(own) and not output.is_relative_to(own)
        if is_inside or own.is_relative_to(real):
            raise ConfigError(
                f"output.metrics: {path} is {place}, which {key} names, or a file in it or above "
                "it; expected a file that nothing else uses"
            )
    if is_new and os.path.lexists(path) and not is_metrics(path):
        raise ConfigError(
            f"output.metrics: {path} already exists and has no lines of metrics; expected the "
            "name of a new file, or of one that a run wrote. Remove it, or name another"
        )


def _directories_of_others(config: JobConfig) -> Iterator[tuple[str, Path]]:
    """Yields (key, path) of what a run uses besides its output."""
    for index, tier in enumerate(config.tiers.nvme):
        yield f"tiers.nvme[{index}].path", tier.path
    if config.model.path is not None:
        yield "model.path", config.model.path
    if config.train.distill is not None:
        yield "train.distill.teacher", config.train.distill.teacher
    if config.train.grpo is not None and config.train.grpo.reward_model is not None:
        yield "train.grpo.reward_model", config.train.grpo.reward_model


def _lock_of(output: Path) -> Path:
    return output / LOCK_NAME if output.is_dir() else output.with_name(f".{output.name}.lock")


def locked(output: Path) -> int:
    """Returns a descriptor that owns the lock of an output: a directory, or a file. The kernel
    releases it with the process. Raises ConfigError if another one has it."""
    path = _lock_of(output)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path} is no file; remove it")
            if not _try_lock(fd, path):
                holder = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
                raise ConfigError(
                    f"the output {output} is in use by {holder}; give every run its own output, or "
                    "end that process"
                )
            # The former owner may have removed the file between open and flock.
            if is_same_file(fd, str(path)):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def unlock(lock: int, output: Path) -> None:
    """Releases the lock that `locked` has taken of an output, and removes its file."""
    path = _lock_of(output)
    with contextlib.suppress(OSError):
        if is_same_file(lock, str(path)):
            path.unlink()
    os.close(lock)


def _try_lock(fd: int, path: Path) -> bool:
    try:
        return try_lock(fd, str(path))
    except StorageError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning(
            "%s: its file system has no locks (%s); see to it that no other run writes there",
            path.parent, os.strerror(error.errno or 0),
        )  # fmt: skip
        return True
