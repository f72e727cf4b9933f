"""Memory of kept weights: changed in place, lent to readers, given back when nobody uses it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.distributed import kept_shards
from infinity.distributed.kept_shards import KeptShards
from infinity.errors import StorageError
from infinity.tiers.device import FINISHED
from infinity.tiers.host import Block


class _Pool:
    """Blocks of separate memory, as many as are wanted."""

    def __init__(self) -> None:
        self.memory: dict[Any, torch.Tensor] = {}
        self.freed: list[Any] = []

    def try_spare(self, nbytes: int, label: str) -> Any:
        block = SimpleNamespace(nbytes=nbytes, number=len(self.memory))
        self.memory[block.number] = torch.zeros(nbytes, dtype=torch.uint8)
        return block

    def free(self, block: Any) -> None:
        self.freed.append(block.number)

    def tensor(self, block: Block) -> torch.Tensor:
        return self.memory[block.number]  # type: ignore[attr-defined]


class _Write:
    """A write under way, until it is `over`."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def done(self) -> bool:
        return self.is_over.is_set()

    def wait(self) -> None:
        self.is_over.wait()


def _shard(index: int) -> Any:
    return SimpleNamespace(index=index, trainable_nbytes=64)


def _update(kept: KeptShards, pool: Any, shard: int, byte: int, write: Any = FINISHED) -> bool:
    """Returns whether the copy had the weights before."""
    copy = kept.begin_update(shard)
    assert copy is not None
    block, is_current = copy
    pool.tensor(block).fill_(byte)
    kept.end_update(shard, write)
    return is_current


def _kept(*shards: int) -> tuple[KeptShards, Any]:
    pool: Any = _Pool()
    kept = KeptShards(pool)
    for shard in shards:
        kept.reserve(_shard(shard))
        assert not _update(kept, pool, shard, shard)
    return kept, pool


def _content(kept: KeptShards, shard: int) -> int | None:
    with kept.lent(shard) as memory:
        assert kept.has(shard) == (memory is not None)
        return None if memory is None else int(memory.unique())


def test_a_copy_that_is_lent_is_given_back_after_all_others_and_when_its_reader_has_it() -> None:
    kept, pool = _kept(1, 2, 3)
    with kept.lent(3) as memory:
        assert memory is not None and memory.tolist() == [3] * 64
        assert kept.give_back() and kept.give_back() and pool.freed == [1, 0]
        assert not kept.give_back(), "without a wait"
        given = list[bool]()
        thread = threading.Thread(target=lambda: given.append(kept.give_back(waits=True)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and memory.tolist() == [3] * 64
    thread.join(60.0)
    assert given == [True] and pool.freed == [1, 0, 2]
    assert _content(kept, 3) is None


def test_a_copy_is_given_back_when_its_write_is_over() -> None:
    kept, pool = _kept(1)
    write = _Write()
    assert _update(kept, pool, 1, 9, write)
    assert not kept.give_back() and _content(kept, 1) == 9
    given = list[bool]()
    thread = threading.Thread(target=lambda: given.append(kept.give_back(waits=True)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not pool.freed
    write.is_over.set()
    thread.join(60.0)
    assert given == [True] and pool.freed == [0]


def test_an_update_waits_for_the_write_of_the_one_before() -> None:
    kept, pool = _kept(1)
    write = _Write()
    _update(kept, pool, 1, 9, write)
    thread = threading.Thread(target=lambda: _update(kept, pool, 1, 10))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and _content(kept, 1) is None and not kept.give_back()
    write.is_over.set()
    thread.join(60.0)
    assert _content(kept, 1) == 10


def test_an_update_whose_copy_could_not_be_written_before_finds_the_error_and_no_weights() -> None:
    class Failed(_Write):
        def wait(self) -> None:
            raise StorageError(5, operation="write", path="swap")

    kept, pool = _kept(1)
    _update(kept, pool, 1, 9, Failed())
    with pytest.raises(StorageError):
        kept.begin_update(1)
    assert _content(kept, 1) is None
    with pytest.raises(StorageError):
        kept.begin_update(1)


def test_an_update_changes_a_copy_as_soon_as_its_reader_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_shards, "_UPDATE_PATIENCE_S", 60.0)
    kept, pool = _kept(1)
    with kept.lent(1) as memory:
        assert memory is not None
        thread = threading.Thread(target=lambda: _update(kept, pool, 1, 9))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and memory.tolist() == [1] * 64
    thread.join(60.0)
    assert not thread.is_alive() and _content(kept, 1) == 9


def test_an_update_finds_no_memory_in_a_copy_that_a_reader_keeps() -> None:
    kept, pool = _kept(1)
    with kept.lent(1) as memory:
        assert memory is not None and kept.begin_update(1) is None
        assert _content(kept, 1) == 1
    assert _update(kept, pool, 1, 9)


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_of_an_early_update_are_read_when_the_step_keeps_it(is_kept: bool) -> None:
    kept, pool = _kept(1, 2)
    kept.reserve(_shard(1), is_early=True)
    assert _content(kept, 1) == 1, "its update has not begun"
    copy = kept.begin_update(1)
    assert copy is not None and copy[1] and _content(kept, 1) is None
    pool.tensor(copy[0]).fill_(9)
    kept.end_update(1, FINISHED)
    assert _content(kept, 1) is None
    (kept.publish if is_kept else kept.drop)(1)
    assert _content(kept, 1) == (9 if is_kept else None) and _content(kept, 2) == 2
    assert not pool.freed and len(pool.memory) == 2


def test_weights_of_an_early_update_that_has_not_begun_are_read_whatever_the_step_does() -> None:
    kept, pool = _kept(1)
    kept.reserve(_shard(1), is_early=True)
    kept.drop(1)
    assert _content(kept, 1) == 1
    kept.reserve(_shard(1), is_early=True)
    kept.reserve(_shard(1))  # The step makes it pending.
    assert _update(kept, pool, 1, 9)
    kept.publish(1)
    assert _content(kept, 1) == 9


def test_a_copy_beside_which_an_early_update_was_made_is_stale_when_the_step_keeps_it() -> None:
    kept, _ = _kept(1)
    kept.reserve(_shard(1), is_early=True)
    with kept.lent(1):
        assert kept.begin_update(1) is None  # The update goes elsewhere.
    assert _content(kept, 1) == 1
    kept.publish(1)
    assert _content(kept, 1) is None


def test_weights_that_others_change_are_not_lent() -> None:
    kept, pool = _kept(1)
    kept.forget(1)
    assert _content(kept, 1) is None and _content(kept, 5) is None
    assert not _update(kept, pool, 1, 3) and _content(kept, 1) == 3
