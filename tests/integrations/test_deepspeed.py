"""Loops that DeepSpeed's documentation writes, by `infinity.integrations.deepspeed`.

The first is "Getting started" (training and model checkpointing), the second the example of a data
set and a configuration on the command line. The model and the data are small.
"""

from __future__ import annotations

import io
import json
import math
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations import deepspeed
from infinity.tools.drop_in import DropIn

PARTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, batch):
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return self.frozen(batch).square().mean()

torch.manual_seed(0)
model = Net()
data_loader = torch.randn(8, 4, 8)
"""
LOOP = """
import deepspeed

model_engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config="ds_config.json"
)
losses, rates, client_sd = [], [], {}
_, loaded = model_engine.load_checkpoint("saved")
for step, batch in enumerate(data_loader):
    if loaded and step <= loaded["step"]:
        continue

    #forward() method
    loss = model_engine(batch.to(model_engine.device))

    #runs backpropagation
    model_engine.backward(loss)

    #weight update
    model_engine.step()
    losses.append(loss.item())
    rates.append(model_engine.get_lr()[0])

    #save checkpoint
    if step == 3 and not loaded:
        client_sd["step"] = step
        ckpt_id = loss.item()
        model_engine.save_checkpoint("saved", ckpt_id, client_state=client_sd)
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
"""
DATA = """
import argparse
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
with deepspeed.zero.Init():
    net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=data_loader.flatten(0, 1)
)
losses = []
for epoch in range(2):
    for i, data in enumerate(trainloader):
        loss = model_engine(data)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
"""
NAMES = """
import deepspeed
import deepspeed.comm as dist
from deepspeed.utils import log_dist, logger
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from deepspeed.runtime.zero import GatheredParameters

deepspeed.checkpointing.configure(None, deepspeed_config="ds_config.json")
optimizer = KIND(model.parameters(), lr=0.01, weight_decay=0.1)
forward = model.blocks[1].forward
model.blocks[1].forward = lambda batch: checkpoint(forward, batch)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
assert isinstance(engine, DeepSpeedEngine) and (dist.get_rank(), dist.get_world_size()) == (0, 1)
log_dist("said", ranks=[0])
log_dist("not said", ranks=[1])
logger.info("also said")
losses = []
for batch in data_loader:
    loss = engine(batch.to(get_accelerator().current_device_name()))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with GatheredParameters(list(model.parameters())):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
"""
ONE_LINE = "import infinity.integrations.deepspeed as deepspeed"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}  # fmt: skip
WARMUP = {"warmup_max_lr": 0.02, "warmup_num_steps": 2}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A loop joins the processes, as DeepSpeed does, and so it does alone."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def plain(config: dict[str, Any], rates: list[float]) -> tuple[list[float], dict[str, Any]]:
    """The loop without DeepSpeed, with these learning rates of its steps."""
    scope: dict[str, Any] = {}
    exec(PARTS, scope)
    model, losses = scope["model"], []
    chosen = [p for p in model.parameters() if p.requires_grad]
    params = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(chosen, **params, fused=True)
    num = config["gradient_accumulation_steps"]
    for index, batch in enumerate(scope["data_loader"]):
        loss = model(batch)
        (loss / num).backward()
        losses.append(loss.item())
        if (index + 1) % num == 0:
            torch.nn.utils.clip_grad_norm_(chosen, config["gradient_clipping"])
            for group in optimizer.param_groups:
                group["lr"] = rates[index // num]
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def ran(program: str, config: dict[str, Any], *, as_it_is: bool) -> dict[str, Any]:
    lines = (PARTS + program).splitlines()
    if not as_it_is:
        lines[lines.index("import deepspeed")] = ONE_LINE
    Path("ds_config.json").write_text(json.dumps(config))
    Path("program.py").write_text("\n".join(lines))
    with DropIn().installed() if as_it_is else nullcontext():
        return runpy.run_path("program.py", run_name="__main__")


@pytest.mark.parametrize("as_it_is", [True, False], ids=["as it is", "one line"])
def test_the_loop_of_getting_started_has_the_bits_of_plain_pytorch(
    as_it_is: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, clipping and frozen weights; a second start goes on from the
    checkpoint."""
    monkeypatch.chdir(tmp_path)
    found = ran(LOOP, CONFIG, as_it_is=as_it_is)
    losses, weights = plain(CONFIG, [0.01] * 4)
    assert found["losses"] == losses and len({*losses}) == 8
    assert found["model_engine"].global_steps == 4 and found["model_engine"].global_samples == 32
    assert all(torch.equal(found["weights"][name], weights[name]) for name in weights)
    infinity.close(found["model"])
    again = ran(LOOP, CONFIG, as_it_is=as_it_is)
    assert again["losses"] == losses[4:] and again["model_engine"].global_steps == 4
    assert all(torch.equal(again["weights"][name], weights[name]) for name in weights)
    infinity.close(again["model"])
    assert "deepspeed" not in sys.modules or as_it_is is False


