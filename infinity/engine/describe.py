"""Describes an offloaded model: where its state rests, and which part of it is in memory.

`infinity.describe(model)` returns a `Residence`. It prints as a table; a notebook shows it as one.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infinity.config.values import PLACED_KINDS
from infinity.engine.engine import Engine
from infinity.sizes import format_nbytes
from infinity.state.store import CheckpointLocation

TIERS = ("device", "host", "nvme", "checkpoint")


@dataclass(frozen=True, slots=True)
class Residence:
    """A model's state at one moment. Bytes are those of this rank.

    resting: bytes by kind of state and tier; "checkpoint" is the files of a frozen base.
    host_in_use_nbytes: of the host budget, with what rests there, weights that are kept, and
        transfers under way.
    weights_in_memory: (units, bytes) with weights in host or device memory, wherever they rest.
    """

    model: str
    num_params: int
    num_trainable: int
    num_units: int
    resting: Mapping[str, Mapping[str, int]]
    host_capacity_nbytes: int
    host_in_use_nbytes: int
    weights_in_memory: tuple[int, int]
    places: Mapping[str, str]
    read_nbytes: int
    written_nbytes: int

    def __str__(self) -> str:
        rows = [("", *TIERS), *((kind, *cells) for kind, cells in self._rows())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(TIERS) + 1)]
        table = [
            f"  {row[0]:<{widths[0]}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        return "\n".join([self._title(), *table, *(f"  {line}" for line in self._lines())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{tier}</th>" for tier in ("", *TIERS))
        body = "".join(
            f"<tr><th style='text-align:left'>{kind}</th>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
            for kind, cells in self._rows()
        )
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self._lines())
        return (
            f"<div><b>{html.escape(self._title())}</b></div>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}"
        )

    def _title(self) -> str:
        return (
            f"{self.model}: {self.num_params:,} parameters, {self.num_trainable:,} trained, "
            f"{self.num_units} units"
        )

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        for kind, tiers in self.resting.items():
            yield kind, [format_nbytes(tiers[tier]) if tier in tiers else "" for tier in TIERS]

    def _lines(self) -> Iterator[str]:
        count, nbytes = self.weights_in_memory
        yield (
            f"in memory: {format_nbytes(self.host_in_use_nbytes)} of the host budget of "
            f"{format_nbytes(self.host_capacity_nbytes)}; weights of {count} of {self.num_units} "
            f"units ({format_nbytes(nbytes)})"
        )
        for tier, place in self.places.items():
            yield f"{tier}: {place}"
        yield (
            f"since offload: {format_nbytes(self.read_nbytes)} read, "
            f"{format_nbytes(self.written_nbytes)} written"
        )


def describe(engine: Engine) -> Residence:
    """Returns the residence of the engine's model. Moves nothing."""
    store, counted = engine.store, engine.counters.snapshot()
    resting = engine.placed_nbytes()
    present = engine.weight_cache.present()
    places = {}
    if store.volume is not None:
        places["nvme"] = ", ".join(str(tier.path) for tier in engine.config.tiers.nvme)
    if store.shards is not None:
        # A shard of a rank is a part of a full unit.
        divided = engine.ranks.partition
        num_full = len(store.units if divided is None else divided.full_units)
        # As stored, not as decoded.
        resting["parameters"]["checkpoint"] = sum(
            location.stored.nbytes
            for (unit, _), location in store.placed().items()
            if unit < num_full and isinstance(location, CheckpointLocation)
        )
        folders = sorted({os.path.dirname(path) for path in store.shards.identities})
        places["checkpoint"] = "read in place from " + ", ".join(folders)
    if engine.ranks.partition is not None:
        places["ranks"] = engine.ranks.routes()
    parameters = list(engine.model.parameters())
    return Residence(
        model=type(engine.model).__name__,
        num_params=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        num_units=len(store.units),
        resting={
            kind: resting[kind] for kind in PLACED_KINDS if any(resting.get(kind, {}).values())
        },
        host_capacity_nbytes=engine.pool.capacity_nbytes,
        host_in_use_nbytes=engine.pool.in_use_nbytes,
        weights_in_memory=(len(present), sum(unit.weight_nbytes for unit in present)),
        places=places,
        read_nbytes=int(counted.get("nvme_read_nbytes", 0)),
        written_nbytes=int(counted.get("nvme_write_nbytes", 0)),
    )
