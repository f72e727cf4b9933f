"""The rates of a node's links and processors, as the simulated step needs them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the links and processors of a node, all devices together: bytes and FLOPs per
    second.

    `nvme_mixed` is the sum of both directions if equal amounts are read and written. `update`
    counts every byte that the optimizer's pass reads or writes. `host` counts the bytes of summed
    gradients. `norm` is that of one thread that computes norms, of which there are `norm_threads`
    beside a device and one on the host. `hold` counts the bytes of weights that the engine maps
    under a computation on the host. `device_update` is `update` on the devices. `gather` is None
    with one device. `decode` counts the bytes of weights that are made of stored ones where they
    are computed with.

    `checkpoint_read` is the rate of the drives that hold the checkpoint of a frozen base; at most
    that of all drives.

    With ranks, `peers` is the rate at which a rank's device receives from the other devices, and
    `sockets` that at which its host receives, and `network` this rank's part of the rate at which a
    node receives from other nodes. Sending takes as long.
    """

    flops: float
    update: float
    host: float
    norm: float = float("inf")
    norm_threads: float = 1.0
    hold: float = float("inf")
    device_update: float = float("inf")
    decode: float = float("inf")
    nvme_read: float = float("inf")
    nvme_write: float = float("inf")
    nvme_mixed: float = float("inf")
    checkpoint_read: float = float("inf")
    h2d: float = float("inf")
    d2h: float = float("inf")
    gather: float | None = None
    peers: float = float("inf")
    sockets: float = float("inf")
    network: float = float("inf")

    @property
    def checkpoint_slowness(self) -> float:
        """The time of a byte of the checkpoint over the time of a byte that all drives read."""
        return max(1.0, self.nvme_read / self.checkpoint_read)

    def norms_s(self, nbytes: float) -> float:
        """Returns the time of the norms of gradients on all threads beside a device."""
        return nbytes / min(self.norm * self.norm_threads, self.host)

    def last_norm_s(self, nbytes: float, largest_nbytes: float) -> float:
        """Returns the time from `norms_s` of gradients until the largest of them is measured, on
        one thread."""
        return max(0.0, largest_nbytes / self.norm - self.norms_s(nbytes))

    def nvme_s(self, read_nbytes: float, write_nbytes: float) -> float:
        """Returns the least time to read and write these bytes, in any useful interleaving."""
        alone_s = read_nbytes / self.nvme_read + write_nbytes / self.nvme_write
        both_nbytes = min(read_nbytes, write_nbytes)
        mixed_s = (
            2 * both_nbytes / self.nvme_mixed
            + (read_nbytes - both_nbytes) / self.nvme_read
            + (write_nbytes - both_nbytes) / self.nvme_write
        )
        least_s = max(read_nbytes / self.nvme_read, write_nbytes / self.nvme_write)
        return max(min(alone_s, mixed_s), least_s)


def drive_rates(read: float, write: float, mixed: float | None) -> dict[str, float]:
    """Returns the drives' part of `Rates`. Without a rate for both directions at the same time,
    reads and writes alternate."""
    mixed = 2 / (1 / read + 1 / write) if mixed is None else mixed
    return {"nvme_read": read, "nvme_write": write, "nvme_mixed": mixed}