@pytest.mark.parametrize("kind", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_names_that_scripts_import_of_deepspeeds_modules_are_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimizers, the device, checkpoints of activations and messages, each shown once."""
    monkeypatch.chdir(tmp_path)
    shown, *_ = deepspeed.utils.logger.handlers  # The others are pytest's.
    monkeypatch.setattr(shown, "stream", io.StringIO())
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    found = ran(NAMES.replace("KIND", kind), config, as_it_is=True)
    losses, weights = plain(CONFIG, [0.01] * 4)
    assert found["losses"] == losses
    assert shown.stream.getvalue() == "[Rank 0] said\nalso said\n"
    assert not deepspeed.utils.logger.propagate, "to the handlers of the program, too"
    assert all(torch.equal(found["weights"][name], weights[name]) for name in weights)
    infinity.close(found["model"])
    assert not any(name.startswith("deepspeed.") for name in sys.modules)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import deepspeed.pipe", r"deepspeed\.pipe is not here"),
        ("from deepspeed.moe.layer import MoE", r"deepspeed\.moe is not here"),
        ("from deepspeed.ops.adam import ZenFlowCPUAdam", r"ops\.adam\.ZenFlowCPUAdam is not here"),
        ("deepspeed.accelerator.get_accelerator().pin()", r"get_accelerator\(\)\.pin is not"),
        ("deepspeed.ops.adam.FusedAdam([], amsgrad=True)", "leave these options out"),
        ("deepspeed.checkpointing.configure(object())", "model_parallel_group"),
    ],
)
def test_other_names_are_refused_where_a_script_takes_them(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UnsupportedError, ModuleNotFoundError), match=said):
        ran(f"import deepspeed\n{line}\n", CONFIG, as_it_is=True)


def test_a_checkpoint_of_deepspeed_and_a_plain_backward_are_refused_with_the_way(
    tmp_path: Path,
) -> None:
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "latest").write_text("global_step7")
    (tmp_path / "global_step7" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)
    with pytest.raises(UnsupportedError, match=f"zero_to_fp32.py {tmp_path} OUT"):
        engine.load_checkpoint(tmp_path)
    engine(torch.ones(4)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"expected engine.backward\(loss\), which divides"):
        engine.step()
    engine.destroy()
    engine.destroy()
    assert "released" in repr(engine.module.weight)


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("WarmupLR", {}, [0, 0, 0.02, 0.02]),
        ("WarmupDecayLR", {"total_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.01, 0.02]),
        ("WarmupCosineLR", {"total_num_steps": 4, "cos_min_ratio": 0.5},
         [0, 0, 0.01, 0.01 * (0.5 + 0.5 * (1 + math.cos(math.pi / 2)) / 2)]),
    ],
)  # fmt: skip
def test_the_schedule_of_the_file_is_deepspeeds(
    kind: str, more: dict[str, Any], expected: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each gives a step the rate of the iteration before the last: the first has none."""
    monkeypatch.chdir(tmp_path)
    own = {"warmup_num_steps": 2} if kind == "WarmupCosineLR" else WARMUP
    config = CONFIG | {"scheduler": {"type": kind, "params": own | more}}
    found = ran(LOOP, config, as_it_is=True)
    infinity.close(found["model"])
    used = [0.0, *found["rates"][1::2]][:4]
    assert used == pytest.approx(expected)
    losses, weights = plain(config, used)
    assert found["losses"] == losses
    assert all(torch.equal(found["weights"][name], weights[name]) for name in weights)


def test_a_data_set_is_shuffled_and_the_file_comes_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["program.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    monkeypatch.setattr("sys.argv", arguments)
    found = ran(DATA, {"train_batch_size": 8, **{k: CONFIG[k] for k in ("optimizer",)},
                       "zero_optimization": {"stage": 2}}, as_it_is=True)  # fmt: skip
    engine = found["model_engine"]
    assert len(found["losses"]) == 8 and engine.train_micro_batch_size_per_gpu() == 8
    assert found["losses"][-1] < found["losses"][0]
    assert engine.module is found["net"] and engine.blocks is found["net"].blocks
    infinity.close(found["net"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": CONFIG | {"fp16": {"enabled": True}}}, "no fp16 with loss scaling"),
        ({"config": CONFIG | {"train_batch_size": 9}}, "train_batch_size"),
        ({"config": CONFIG | {"scheduler": {"type": "OneCycle"}}}, "WarmupLR"),
        ({"config": CONFIG | {"scheduler": {"type": "WarmupLR"}}}, "warmup_max_lr"),
        ({"config": CONFIG, "mpu": object()}, "mpu"),
        ({"config": CONFIG, "optimizer": lambda params: torch.optim.SGD(params)}, "SGD"),
        ({}, "--deepspeed_config"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name_and_the_model_stays(
    options: dict[str, Any], said: str
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        deepspeed.initialize(model=model, **options)
    assert model(torch.ones(4)).shape == (4,) and model.weight.numel() == 16
    with pytest.raises(UnsupportedError, match=r"deepspeed\.PipelineModule is not here"):
        _ = deepspeed.PipelineModule
