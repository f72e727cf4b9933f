"""A swap-tier table for tiny models, and an offloaded model for the length of a block."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import infinity
from infinity.engine.engine import Engine

KINDS = ("parameters", "master", "moments", "gradients")


def units_in_use(engine: Engine) -> list[str]:
    """Names of the units in use: none between a backward and the next forward."""
    with engine._lock:
        engine._backwards.abandon()
        return engine.weight_cache.in_use()


def small_tiers(
    swap: str | Path | None, host_nbytes: int | str = "16MiB", **host: Any
) -> dict[str, Any]:
    """The section `tiers`: a little host memory, and a swap directory unless it is None."""
    tiers: dict[str, Any] = {"host": {"capacity": host_nbytes, "huge_pages": False} | host}
    if swap is not None:
        tiers["nvme"] = [{"path": str(swap), "capacity": "64MiB"}]
    return tiers


def swap_config(
    directory: Path | None,
    *,
    placement: str | Mapping[str, Any] = "nvme",
    host_nbytes: int | str = "8MiB",
    device_nbytes: int | str | None = None,
    nvme_nbytes: int | str = "256MiB",
    engine: str = "threads",
    stripe: int | str = "16KiB",
    prefetch: bool = True,
    updates: str = "deferred",
    compute: str = "float32",
    update_chunk: int | str = "64KiB",
    **more: Mapping[str, Any],
) -> dict[str, Any]:
    """A table with blocks, stripes and chunks so small that tiny models cross them.

    `placement` is one tier for every state kind, or a mapping of state kind to a tier or list of
    tiers, kinds left out going to the host. `more` adds or overrides sections.
    """
    if isinstance(placement, str):
        placement = {kind: [placement] for kind in KINDS}
    table: dict[str, Any] = {
        "tiers": {
            "device": {"kind": "cpu"} if device_nbytes is None else
            {"kind": "cpu", "capacity": device_nbytes},
            "host": {"capacity": host_nbytes, "huge_pages": False},
        },
        "placement": {kind: placement.get(kind, ["host"]) for kind in KINDS},
        "io": {"engine": engine, "block_size": "64KiB", "stripe": stripe, "queue_depth": 2,
               "threads": 2},
        "schedule": {"prefetch": prefetch, "update_chunk": update_chunk, "updates": updates,
                     "update_on": "host"},
        "precision": {"compute": compute},
    }  # fmt: skip
    if directory is not None:
        table["tiers"]["nvme"] = [{"path": str(directory), "capacity": nvme_nbytes}]
    for section, values in more.items():
        table[section] = {**table.get(section, {}), **values}
    return table


@contextmanager
def offloaded(model: nn.Module, config: dict[str, Any], **options: Any) -> Iterator[nn.Module]:
    """`infinity.offload` for the length of a block; the engine is closed and collected after it."""
    model = infinity.offload(model, config, **options)
    try:
        yield model
    finally:
        infinity.engine_of(model).close()
        del model
        gc.collect()
