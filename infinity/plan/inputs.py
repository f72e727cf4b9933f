"""Layer inputs that wait for the backward, and what a plan warns of. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from infinity.config import SwapConfig
from infinity.plan.capacity import window_nbytes_of
from infinity.plan.hardware import Hardware
from infinity.plan.layout import PlannedModel
from infinity.simulate.job import Batch
from infinity.simulate.memory import inputs_on_host
from infinity.simulate.spec import StepSpec
from infinity.sizes import MIB, format_nbytes
from infinity.state.budgets import Budgets
from infinity.state.units import StateKind

_CHECKPOINT_ITEM_NBYTES = 2
_BLAS_NBYTES = 32 * MIB  # PyTorch's workspace of cuBLAS on Hopper and later, for each thread.
_BLAS_THREADS = 2  # The thread that trains, and autograd's.


def saved_on(config: SwapConfig, budgets: Budgets) -> str:
    """Returns the last tier that the inputs of blocks may go to."""
    tiers = config.placement.activations
    first, last = tiers[0], tiers[-1]
    if config.schedule.micro_batch is None or first == "device":
        return "device"
    return "host" if first == "host" and budgets.shares_host_memory else last


def saved_inputs(job: StepSpec) -> dict[str, int]:
    """Returns the bytes by tier of the inputs of all blocks that leave the device, for all tokens
    of a step, in the compute dtype, as the engine saves them in layer-major order."""
    nbytes, on_host_nbytes = sum(use.saved_nbytes for use in job.uses), 0
    if job.saved_on == "device":
        return {}
    on_host_nbytes = sum(inputs_on_host(job))
    found = {"host": on_host_nbytes, "nvme": nbytes - on_host_nbytes}
    return {tier: nbytes for tier, nbytes in found.items() if nbytes}


def activations_nbytes(config: SwapConfig, hardware: Hardware, batch: Batch) -> int:
    """Returns the memory of one device outside the window and the workspaces of cuBLAS: one for
    each thread that multiplies, and in layer-major order each micro-batch has a thread."""
    device, micro_batch = hardware.device, config.schedule.micro_batch
    threads = _BLAS_THREADS
    if micro_batch is not None:
        sequences = batch.num_tokens / device.count / batch.sequence_length
        threads += math.ceil(sequences / micro_batch)
    window_nbytes = window_nbytes_of(config, hardware) or 0
    return (device.memory or 0) - window_nbytes - threads * _BLAS_NBYTES


def waiting_nbytes(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> int:
    """Returns the bytes of hidden states and sums of a block's experts, for all tokens of a step,
    that wait on the host while experts are streamed in chunks. They go to the device and back for
    every chunk.

    They are in the compute dtype, and stay on the device if half of `activations_nbytes` holds
    them; the other half is for the activations of a micro-batch. 0 then, and without chunks.
    """
    has_chunks = any(hooked.is_experts for hooked in model.hooked_modules)
    if model.frozen is None or not has_chunks or hardware.shares_host_memory:
        return 0
    nbytes = 2 * input_nbytes(config, model, batch)
    free_nbytes = hardware.device.count * activations_nbytes(config, hardware, batch)
    return 0 if 2 * nbytes <= free_nbytes else nbytes


def said_of_waiting(config: SwapConfig, nbytes: int) -> list[str]:
    """Returns the setting that a batch needs whose hidden states wait on the host, for a reader."""
    if not nbytes or "device" not in config.placement.experts:
        return []
    return [
        f"hidden states and sums of a block's experts take {format_nbytes(nbytes)}, which "
        'the devices cannot hold: this forecast is for placement.experts = ["host"]'
    ]


def obstacles_of(
    config: SwapConfig,
    model: PlannedModel,
    machine: Hardware,
    batch: Batch,
    budgets: Budgets,
    saved: Mapping[str, int],
    waiting: int,
) -> list[str]:
    """Returns the reasons why a batch does not fit, for a reader."""
    found = _said_of_kept(config, model, machine, batch)
    found += _said_of_block(config, model, machine, batch)
    on_host, working = saved.get("host", 0), budgets.working_nbytes
    has_to_work = f"of the host, which has {format_nbytes(working)} to work in"
    if on_host > working and not machine.shares_host_memory:
        found.append(
            f"layer inputs take {format_nbytes(on_host)} {has_to_work}: this batch does not fit; "
            "set placement.activations to nvme, or make the batch smaller"
        )
    if waiting and waiting + on_host > working:
        found.append(
            f"hidden states and sums of a block's experts take {format_nbytes(waiting)} "
            f"{has_to_work}: this batch does not fit; make the batch smaller"
        )
    return found


def _said_of_kept(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> list[str]:
    device = hardware.device
    is_saved = config.schedule.micro_batch and "device" not in config.placement.activations
    if device.memory is None or not batch.recomputes or (is_saved and batch.has_backward):
        return []
    blocks = sum(hooked.attention_width > 0 for hooked in model.hooked_modules)
    if not batch.has_backward:
        blocks = 1
    values = batch.num_tokens / device.count * model.checkpoint_width * blocks
    kept_nbytes = values * _CHECKPOINT_ITEM_NBYTES
    free_nbytes = activations_nbytes(config, hardware, batch)
    if kept_nbytes <= free_nbytes:
        return []
    if not batch.has_backward:
        return [
            f"the hidden states of a sweep take {format_nbytes(kept_nbytes)} a device, and "
            f"{format_nbytes(max(free_nbytes, 0))} are free: give fewer --tokens"
        ]
    return [
        f"the inputs of the blocks that the backward starts from take "
        f"{format_nbytes(kept_nbytes)} a device, and {format_nbytes(max(free_nbytes, 0))} are "
        "free: this batch does not fit; make the micro-batch smaller, or set "
        "schedule.micro_batch with placement.activations on host or nvme"
    ]


def _said_of_block(
    config: SwapConfig, model: PlannedModel, hardware: Hardware, batch: Batch
) -> list[str]:
    """The least that the backward of a block holds: for a token, the inputs and outputs of its
    products, which are as many as its weights by the width."""
    if hardware.device.memory is None or not batch.has_backward:
        return []
    num_tokens, count = batch.num_tokens, hardware.device.count
    if config.schedule.micro_batch is not None:
        num_tokens = min(num_tokens, config.schedule.micro_batch * batch.sequence_length * count)
    blocks = (hooked for hooked in model.hooked_modules if hooked.attention_width)
    params = max((hooked.frozen_params + hooked.trained_params for hooked in blocks), default=0)
    nbytes = num_tokens / count * params / model.checkpoint_width * _CHECKPOINT_ITEM_NBYTES
    # Workspaces for threads of more micro-batches are smaller on other devices.
    one = replace(batch, num_tokens=num_tokens)
    free_nbytes = max(activations_nbytes(config, hardware, one), 0)
    if nbytes <= free_nbytes:
        return []
    return [
        f"the activations of one block take {format_nbytes(nbytes)} or more for a micro-batch, and "
        f"{format_nbytes(free_nbytes)} are free on a device: this batch does not fit; make the "
        "micro-batch, its sequences or tiers.device.capacity smaller"
    ]


def input_nbytes(config: SwapConfig, model: PlannedModel, batch: Batch) -> int:
    """Returns the bytes of one block's input, for all tokens of a step."""
    itemsize = 2 if config.precision.compute_dtype == "bfloat16" else 4
    return batch.tokens_per_step * model.checkpoint_width * itemsize


def said_of_tiles(untiled: PlannedModel, model: PlannedModel) -> list[str]:
    """Returns how layers are divided, for a reader."""
    num_tiles = len(model.units) - len(untiled.units)
    if num_tiles <= 0:
        return []
    names = {unit.name for unit in untiled.units}
    parameters = StateKind.PARAMETERS
    tiles = [unit.nbytes(parameters) for unit in model.units if unit.name not in names]
    return [
        f"layers too large to be fetched whole run as {len(tiles):,} tiles of at most "
        f"{format_nbytes(max(tiles))}"
    ]


def said_of_devices(hardware: Hardware) -> list[str]:
    """Returns what a plan without ranks says of several devices."""
    count = hardware.device.count
    if count == 1:
        return []
    return [
        f"units are taken to be cut over {count} devices by one program; the engine has "
        f"a rank for each, see --ranks {count}"
    ]
