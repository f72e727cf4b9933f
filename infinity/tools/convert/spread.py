"""Lays the shards of a directory over several drives, so that all of them are read at once.

A shard that lies elsewhere is a symbolic link in the directory; programs open it as before. A file
`.infinity-spread.json` records where each shard goes before any of them is touched. For one shard:

  1. its bytes get a second name at the place: a hard link on the same file system, otherwise a copy
     under a hidden name, which is synced and renamed
  2. with `copy`, the file of the directory gets a second name in `.infinity-originals`
  3. a link is renamed over the file of the directory, and the directory is synced
  4. places that the shard had by an earlier spread are removed

Every point between two system calls leaves a directory that loads. A repeated command continues.
Gather undoes it by the record: the shards become files of the directory again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ValidationError

from infinity.bounded import MalformedError, plain_name, read_json
from infinity.checkpoint.durable import check_space, replace_file, sync_directory
from infinity.config.paths import refuse_no_directory
from infinity.errors import ConfigError, StorageError, corrupt, reporting
from infinity.sizes import MIB
from infinity.storage.lock_file import locked

RECORD_NAME = ".infinity-spread.json"
ORIGINALS_NAME = ".infinity-originals"
_CHUNK_NBYTES = 16 * MIB
_BUSY = "another process is spreading or gathering its shards"

Mode = Literal["move", "copy"]
Progress = Callable[..., None]  # Of `description`, the shard, and `advance`, further bytes.


@dataclass(frozen=True, slots=True)
class ShardMove:
    """One shard of a plan. `place` is the file that will hold its bytes, or the file of the
    directory itself; `source` is the file that holds them now."""

    name: str
    nbytes: int
    source: Path
    place: Path
    is_linked: bool  # On one file system: no byte moves.

    @property
    def is_done(self) -> bool:
        """Whether the file lies at its place already."""
        return self.source == self.place

    @property
    def moved_nbytes(self) -> int:
        """The bytes to copy: none for a file in place, and for one that is hard-linked."""
        return 0 if self.is_done or self.is_linked else self.nbytes


@dataclass(frozen=True, slots=True)
class SpreadPlan:
    """Every shard of a directory with its place, in natural order of names."""

    directory: Path
    mode: Mode
    moves: tuple[ShardMove, ...]

    @property
    def moved_nbytes(self) -> int:
        """The bytes to copy, of all files."""
        return sum(move.moved_nbytes for move in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON: totals in bytes, bytes per folder, and every move."""
        folders: dict[str, int] = {}
        for move in self.moves:
            folder = str(move.place.parent)
            folders[folder] = folders.get(folder, 0) + move.nbytes
        return {
            "directory": str(self.directory),
            "mode": self.mode,
            "folders": [{"path": path, "nbytes": nbytes} for path, nbytes in folders.items()],
            "shards": [
                {
                    "name": move.name,
                    "nbytes": move.nbytes,
                    "from": str(move.source),
                    "to": str(move.place),
                    "moved_nbytes": move.moved_nbytes,
                }
                for move in self.moves
            ],
        }


def plan_spread(directory: Path, over: Sequence[Path], mode: Mode) -> SpreadPlan:
    """Plans where each shard goes: to the folder with the fewest bytes so far, in natural order, so
    that consecutive layers lie on different drives.

    A folder is a directory on a drive; the shards come into a subdirectory of the name of
    `directory`, or stay if the folder is `directory` itself. Raises ConfigError for folders that
    do not exist, names that are taken, links that are not ours (with `move`) and a directory
    without shards; StorageError for a file system with too little space. Touches nothing.
    """
    directory, record = _open(directory)
    if record is not None and record.mode != mode:
        raise ConfigError(
            f"{directory} was spread with --{record.mode}; gather it first (--gather), or name "
            f"--{record.mode}"
        )
    folders = _folders(directory, over)
    known = record.shards if record is not None else {}
    totals = dict.fromkeys(folders, 0)
    moves = []
    for path in _shards(directory):
        nbytes = path.stat().st_size
        folder = min(totals, key=lambda place: totals[place])
        totals[folder] += nbytes
        source, place = _source(path), folder / path.name
        is_ours = path.name in known and source in known[path.name].places
        if source != path and not is_ours and mode == "move":
            raise ConfigError(
                f"{path} is a link to {source}, a file elsewhere that --move would remove; "
                "use --copy, which leaves it"
            )
        moves.append(_planned(path, nbytes, source, place))
    _refuse_taken(moves)
    _refuse_small_drives(moves)
    return SpreadPlan(directory, mode, tuple(moves))


