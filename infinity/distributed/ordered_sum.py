"""Gradients that ranks gave to this one, summed in an order that no timing can change.

A rank gives a tensor's gradient once per backward; its n-th contribution since the last step has
number n, and says so. Contributions of one number are summed by a fixed tree over the ranks,
((0 + 1) + (2 + 3)) and so on, where a rank that gives nothing is passed over; then numbers are
added up in their order. An addition does not depend on which side comes first, so two neighbours
are summed as soon as both are there, and the first that comes needs no room but the sum's own. What
waits for ranks that are behind is then at most log2(N) parts of 1/N for every backward they are
behind, not N - 1.

That some rank will not give its n-th contribution is only known when all ranks have entered the
step.

`forget` is what `zero_grad` does: it begins a *generation*. Contributions carry the generation of
their giver, so those of a rank that is ahead wait for this one, and late ones are dropped.
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
    """Contributions to one tensor, and how far its sum has come."""

    count: int = 0  # Numbers up to the highest that came since the last step.
    generation: int = 0
    nodes: dict[int, dict[_Node, Content]] = field(default_factory=dict)  # By number.
    # Rank, generation and number.
    ahead: list[tuple[int, int, int, Content]] = field(default_factory=list)
    is_fresh: bool = True  # Nothing was summed in this generation before the last step.
    number: int = 0  # The next that goes into the sum.
    slot: _Node | None = None  # Of number 0: what the sum's own place holds.

    def restart(self) -> None:
        self.count = 0
        self.nodes.clear()
        self.number = 0
        self.slot = None


class OrderedReduction(Generic[Content]):
    """Contributions by tensor, from `count` ranks. Delivered by any thread, taken by one.

    `combine(a, b)` is the sum of two, which end with it; `drop` ends what nobody wants any more.
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
        """Whether what is of this generation is not wanted any more."""
        return generation < self.generation(tensor)

    def pass_over(self, tensor: int, number: int) -> bool:
        """The sum over all ranks of this number was made elsewhere: if it is the next to be added,
        the caller adds it. False where others come before it, and `deliver_sum` takes it."""
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
        """Puts a contribution into its tree, summed with every neighbour that is there."""
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
        """Begins the next generation of a tensor: what was given in the last ones is dropped."""
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

    # -- Out ---------------------------------------------------------------------------------------

    def take(self, *, all_are_there: bool) -> Iterator[tuple[int, Content]]:
        """(tensor, content) of what may be added to the tensor's sum now, each once, in order.

        The first of a generation is the sum itself. With `all_are_there` (every rank has entered
        the step) nobody is waited for, and numbers start anew.
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
                is_whole = entry.slot is not None and entry.slot[0] == self._top
                is_over = content is None and (is_whole or all_are_there)
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
        """Number 0 of a fresh sum: the largest part that is there begins it, then its neighbours
        are added, up to the root."""
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
        """The sum of a part of the tree: whole, or when `all_are_there` what there is of it."""
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
