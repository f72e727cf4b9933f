"""First values over ranks: each rank computes all of them, writes its part, and asks no other rank
before all have written theirs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import infinity
from infinity.distributed.store import DistributedStore
from tests.support.offloading import small_tiers

from .processes import run_ranks
from .work import NVME, read_weights

LATE = 1
SIDE = 160  # Above the size that `infinity.init_empty_weights` keeps real.


def _config(swap: str, capacity: str = "48MiB") -> dict[str, Any]:
    return {
        "tiers": small_tiers(swap, capacity),
        "placement": NVME,
    }


def _be_late(rank: int) -> None:
    """Rank LATE writes its part of each unit after the others."""
    write = DistributedStore._write_part

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    if rank == LATE:
        DistributedStore._write_part = late  # type: ignore[method-assign]


def _columns(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=1)


def _magnitudes(rank: int, swap: str) -> bool:
    from peft import LoraConfig, get_peft_model

    _be_late(rank)
    config = _config(swap, "16MiB")  # Less than the weights: they are read again.
    with infinity.init_empty_weights(config):
        model = Model(Settings(side=512, blocks=12))
    tuned = get_peft_model(model, LoraConfig(target_modules=["up"], use_dora=True))
    infinity.offload(tuned, config, seed=3)
    found = read_weights(tuned)
    infinity.engine_of(tuned).close()
    bases = {name: w for name, w in found.items() if name.endswith("up.base_layer.weight")}
    assert len(bases) == 12 and all(float(w.std()) > 0 for w in bases.values())
    return all(
        torch.equal(
            found[name.replace("base_layer.weight", "lora_magnitude_vector.default.weight")],
            _columns(weight),
        )
        for name, weight in bases.items()
    )


def test_values_that_derive_from_weights_of_a_late_rank_wait_for_them(tmp_path: Path) -> None:
    assert run_ranks(2, _magnitudes, str(tmp_path / "swap")) == [True, True]


class Settings(PretrainedConfig):
    model_type = "rules"

    def __init__(self, rule: str = "plain", side: int = SIDE, blocks: int = 3, **more: Any) -> None:
        super().__init__(**more)
        self.rule, self.side, self.blocks = rule, side, blocks


class Block(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.up = nn.Linear(side, side)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Model(PreTrainedModel):
    """Its rule visits every block, and then some weights again, as that of GPT-2 does."""

    config_class = Settings

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(config.side) for _ in range(config.blocks))
        self.post_init()

    def is_custom_code(self) -> bool:
        return False  # As classes of transformers, whose rules run for every module.

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()
            module.bias.data.zero_()
        elif module is self:
            for block in self.blocks:
                weight = block.up.weight
                if self.config.rule == "again":
                    weight.data.normal_(std=0.5)
                elif self.config.rule == "of all":
                    weight.data.div_(weight.data.norm())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _visit_again(rank: int, swap: str, rule: str, side: int, capacity: str) -> Any:
    _be_late(rank)
    served: list[int] = []
    serve = DistributedStore.serve

    def noted(self: DistributedStore, unit: int, kind: int, *, to: int) -> Any:
        served.append(unit)
        return serve(self, unit, kind, to=to)

    DistributedStore.serve = noted  # type: ignore[method-assign]
    config = _config(swap, capacity)
    with infinity.init_empty_weights(config):
        model = Model(Settings(rule=rule, side=side))
    try:
        infinity.offload(model, config, seed=3)
    except infinity.errors.ConfigError as error:
        return str(error)
    assert not served, "a rank has asked for a part while first values were written"
    dist.barrier()  # All ranks have looked before one reads.
    found = read_weights(model)
    infinity.engine_of(model).close()
    return found


def test_a_rule_that_visits_weights_again_asks_no_other_rank(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "swap"), "again", SIDE, "48MiB")
    [alone] = run_ranks(1, _visit_again, *arguments)
    for found in run_ranks(2, _visit_again, *arguments):
        assert not isinstance(found, str) and found.keys() == alone.keys(), found
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def test_a_rule_that_reads_what_other_ranks_keep_is_refused(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "swap"), "of all", 1024)
    [alone] = run_ranks(1, _visit_again, *arguments, "256MiB")
    for found in run_ranks(2, _visit_again, *arguments, "256MiB"):  # All stays in memory.
        assert all(torch.equal(found[name], alone[name]) for name in alone)
    for found in run_ranks(2, _visit_again, *arguments, "24MiB"):
        assert "are not numbers" in found and "tiers.host.capacity" in found
