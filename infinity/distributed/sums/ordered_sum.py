"""Partial gradients of all ranks, summed in an order that does not depend on timing.

A rank sends one gradient of a tensor per backward. Its n-th contribution since the last step has
the number n, which the message carries. Contributions of one number are summed by a fixed tree over
the ranks, ((0 + 1) + (2 + 3)) and so on, which leaves out ranks without a contribution; the sums of
the numbers are then added in order. Addition is commutative, so two neighbours are summed as soon
as both have come, and the first one that comes needs no memory but that of the sum. Contributions
that wait for ranks that are behind are then at most log2(N) parts of 1/N per backward, not N - 1.

Whether a rank has an n-th contribution is known for certain only when all ranks have entered the
step.

`forget` implements `zero_grad`: it begins a new *generation*. Contributions carry the generation of
their sender, so those of a rank that is ahead wait for this rank, and late ones are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Content = TypeVar("Content")
_Node = tuple[int, int]  # Level and index: the sum over ranks [index << level, index + 1 << level).


@dataclass(slots=True)
class _Tensor(Generic[Content]):
    """The contributions to one tensor, and the progress of its sum."""

    count: int = 0  # The numbers up to the highest since the last step.
    generation: int = 0
    nodes: dict[int, dict[_Node, Content]] = field(default_factory=dict)  # By number.
    # Rank, generation and number.
    ahead: list[tuple[int, int, int, Content]] = field(default_factory=list)
    is_fresh: bool = True  # This generation had no sum before the last step.
    number: int = 0  # The next number to be added to the sum.
    slot: _Node | None = None  # Of number 0: the part of the tree that the sum's own memory has.

    def restart(self) -> None:
        self.count = 0
        self.nodes.clear()
        self.number = 0
        self.slot = None


class OrderedReduction(Generic[Content]):
    """Contributions by tensor, from `count` ranks. Any thread delivers, one thread takes.

    `combine(a, b)` returns the sum of two contributions and ends both; `drop` ends an outdated one.
    """

    def __init__(
        self,
        count: int,
        *,
        combine: Callable[[Content, Content], Content],
        drop: Callable[[Content], None],
    ) -> None:
        self._count = count
        self._top = (count - 1).bit_length()
        self._combine = combine
        self._drop = drop
        self._tensors: dict[int, _Tensor[Content]] = {}
        self._touched: set[int] = set()
        self._lock = threading.Lock()

    # -- In ----------------------------------------------------------------------------------------

    def deliver(
        self, tensor: int, rank: int, generation: int, number: int, content: Content
    ) -> None:
        """Takes a contribution."""
        with self._lock:
            entry = self._entry(tensor)
            if generation < entry.generation:
                self._drop(content)
            elif generation > entry.generation:
                entry.ahead.append((rank, generation, number, content))
            else:
                self._place(entry, rank, number, content)
                self._touched.add(tensor)

    def is_outdated(self, tensor: int, generation: int) -> bool:
        """Whether the generation is over."""
        return generation < self.generation(tensor)

    def pass_over(self, tensor: int, number: int) -> bool:
        """Skips a number whose sum over all ranks was computed elsewhere. Returns whether it is the
        next.

        If it is the next, the caller adds the sum; otherwise the caller passes it to `deliver_sum`.
        """
        with self._lock:
            entry = self._entry(tensor)
            if entry.number != number or entry.nodes.get(number) or entry.slot is not None:
                return False
            entry.number = number + 1
            entry.count = max(entry.count, number + 1)
            self._touched.add(tensor)  # Later numbers may have waited for this one.
            return True

    def deliver_sum(self, tensor: int, number: int, content: Content) -> None:
        """Takes the sum over all ranks of one number, of the present generation."""
        with self._lock:
            entry = self._entry(tensor)
            entry.nodes.setdefault(number, {})[self._top, 0] = content
            entry.count = max(entry.count, number + 1)
            self._touched.add(tensor)

    def _place(self, entry: _Tensor[Content], rank: int, number: int, content: Content) -> None:
        """Puts a contribution into its tree, and sums it with every neighbour that has come."""
        nodes = entry.nodes.setdefault(number, {})
        entry.count = max(entry.count, number + 1)
        level, index = 0, rank
        while level < self._top:
            neighbour = (level, index ^ 1)
            if self._has_ranks(neighbour):
                if neighbour not in nodes:
                    break
                content = self._combine(nodes.pop(neighbour), content)
            level, index = level + 1, index // 2
        nodes[level, index] = content

    def forget(self, tensor: int) -> None:
        """Begins the next generation of a tensor, and drops the contributions of former ones."""
        with self._lock:
            entry = self._entry(tensor)
            entry.generation += 1
            for nodes in entry.nodes.values():
                for content in nodes.values():
                    self._drop(content)
            entry.restart()
            entry.is_fresh = True
            ahead, entry.ahead = entry.ahead, []
            for rank, generation, number, content in ahead:
                if generation == entry.generation:
                    self._place(entry, rank, number, content)
                else:
                    entry.ahead.append((rank, generation, number, content))
            self._touched.add(tensor)

    def generation(self, tensor: int) -> int:
        """Returns the number of the tensor's present gradient; 0 before the first one."""
        with self._lock:
            entry = self._tensors.get(tensor)
            return 0 if entry is None else entry.generation

    def parts(self, tensor: int) -> tuple[int, int]:
        """Returns the contributions of every rank that are added to the tensor's sum since the last
        step, and those that some rank has made: numbers."""
        with self._lock:
            entry = self._tensors.get(tensor)
            return (0, 0) if entry is None else (entry.number, entry.count)

    # -- Out ---------------------------------------------------------------------------------------

    def take(self, *, all_are_there: bool) -> Iterator[tuple[int, Content]]:
        """Yields (tensor, content) for everything that can be added to the tensor's sum now, in
        order.

        The first content of a generation is the sum itself. With `all_are_there` (every rank has
        entered the step) the reduction waits for no rank, and numbers start anew.
        """
        with self._lock:
            tensors = sorted(self._tensors if all_are_there else self._touched)
            self._touched.clear()
        for tensor in tensors:
            entry = self._tensors[tensor]
            while (content := self._next(entry, all_are_there)) is not None:
                yield tensor, content

    def _next(self, entry: _Tensor[Content], all_are_there: bool) -> Content | None:
        with self._lock:
            content = self._next_of(entry, all_are_there)
            if content is None and all_are_there:
                entry.is_fresh = entry.is_fresh and not entry.count
                entry.restart()
            return content

    def _next_of(self, entry: _Tensor[Content], all_are_there: bool) -> Content | None:
        while entry.number < entry.count:
            nodes = entry.nodes.setdefault(entry.number, {})
            if entry.is_fresh and entry.number == 0:
                content = self._next_into_slot(entry, nodes, all_are_there)
                is_complete = entry.slot is not None and entry.slot[0] == self._top
                is_over = content is None and (is_complete or all_are_there)
            else:
                content = self._subtree(nodes, (self._top, 0), all_are_there)
                is_over = content is not None or all_are_there
            entry.number += is_over
            if content is not None or not is_over:
                return content
        return None

    def _next_into_slot(
        self, entry: _Tensor[Content], nodes: dict[_Node, Content], all_are_there: bool
    ) -> Content | None:
        """Returns the next part of number 0 of a new sum.

        The largest part that has come is the first; its neighbours follow, up to the root.
        """
        if entry.slot is None:
            if not nodes:
                return None
            entry.slot = max(nodes)
            return nodes.pop(entry.slot)
        level, index = entry.slot
        while level < self._top:
            neighbour = (level, index ^ 1)
            content = None
            if self._has_ranks(neighbour):
                content = self._subtree(nodes, neighbour, all_are_there)
                if content is None and not all_are_there:
                    break
            level, index = level + 1, index // 2
            if content is not None:
                entry.slot = level, index
                return content
        entry.slot = level, index
        return None

    # INV-19: one tree over ranks for each number, whatever the timing.
    def _subtree(
        self, nodes: dict[_Node, Content], node: _Node, all_are_there: bool
    ) -> Content | None:
        """Returns the sum of a subtree, with `all_are_there` without the ranks that are absent."""
        if node in nodes or not all_are_there:
            return nodes.pop(node, None)
        level, index = node
        if level == 0:
            return None
        halves = [self._subtree(nodes, (level - 1, 2 * index + side), True) for side in (0, 1)]
        there = [half for half in halves if half is not None]
        return self._combine(*there) if len(there) == 2 else next(iter(there), None)

    def _entry(self, tensor: int) -> _Tensor[Content]:
        return self._tensors.setdefault(tensor, _Tensor())

    def _has_ranks(self, node: _Node) -> bool:
        return node[1] << node[0] < self._count