def run_spread(plan: SpreadPlan, progress: Progress = lambda **_: None) -> None:
    """Does what a plan says. May be interrupted at any point and repeated. Raises StorageError."""
    with locked(plan.directory, _BUSY), reporting("spread", plan.directory):
        record = _read_record(plan.directory) or _Record(mode=plan.mode, shards={})
        for move in plan.moves:
            own = plan.directory / move.name
            if move.name not in record.shards:
                link = os.readlink(own) if own.is_symlink() else None
                record.shards[move.name] = _ShardRecord(places=[], link=link)
            shard = record.shards[move.name]
            shard.places = [*(place for place in shard.places if place != move.place), move.place]
        _write_record(plan.directory, record)
        for move in plan.moves:
            _place(plan.directory, move, plan.mode, progress)
            for path in record.shards[move.name].places[:-1]:
                _remove_place(path, plan.directory / move.name)
            record.shards[move.name].places = [move.place]
        _write_record(plan.directory, record)


def plan_gather(directory: Path) -> SpreadPlan:
    """Plans the return of every shard to the directory. Raises ConfigError for a directory that was
    not spread, StorageError for too little space. Touches nothing."""
    directory, record = _open(directory)
    if record is None:
        raise ConfigError(f"{directory} has no {RECORD_NAME}: it was not spread by this program")
    moves = []
    for name in record.shards:
        own = directory / name
        source = _source(own)
        if not source.is_file():
            raise StorageError(
                errno.ENOENT, operation="gather", path=str(source), detail=f"{own} leads to it"
            )
        nbytes = source.stat().st_size
        if record.mode == "copy":  # The original is there still.
            moves.append(ShardMove(name, nbytes, source, own, True))
        else:
            moves.append(_planned(own, nbytes, source, own))
    _refuse_small_drives(moves)
    return SpreadPlan(directory, record.mode, tuple(moves))


def run_gather(plan: SpreadPlan, progress: Progress = lambda **_: None) -> None:
    """Undoes `run_spread`. May be interrupted at any point and repeated. Raises StorageError."""
    directory = plan.directory
    with locked(directory, _BUSY), reporting("gather", directory):
        record = _read_record(directory)
        if record is None:
            return
        for move in plan.moves:
            shard = record.shards[move.name]
            _bring_back(directory / move.name, shard, progress)
            for place in shard.places:
                _remove_place(place, directory / move.name)
        with contextlib.suppress(OSError):
            (directory / ORIGINALS_NAME).rmdir()
        (directory / RECORD_NAME).unlink(missing_ok=True)
        sync_directory(directory)


# -- One shard -------------------------------------------------------------------------------------


def _place(directory: Path, move: ShardMove, mode: Mode, progress: Progress) -> None:
    """Steps 1 to 3 for one shard; nothing where they are done."""
    own = directory / move.name
    if _source(own) == move.place:
        return
    if move.place == own:  # The folder is the directory itself.
        _copy(move.source, own, progress)
        return
    move.place.parent.mkdir(exist_ok=True)
    if not move.place.exists():  # It has the name since its bytes are durable.
        _copy(move.source, move.place, progress)
    if mode == "copy" and not own.is_symlink():
        original = directory / ORIGINALS_NAME / move.name
        original.parent.mkdir(exist_ok=True)
        if not original.exists():
            os.link(own, original)
            sync_directory(original.parent)
    _link(move.place, own)


def _remove_place(place: Path, own: Path) -> None:
    """Removes a place that no link leads to any more, and its directory if it is empty."""
    if place == own:
        return
    place.unlink(missing_ok=True)
    _partial(place).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()


def _bring_back(own: Path, shard: _ShardRecord, progress: Progress) -> None:
    """Makes the file of the directory what it was before its first spread."""
    original = own.parent / ORIGINALS_NAME / own.name
    if original.exists():
        os.replace(original, own)
    elif _source(own) not in shard.places:
        return  # It is back.
    elif shard.link is not None:
        _link(Path(shard.link), own)
    elif own.is_symlink():
        _copy(_source(own), own, progress)
    sync_directory(own.parent)


def _copy(source: Path, target: Path, progress: Progress) -> None:
    """Gives the bytes of `source` the name `target`, which another file system may hold. The name
    appears when the bytes are durable; times are kept."""
    partial = _partial(target)
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        _copy_bytes(source, partial, progress)
    os.replace(partial, target)
    # Both names of one file: rename does nothing then, and leaves the partial one.
    partial.unlink(missing_ok=True)
    sync_directory(target.parent)


