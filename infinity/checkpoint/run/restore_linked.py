"""Makes linked state current again in the swap files that hold it, without a copy.

A checkpoint of this run, or of a run whose swap files were adopted (`adopt.py`), links to the swap
files of this run. If the volume still has the frozen content of the checkpoint, the load needs only
the old map of the volume and the checksums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from infinity.checkpoint.run.commit import is_linkable, label_of, linked_runs, linked_tensors
from infinity.checkpoint.run.files import KeptTensors
from infinity.checkpoint.run.layout import STREAMED
from infinity.checkpoint.run.linked import COPIES_NAME, LinkedKind, LinkedState
from infinity.checkpoint.run.open_checkpoint import OpenCheckpoint
from infinity.engine.state_access import StateAccess
from infinity.state.store import NvmeLocation
from infinity.state.units import StateKind, Unit
from infinity.storage.frozen_content import FrozenContent
from infinity.storage.page_reader import PageReader
from infinity.storage.volume import Volume


@dataclass(frozen=True, slots=True)
class _Match:
    """A state kind of a unit that the swap files hold as the checkpoint has it."""

    unit: Unit
    state_kind: StateKind
    location: NvmeLocation
    entry: LinkedKind
    swap_paths: frozenset[str]


def restore_linked(
    checkpoint: OpenCheckpoint, state: StateAccess, kept: KeptTensors, rank: int
) -> set[tuple[Unit, StateKind]]:
    """Restores the linked state of this rank in its swap files; returns what is restored.

    Either all linked state of the rank is restored, or nothing. Weights that every rank keeps in
    full are not restored, because each rank has linked only a part of them; nor are those that
    another node has linked. Every page is compared
    with its CRC32C before anything changes. Raises CorruptionError, StorageError.
    """
    volume, place = state.store.volume, checkpoint.place_of(rank)
    linked, label = checkpoint.linked_states.get(place), label_of(checkpoint.path)
    frozen = next((f for f in volume.frozen if f.label == label), None) if volume else None
    if volume is None or linked is None or frozen is None:
        return set()
    matches = _find_matches(linked, state, kept, volume, frozen)
    if matches is None:
        return set()
    for swap_path in {path for match in matches for path in match.swap_paths}:
        link = checkpoint.path / place / os.path.basename(swap_path)
        if not os.path.samefile(swap_path, link):
            return set()
    with PageReader() as pages:
        for match in matches:
            for _ in linked.read(pages, match.entry, 0, match.entry.nbytes):
                pass  # Reading compares; a wrong page raises.
    state.weight_cache.forget()
    volume.restore(frozen)
    for match in matches:
        volume.put_checksums(match.location.extents, linked.checksums_of(match.entry))
    return {(match.unit, match.state_kind) for match in matches}


def _find_matches(
    linked: LinkedState,
    state: StateAccess,
    kept: KeptTensors,
    volume: Volume,
    frozen: FrozenContent,
) -> list[_Match] | None:
    """Pairs linked state with the frozen ranges of the volume; None if any of it has no pair."""
    entries = {
        (entry.unit, entry.state_kind): entry
        for entry in linked.kinds
        if any(run.file != COPIES_NAME for run in entry.runs)
    }
    matches, divided = [], state.partition
    for unit, kept_tensors in kept:
        if divided is not None and not divided.is_saver(unit):
            continue
        for state_kind in STREAMED:
            tensors = [tensor for tensor in kept_tensors if tensor.state_kind is state_kind]
            if not tensors or not is_linkable(state, unit, state_kind):
                continue
            entry = entries.pop((unit.name, state_kind.value), None)
            if divided is not None and tensors[0].share is None:
                continue
            rows = tuple(row for tensor in tensors for row in linked_tensors(unit, tensor))
            if entry is None or entry.tensors != rows:
                return None
            location = state.store.location(unit, state_kind)
            assert isinstance(location, NvmeLocation)
            ranges = volume.locate(location.extents, frozen)
            if entry.runs != linked_runs(ranges):
                return None
            paths = frozenset(swap_range.path for swap_range in ranges)
            matches.append(_Match(unit, state_kind, location, entry, paths))
    return None if entries else matches
