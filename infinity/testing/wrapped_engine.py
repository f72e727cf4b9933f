"""A storage engine that wraps another one and changes nothing: the base of test doubles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from typing_extensions import override

from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.storage.statistics import EngineStats


class WrappedEngine(StorageEngine):
    """Passes every call on, and knows the path of every file."""

    def __init__(self, engine: StorageEngine, name: str) -> None:
        self._engine = engine
        self._paths: dict[int, str] = {}
        self.name = f"{name}({engine.name})"

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *unused: object) -> None:
        self.close()

    @override
    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        file = self._engine.open(path, direct=direct, read_only=read_only)
        self._paths[file] = path
        return file

    @override
    def close_file(self, file: int) -> None:
        self._engine.close_file(file)

    @override
    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        return self._engine.submit(operation, segments, priority)

    @override
    def sync(self, file: int) -> None:
        self._engine.sync(file)

    @override
    def drain(self) -> None:
        self._engine.drain()

    @override
    def stats(self) -> EngineStats:
        return self._engine.stats()

    @override
    def close(self) -> None:
        self._engine.close()
