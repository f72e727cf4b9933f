"""The draft that suits a model and a machine: what `infinity new` writes, and what
`infinity.from_pretrained` does without a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TypeAlias

import torch

from infinity.config import SwapConfig
from infinity.plan.directory import ModelDirectory
from infinity.plan.hardware import Device, Hardware, Host, Nvme
from infinity.plan.layout import PlannedModel
from infinity.plan.model import model_for
from infinity.plan.predict import Forecast, forecast
from infinity.simulate.job import batch_of
from infinity.storage.arena import available_host_nbytes
from infinity.tiers.open_device import device_kind
from infinity.tools.plan.data_facts import IMAGES
from infinity.tools.plan.draft import Draft, Wish, draft, fitted_draft
from infinity.tools.training.settle import settle

# The machine on which the first draft of a wish runs the model of a directory.
Machine: TypeAlias = Callable[[SwapConfig, PlannedModel, ModelDirectory], Hardware]


def decide(
    wish: Wish, directory: ModelDirectory, machine_of: Machine
) -> tuple[Hardware, Draft, Forecast]:
    """Returns the machine, the first draft that fits it, and its forecast; if none fits, the last
    draft with its obstacles. Raises CapacityError if the state fits in no way."""
    first = settle(draft(wish, None, spills=bool(wish.swap)).config)
    has_images = wish.noun == IMAGES
    model = model_for(first, directory.shape, directory.stored, has_images=has_images)
    machine = machine_of(first, model, directory)
    drives = directory.num_drives if directory.files and not wish.is_here else None
    return machine, *fit(wish, model, machine, drives)


def fit(
    wish: Wish, model: PlannedModel, machine: Hardware, shard_drives: int | None = None
) -> tuple[Draft, Forecast]:
    """Returns the first draft with which the model fits the machine, as `fitted_draft` does."""

    def forecaster(config: SwapConfig) -> Forecast:
        settled = settle(config)
        return forecast(
            settled, model, machine, batch_of(settled), num_ranks=wish.num_ranks,
            shard_drives=shard_drives,
        )  # fmt: skip

    return fitted_draft(wish, machine, forecaster)


def sizes_here(config: SwapConfig, *_: object) -> Hardware:
    """Returns this machine with its sizes, which take no time to read. The rates are round numbers:
    whether a draft fits does not depend on them."""
    memory = None
    if device_kind(config.tiers.device) == "cuda":
        memory = torch.cuda.mem_get_info()[0]
    free_nbytes = min(
        (shutil.disk_usage(tier.path.parent).free for tier in config.tiers.nvme), default=0
    )
    return Hardware(
        name="this machine",
        source="sizes only",
        host=Host(
            memory=available_host_nbytes(), update_gb_per_s=10, sum_gb_per_s=10, norm_threads=1
        ),
        device=Device(count=1, tflops=10, memory=memory, h2d_gb_per_s=20, d2h_gb_per_s=20),
        nvme=Nvme(drives=1, capacity=free_nbytes, read_gb_per_s=3, write_gb_per_s=2),
    )
