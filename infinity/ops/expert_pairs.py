"""The order in which pairs of token and expert pass a tile of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Pairs:
    """The pairs of token and expert, ordered by expert, then by a token's choice, then by token.

    indices: [tokens, k], the experts of each token; an index past the last expert belongs to no
    expert. `read` comes before any use on the host.
    """

    def __init__(self, indices: torch.Tensor, num_experts: int) -> None:
        self._experts, order = indices.t().reshape(-1).sort(stable=True)
        self.tokens, self.choices = order % len(indices), order // max(len(indices), 1)
        borders = torch.arange(num_experts + 1, dtype=indices.dtype, device=indices.device)
        self.ends = torch.searchsorted(self._experts, borders)
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
        return slice(self.ends_on_host[experts.start], self.ends_on_host[experts.stop])

    def places_of(self, experts: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token and choice of the pairs of some experts."""
        rows = self.range_of(experts)
        return self.tokens[rows], self.choices[rows]

    def numbers_of(self, experts: slice) -> torch.Tensor:
        """Returns the expert of each pair, counted from the first of these experts."""
        numbers: torch.Tensor = self._experts[self.range_of(experts)] - experts.start
        return numbers

    def ends_of(self, experts: slice) -> torch.Tensor:
        """Returns where the pairs of each expert end, counted from those of the first: int32."""
        ends = self.ends[experts.start + 1 : experts.stop + 1] - self.range_of(experts).start
        narrow: torch.Tensor = ends.to(torch.int32)
        return narrow

    def parts(self, experts: slice, most_rows: int) -> list[slice]:
        """Divides experts into parts with pairs, of no more than `most_rows`, or of one step."""
        parts = [slice(experts.start, experts.start)]
        for stop in range(experts.start + experts.step, experts.stop + 1, experts.step):
            grown = slice(parts[-1].start, stop)
            rows = self.range_of(grown)
            if rows.stop - rows.start > most_rows and parts[-1].start < parts[-1].stop:
                grown = slice(parts[-1].stop, stop)
                parts.append(grown)
            parts[-1] = grown
        ranges = map(self.range_of, parts)
        return [part for part, rows in zip(parts, ranges, strict=True) if rows.start < rows.stop]
