"""The sections of the benchmark by name, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.errors import ConfigError
from infinity.tools.bench import nvme
from infinity.tools.bench.measure import Comparison, Lab

SECTIONS = (
    "read", "write", "mixed", "sweep", "latency", "stripes", "host", "optimizer", "device",
    "pipeline",
)  # fmt: skip
_ON_DRIVES = ("read", "write", "mixed", "sweep", "latency")


QUICK_SECTIONS = ("read", "write", "mixed", "latency", "host", "optimizer")


def check_sections(names: Sequence[str], *, quick: bool) -> tuple[str, ...]:
    """Returns the requested sections in running order; without a request all, or all quick ones.

    Raises ConfigError for a name that is no section.
    """
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise ConfigError(f"--only {','.join(unknown)}: expected some of {', '.join(SECTIONS)}")
    wanted = names or (QUICK_SECTIONS if quick else SECTIONS)
    return tuple(name for name in SECTIONS if name in wanted)


def run(lab: Lab, sections: Sequence[str]) -> Iterator[Comparison]:
    """Yields results as they arrive. Scratch files exist only while a drive's sections run."""
    if any(name in _ON_DRIVES for name in sections):
        for directory in lab.directories:
            with nvme.open_drives(lab, [directory]) as drives:
                for kind in nvme.KINDS:
                    yield from nvme.bandwidth(drives, kind) if kind in sections else ()
                for kind in nvme.KINDS if "sweep" in sections else ():
                    yield from nvme.sweep(drives, kind)
                yield from nvme.latency(drives) if "latency" in sections else ()
    if "stripes" in sections and len(lab.directories) > 1:
        yield from nvme.stripes(lab)
    if "host" in sections or "optimizer" in sections:
        from infinity.tools.bench import memory  # torch

        yield from memory.host_copies(lab) if "host" in sections else ()
        yield from memory.optimizer(lab) if "optimizer" in sections else ()
    if "device" in sections or "pipeline" in sections:
        yield from _device(lab, sections)


def _device(lab: Lab, sections: Sequence[str]) -> Iterator[Comparison]:
    """Yields nothing on a machine without a device that has memory of its own."""
    import torch

    if not torch.cuda.is_available():
        return
    from infinity.observe import Counters
    from infinity.tiers.cuda import CudaDevice
    from infinity.tiers.host import HostPool
    from infinity.tools.bench import memory

    counters = Counters()
    cuda = CudaDevice(HostPool(lab.arena, counters), counters)
    try:
        if "device" in sections:
            yield from memory.device_copies(lab, cuda)
        if "pipeline" in sections and lab.directories:
            with nvme.open_drives(lab, lab.directories) as drives:
                yield from memory.pipeline(drives, cuda, nvme.EXTENT_NBYTES)
    finally:
        cuda.close()