def _copy_bytes(source: Path, partial: Path, progress: Progress) -> None:
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    with source.open("rb", buffering=0) as read, partial.open("xb", buffering=0) as write:
        facts = os.fstat(read.fileno())
        os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := read.readinto(buffer):
            left = buffer[:count]
            while left:
                left = left[write.write(left) :]
            progress(description=source.name, advance=count)
        os.fsync(write.fileno())
        if os.fstat(write.fileno()).st_size != facts.st_size:
            raise StorageError(errno.EIO, operation="copy", path=str(source), detail="it shrank")
        os.utime(write.fileno(), ns=(facts.st_atime_ns, facts.st_mtime_ns))
        for fd in (read.fileno(), write.fileno()):  # The page cache has better uses.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _link(target: Path, own: Path) -> None:
    """Renames a link to `target` over the file of the directory."""
    partial = _partial(own)
    partial.unlink(missing_ok=True)
    os.symlink(target, partial)
    os.replace(partial, own)
    sync_directory(own.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.infinity-partial")


# -- Checks ----------------------------------------------------------------------------------------


def _planned(own: Path, nbytes: int, source: Path, place: Path) -> ShardMove:
    is_linked = source.stat().st_dev == _folder_of(place).stat().st_dev
    return ShardMove(own.name, nbytes, source, place, is_linked)


def _folder_of(place: Path) -> Path:
    """Returns the directory of a place, or the one above it where that is not made yet."""
    return place.parent if place.parent.exists() else place.parent.parent


def _folders(directory: Path, over: Sequence[Path]) -> list[Path]:
    """Returns the directories that get the shards."""
    found: dict[Path, None] = {}
    for path in over:
        if not path.is_dir():
            raise ConfigError(f"--over {path}: no such directory; mount the drive, or make it")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"--over {path}: this directory cannot be written")
        folder = path.resolve()
        if folder != directory:
            folder = folder / directory.name
        if folder in found:
            raise ConfigError(f"--over {path} is named twice")
        found[folder] = None
    if not found:
        raise ConfigError("expected --over and the directories of one or more drives")
    return list(found)


def _shards(directory: Path) -> list[Path]:
    found = [path for path in directory.glob("*.safetensors") if not path.name.startswith(".")]
    if not found:
        raise ConfigError(f"{directory} has no *.safetensors; expected a Hugging Face checkpoint")
    for path in found:
        if not path.is_file():
            raise ConfigError(f"{path} is a link to a file that is not there")
    return sorted(
        found,
        key=lambda path: [
            (int(part), "") if part.isdigit() else (0, part)
            for part in re.split(r"(\d+)", path.name)
        ],
    )


def _source(own: Path) -> Path:
    """Returns the file that holds the bytes: `own`, or what it links to in the end."""
    return own.resolve() if own.is_symlink() else own


def _refuse_taken(moves: Sequence[ShardMove]) -> None:
    for move in moves:
        if move.is_done or not move.place.exists():
            continue
        # A run that ended before its link has left the same bytes here.
        there, own = move.place.stat(), move.source.stat()
        if (there.st_size, there.st_mtime_ns) != (own.st_size, own.st_mtime_ns):
            raise ConfigError(
                f"{move.place} already exists and is another file; remove it, or name another "
                "directory"
            )


def _refuse_small_drives(moves: Sequence[ShardMove]) -> None:
    needed: dict[int, tuple[Path, int]] = {}
    for move in moves:
        if move.moved_nbytes:
            folder = _folder_of(move.place)
            device = folder.stat().st_dev
            needed[device] = (folder, needed.get(device, (folder, 0))[1] + move.moved_nbytes)
    for folder, nbytes in needed.values():
        check_space(
            folder, nbytes, operation="spread", needs="its shards need",
            remedy="; name further drives",
        )  # fmt: skip


# -- The record ------------------------------------------------------------------------------------


class _ShardRecord(BaseModel):
    """The places that a shard has or had, the last one being where it belongs; and the link that it
    was before its first spread, if it was one."""

    places: list[Path]
    link: str | None = None


class _Record(BaseModel):
    """The file `RECORD_NAME`."""

    mode: Mode
    shards: dict[Annotated[str, AfterValidator(partial(plain_name, what="a shard"))], _ShardRecord]


def _open(directory: Path) -> tuple[Path, _Record | None]:
    refuse_no_directory(directory)
    directory = directory.resolve()
    return directory, _read_record(directory)


def _read_record(directory: Path) -> _Record | None:
    path = directory / RECORD_NAME
    if not path.exists():
        return None
    try:
        return _Record.model_validate(read_json(path))
    except (MalformedError, ValidationError) as error:
        raise corrupt(str(path), f"it is no record of a spread: {error}") from None


def _write_record(directory: Path, record: _Record) -> None:
    content = {"schema": 1, **record.model_dump(mode="json")}
    replace_file(directory / RECORD_NAME, json.dumps(content, indent=1))
