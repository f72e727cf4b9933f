"""A machine for predictions of bytes and of order, which no rate changes."""

from __future__ import annotations

from infinity.plan.hardware import Device, Hardware, Host, Nvme

ANY_MACHINE = Hardware(
    name="any", source="", host=Host(memory=1 << 34, update_gb_per_s=1, sum_gb_per_s=1),
    device=Device(tflops=1), nvme=Nvme(capacity=1 << 34, read_gb_per_s=1, write_gb_per_s=1),
)  # fmt: skip
