"""The order in which pairs of token and expert pass a tile of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Pairs:
    """The pairs of token and expert of some calls, ordered by expert, then by call, then by a
    token's choice, then by token.

    indices: of each call [tokens, k], the experts of each token; an index past the last expert
    belongs to no expert. starts: the first expert of every tile, then the number of experts.
    `tokens`: numbers of tokens, as if those of all calls stood in a row. `read` comes before any
    use on the host.
    """

    def __init__(self, indices: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        self._starts, self.num_calls = starts, len(indices)
        keys = indices[0]
        if self.num_calls > 1:
            keys = torch.cat([own * self.num_calls + n for n, own in enumerate(indices)])
        self.keys, order = keys.t().reshape(-1).sort(stable=True)
        self.tokens, self.choices = order % len(keys), order // max(len(keys), 1)
        borders = torch.arange(starts[-1] * self.num_calls + 1, device=keys.device)
        self.ends = torch.searchsorted(self.keys, borders.to(keys.dtype))
        self.most_rows = max(own.numel() for own in indices)
        self.ends_on_host: list[int] = []

    @staticmethod
    def read(every: Sequence[Pairs]) -> None:
        """Reads the ends of all experts from the device: one wait."""
        unread = [pairs for pairs in every if not pairs.ends_on_host]
        if unread:
            known = torch.cat([pairs.ends for pairs in unread]).tolist()
            for pairs in unread:
                count = len(pairs.ends)
                pairs.ends_on_host, known = known[:count], known[count:]

    def range_of(self, experts: slice) -> slice:
        """Returns the pairs of some experts."""
        count = self.num_calls
        return slice(
            self.ends_on_host[experts.start * count], self.ends_on_host[experts.stop * count]
        )

    def has(self, tile: int) -> bool:
        """Whether an expert of the tile has a pair."""
        rows = self.range_of(slice(self._starts[tile], self._starts[tile + 1]))
        return bool(rows.start < rows.stop)

    def parts(self, tile: int) -> list[slice]:
        """Returns the experts of a tile that have pairs, in parts of no more rows than one call may
        have by itself, or of one expert. So the memory does not grow with the number of calls."""
        stop = self._starts[tile + 1]
        parts = [slice(self._starts[tile], self._starts[tile])]
        for expert in range(self._starts[tile], stop):
            rows = self.range_of(slice(parts[-1].start, expert + 1))
            if rows.stop - rows.start > self.most_rows and parts[-1].start < expert:
                parts.append(slice(expert, expert))
            parts[-1] = slice(parts[-1].start, expert + 1)
        ranges = map(self.range_of, parts)
        return [part for part, rows in zip(parts, ranges, strict=True) if rows.start < rows.stop]

    def numbers_of(self, experts: slice) -> torch.Tensor:
        """Returns the group of each row of some experts: first by expert, then by call."""
        numbers: torch.Tensor = self.keys[self.range_of(experts)] - experts.start * self.num_calls
        return numbers

    def ends_of(self, experts: slice) -> torch.Tensor:
        """Returns where the rows of each of these groups end, counted from the first: int32."""
        first, end = experts.start * self.num_calls + 1, experts.stop * self.num_calls + 1
        ends: torch.Tensor = self.ends[first:end] - self.range_of(experts).start
        return ends.to(torch.int32)
