"""Ranks that meet in a store before they are connected."""

from __future__ import annotations

import threading

import pytest

from infinity.distributed.wire.connecting import Meeting
from infinity.errors import ConfigError


class Store:
    """A store in which the other rank has removed its word as soon as this one has seen it. A real
    one would wait minutes for a key that is gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waited_for: list[str] = []

    def add(self, key: str, count: int) -> int:
        number = int(self.values.get(key, b"0")) + count
        self.values[key] = str(number).encode()
        return number

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        is_there = all(key in self.values for key in keys)
        if is_there and len(keys) > 1:
            del self.values[keys[-1]]
        return is_there

    def get(self, key: str) -> bytes:
        if key not in self.values:
            self.waited_for.append(key)
            raise RuntimeError("the store has waited in vain")
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def test_ranks_that_refuse_together_read_no_word_that_another_has_removed() -> None:
    store, refused = Store(), []

    def refuse(rank: int) -> None:
        meeting = Meeting(store, rank, (0, 1))
        with pytest.raises(ConfigError), meeting.ending_together():
            raise ConfigError("no address for others")
        meeting.end(is_over=False)
        refused.append(rank)

    ranks = [threading.Thread(target=refuse, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert sorted(refused) == [0, 1] and not store.waited_for
