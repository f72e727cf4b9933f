"""Values that come from a checkpoint: those that are read once, and those that stay where they are.

A frozen parameter whose elements lie in the files as they are, or as a codec can decode them, rests
in the files. Every other parameter is read once and written to its tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from torch import nn

from infinity.modules.reading.adapters import copied_parameters, derived_parameters
from infinity.modules.tiling.layers import TiledParam
from infinity.sizes import format_nbytes
from infinity.state.stored import StoredTensor, stored_tiles
from infinity.storage.shards import ShardIdentity

_log = logging.getLogger("infinity")

TileRows = Callable[[str], list[tuple[str, int, int]]]


class LoadPlan(Protocol):
    """Checked weights that can be streamed."""

    @property
    def identities(self) -> Sequence[ShardIdentity]:
        """The files in which the tensors of `stored` are."""

    def stored(self) -> Mapping[str, StoredTensor]:
        """Returns the tensors that can be read in place, by the name of their parameter."""

    def load(
        self,
        write: Callable[[str, Any], None],
        tile_rows: TileRows | None = None,
        in_place: Set[str] = frozenset(),
    ) -> Any:
        """Reads the tensors and calls write(name, tensor) for each.

        tile_rows: row ranges by name; a plan that can writes a tensor in these ranges
        in_place: names of parameters that are not read
        """


class StoredParams:
    """The frozen parameters of a model that rest in files. Empty without a plan.

    A parameter whose value an adapter computes from others, or changes, is not among them.
    """

    def __init__(self, model: nn.Module, plan: LoadPlan | None) -> None:
        self._by_id: dict[int, StoredTensor] = {}
        self.identities: Sequence[ShardIdentity] = ()
        if plan is None:
            return
        self.identities = plan.identities
        others = set(derived_parameters(model))
        others |= {id(copy) for copy, _ in copied_parameters(model)}
        stored = plan.stored()
        copied_nbytes, first = 0, ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                continue
            if name in stored and id(parameter) not in others:
                self._by_id[id(parameter)] = stored[name]
            else:
                copied_nbytes += parameter.numel() * parameter.element_size()
                first = first or name
        if first and self._by_id:
            _log.info(
                "%s of frozen weights cannot be read in place and are copied, the first of them %r",
                format_nbytes(copied_nbytes), first,
            )  # fmt: skip

    def by_parameter(self, tiled_params: Sequence[TiledParam]) -> dict[int, StoredTensor]:
        """Returns the stored parameters by the id of the parameter, or of each of its tiles.

        A parameter with a tile that its codec cannot cut out of the stored bytes is left out.
        """
        found, copied = dict(self._by_id), []
        for tiled in tiled_params:
            stored = found.pop(id(tiled.tensor), None)
            if stored is None:
                continue
            parts = stored_tiles(stored, tiled.starts)
            copied += [tiled] if parts is None else []
            for index, part in enumerate(parts or ()):
                if index not in tiled.own:
                    found[id(tiled.tiles[index])] = part
        if copied:
            _log.info(
                "%s of frozen weights cannot be cut into tiles in place and are copied, the "
                "first of them %r",
                format_nbytes(sum(of.tensor.nbytes for of in copied)), copied[0].name,
            )  # fmt: skip
        return found
