"""A drive that loses power: what a run did to files is recorded, and cut off anywhere.

The drive is harsh, as far as POSIX allows. Of a file, pages that were written and not synced since
have, each on its own, any of their contents since. Of a directory, any of the changes that were not
synced since may be missing, in any combination. A sync covers the writes whose completion was seen
before it, and nothing else: that of a file not its name, that of a directory not what is in its
files.

`Recorder` records; `Disk` takes events one by one and can be asked, at any moment, for one of the
states that a power cut would leave.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.sizes import PAGE_NBYTES
from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.testing.faulty_engine import WrappedEngine

# -- What can happen -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrote:
    """Bytes were given to a file. `number` names the write; None for one that is done at once."""

    inode: int
    offset: int
    content: bytes
    number: int | None = None


@dataclass(frozen=True)
class Completed:
    """The completion of a write was seen."""

    number: int


@dataclass(frozen=True)
class Resized:
    inode: int
    size: int


@dataclass(frozen=True)
class Synced:
    """A file or a directory was synced. `what` says which, in words, for whoever drops some."""

    inode: int
    what: str


@dataclass(frozen=True)
class Named:
    """An entry came into a directory."""

    directory: int
    name: str
    inode: int
    is_directory: bool = False


@dataclass(frozen=True)
class Unnamed:
    directory: int
    name: str
    inode: int


@dataclass(frozen=True)
class Renamed:
    """Within one directory, replacing what had the new name. Atomic."""

    directory: int
    old: str
    new: str
    inode: int


@dataclass(frozen=True)
class Returned:
    """A save or commit of a step has come back: from here on it must be there."""

    step: int


Event = Wrote | Completed | Resized | Synced | Named | Unnamed | Renamed | Returned


# -- The recorder ----------------------------------------------------------------------------------


class Recorder:
    """Events on files below `root`, which is empty at the beginning. `wrap` is for the storage
    engine, `recording` for everything that goes through `os`."""

    ROOT = 0

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.events: list[Event] = []
        self._inodes = {self.root: self.ROOT}  # By path, as it is now.
        self._numbers = 0
        self._lock = threading.Lock()  # A copy has a thread of its own.

    def returned(self, step: int) -> None:
        self.events.append(Returned(step))

    # Paths.

    def inode_of(self, path: Path) -> int:
        """The number of a file, which was made without our notice if it is not known."""
        if path not in self._inodes:
            self._name(path, self._new())
        return self._inodes[path]

    def _new(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def _name(self, path: Path, inode: int, *, is_directory: bool = False) -> None:
        directory = self.inode_of(path.parent)
        self._inodes[path] = inode
        self.events.append(Named(directory, path.name, inode, is_directory))

    def _path(self, what: Any, dir_fd: int | None = None) -> Path | None:
        """The absolute path of an argument, if it is below the root."""
        if isinstance(what, int):
            what = os.readlink(f"/proc/self/fd/{what}")
        elif dir_fd is not None:
            what = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(what))
        path = Path(os.path.abspath(os.fspath(what)))
        return path if path.is_relative_to(self.root) else None

    # What goes through os.

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks: dict[str, Callable[..., None]] = {
            "write": self._on_write, "pwrite": self._on_pwrite, "ftruncate": self._on_truncate,
            "posix_fallocate": self._on_allocate, "fsync": self._on_sync, "fdatasync": self._on_sync,
            "mkdir": self._on_make, "link": self._on_link, "rename": self._on_rename,
            "replace": self._on_rename, "unlink": self._on_unlink, "rmdir": self._on_unlink,
        }  # fmt: skip
        real = {name: getattr(os, name) for name in hooks}

        def hooked(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                # Of an unlink the path is to be known before, of a write how much it took after.
                before = self._path(args[0], options.get("dir_fd"))
                answer = real[name](*args, **options)
                if before is not None:
                    hooks[name](before, args, answer)
                return answer

            return call

        for name in hooks:
            setattr(os, name, hooked(name))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _on_write(self, path: Path, args: Any, answer: int) -> None:
        end = os.lseek(args[0], 0, os.SEEK_CUR)
        content = bytes(memoryview(args[1])[:answer])
        self.events.append(Wrote(self.inode_of(path), end - answer, content))

    def _on_pwrite(self, path: Path, args: Any, answer: int) -> None:
        content = bytes(memoryview(args[1])[:answer])
        self.events.append(Wrote(self.inode_of(path), args[2], content))

    def _on_truncate(self, path: Path, args: Any, answer: None) -> None:
        self.events.append(Resized(self.inode_of(path), args[1]))

    def _on_allocate(self, path: Path, args: Any, answer: None) -> None:
        self.events.append(Resized(self.inode_of(path), os.fstat(args[0]).st_size))

    def _on_sync(self, path: Path, args: Any, answer: None) -> None:
        self.events.append(Synced(self.inode_of(path), _kind_of(path)))

    def _on_make(self, path: Path, args: Any, answer: None) -> None:
        self._name(path, self._new(), is_directory=True)

    def _on_link(self, path: Path, args: Any, answer: None) -> None:
        target = self._path(args[1])
        assert target is not None
        self._name(target, self.inode_of(path))

    def _on_rename(self, path: Path, args: Any, answer: None) -> None:
        target = self._path(args[1])
        assert target is not None
        inode, parent = self.inode_of(path), self.inode_of(path.parent)
        if target.parent == path.parent:
            self.events.append(Renamed(parent, path.name, target.name, inode))
        else:  # A crash may keep either change of the two directories.
            self.events.append(Named(self.inode_of(target.parent), target.name, inode, False))
            self.events.append(Unnamed(parent, path.name, inode))
        for known in [each for each in self._inodes if each.is_relative_to(path)]:
            self._inodes[target / known.relative_to(path)] = self._inodes.pop(known)

    def _on_unlink(self, path: Path, args: Any, answer: None) -> None:
        inode = self.inode_of(path)
        self.events.append(Unnamed(self.inode_of(path.parent), path.name, inode))
        del self._inodes[path]

    # What goes through the storage engine.

    def wrap(self, engine: StorageEngine) -> StorageEngine:
        return _RecordedEngine(engine, self)

    def submitted(self, path: str, segments: Sequence[tuple[int, bytes]]) -> list[int]:
        inode = self.inode_of(Path(os.path.abspath(path)))
        numbers = []
        for offset, content in segments:
            numbers.append(self._new())
            self.events.append(Wrote(inode, offset, content, numbers[-1]))
        return numbers

    def synced(self, path: str) -> None:
        where = Path(os.path.abspath(path))
        self.events.append(Synced(self.inode_of(where), _kind_of(where)))


def _kind_of(path: Path) -> str:
    """Which flush it is, without what differs from step to step."""
    if path.suffix == ".swap":
        return "swap files"
    if path.is_dir():
        if path.name.endswith(".partial"):
            return "a partial directory"
        places = {"commits": "checkpoints", "checkpoints": "checkpoints", "copying": "copying"}
        return places.get(path.name, "above them")
    return path.name.removeprefix(".").removesuffix(".partial")


class _RecordedEngine(WrappedEngine):
    def __init__(self, engine: StorageEngine, recorder: Recorder) -> None:
        super().__init__(engine, "recorded")
        self._recorder = recorder

    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        numbers: list[int] = []
        if operation == "write":
            for each in segments:
                content = ctypes.string_at(each.address, each.nbytes)
                path = self._paths[each.file]
                numbers += self._recorder.submitted(path, [(each.offset_nbytes, content)])
        ticket = self._engine.submit(operation, segments, priority)
        return _RecordedTicket(ticket, numbers, self._recorder) if numbers else ticket

    def sync(self, file: int) -> None:
        self._engine.sync(file)
        self._recorder.synced(self._paths[file])


class _RecordedTicket:
    """Its writes count as completed once somebody has looked."""

    def __init__(self, inner: Ticket, numbers: list[int], recorder: Recorder) -> None:
        self._inner = inner
        self._numbers = numbers
        self._recorder = recorder

    def done(self) -> bool:
        is_done = self._inner.done()
        if is_done:
            self._see()
        return is_done

    def wait(self) -> None:
        self._inner.wait()
        self._see()

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return self._inner.passages()

    def _see(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._recorder.events += [Completed(number) for number in numbers]


# -- The drive -------------------------------------------------------------------------------------


@dataclass
class _File:
    """Durable content by page, and what was written since: (number of the write, content)."""

    pages: dict[int, bytes] = field(default_factory=dict)
    pending: dict[int, list[tuple[int | None, bytes]]] = field(default_factory=dict)
    newest: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    sizes: list[int] = field(default_factory=list)  # Since the last sync.
    newest_size: int = 0


@dataclass
class _Directory:
    entries: dict[str, int] = field(default_factory=dict)
    pending: list[Named | Unnamed | Renamed] = field(default_factory=list)


_ZEROS = bytes(PAGE_NBYTES)


class Disk:
    """Files and directories by number, durable and not."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._directories = {Recorder.ROOT: _Directory()}
        self._unseen: set[int] = set()  # Writes whose completion nobody has seen.

    def apply(self, event: Event) -> None:
        match event:
            case Wrote():
                self._write(event)
            case Completed(number):
                self._unseen.discard(number)
            case Resized(inode, size):
                self._resize(self._file(inode), size)
            case Synced(inode):
                self._sync(inode)
            case Named() | Unnamed() | Renamed():
                self._directory(event.directory).pending.append(event)
                if isinstance(event, Named) and event.is_directory:
                    self._directory(event.inode)

    def _file(self, inode: int) -> _File:
        return self._files.setdefault(inode, _File())

    def _directory(self, inode: int) -> _Directory:
        return self._directories.setdefault(inode, _Directory())

    def _write(self, event: Wrote) -> None:
        file = self._file(event.inode)
        if event.number is not None:
            self._unseen.add(event.number)
        end = event.offset + len(event.content)
        for page in range(event.offset // PAGE_NBYTES, -(-end // PAGE_NBYTES)):
            start = page * PAGE_NBYTES
            content = bytearray(file.newest.get(page, _ZEROS))
            low, high = max(event.offset, start), min(end, start + PAGE_NBYTES)
            content[low - start : high - start] = event.content[
                low - event.offset : high - event.offset
            ]
            file.newest[page] = bytes(content)
            file.pending.setdefault(page, []).append((event.number, bytes(content)))
        self._resize(file, max(file.newest_size, end))

    def _resize(self, file: _File, size: int) -> None:
        if size != file.newest_size:
            for page in [page for page in file.newest if page * PAGE_NBYTES >= size]:
                del file.newest[page]
                file.pending.setdefault(page, []).append((None, _ZEROS))
            file.newest_size = size
            file.sizes.append(size)

    def _sync(self, inode: int) -> None:
        if inode in self._directories:
            directory = self._directories[inode]
            for event in directory.pending:
                _change(directory.entries, event)
            directory.pending.clear()
            return
        file = self._file(inode)
        for page, versions in list(file.pending.items()):
            covered = [i for i, (number, _) in enumerate(versions) if number not in self._unseen]
            if covered:
                file.pages[page] = versions[covered[-1]][1]
                del versions[: covered[-1] + 1]
            if not versions:
                del file.pending[page]
        file.size = file.newest_size
        file.sizes.clear()

    # After a cut.

    def cut(self, drawn: random.Random, target: Path, wanted: Callable[[Path], bool]) -> None:
        """Makes one state that a power cut at this moment may leave; only directories, and files
        that `wanted` says yes to."""
        self._make(Recorder.ROOT, drawn, target, target, wanted, {})

    def _make(
        self,
        inode: int,
        drawn: random.Random,
        at: Path,
        target: Path,
        wanted: Callable[[Path], bool],
        made: dict[int, bytes],
    ) -> None:
        at.mkdir(exist_ok=True)
        for name, child in self._entries(inode, drawn).items():
            path = at / name
            if child in self._directories:
                self._make(child, drawn, path, target, wanted, made)
            elif wanted(path.relative_to(target)):
                if child not in made:
                    made[child] = self._content(child, drawn)
                path.write_bytes(made[child])

    def _entries(self, inode: int, drawn: random.Random) -> dict[str, int]:
        """As a journal would have it, the first so many changes; or any of them."""
        directory = self._directories[inode]
        entries = dict(directory.entries)
        pending = directory.pending
        if drawn.random() < 0.5:
            kept = pending[: drawn.randint(0, len(pending))]
        else:
            kept = [event for event in pending if drawn.random() < 0.5]
        for event in kept:
            _change(entries, event)
        return entries

    def _content(self, inode: int, drawn: random.Random) -> bytes:
        file = self._file(inode)
        size = drawn.choice([file.size, *file.sizes])
        content = bytearray(size)
        for page, durable in file.pages.items():
            if page * PAGE_NBYTES < size:
                content[page * PAGE_NBYTES : (page + 1) * PAGE_NBYTES] = durable
        for page, versions in file.pending.items():
            chosen = drawn.randint(0, len(versions))
            if chosen and page * PAGE_NBYTES < size:
                content[page * PAGE_NBYTES : (page + 1) * PAGE_NBYTES] = versions[chosen - 1][1]
        return bytes(content[:size])


def _change(entries: dict[str, int], event: Named | Unnamed | Renamed) -> None:
    match event:
        case Named():
            entries[event.name] = event.inode
        case Unnamed():
            if entries.get(event.name) == event.inode:
                del entries[event.name]
        case Renamed():
            if entries.get(event.old) == event.inode:
                del entries[event.old]
            entries[event.new] = event.inode
