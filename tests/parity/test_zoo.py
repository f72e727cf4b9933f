"""Unmodified models train under the engine with the bits of plain PyTorch.

Every model of the zoo is trained twice by the same loop (`harness.run`): plain with the fused
AdamW, and offloaded with all its state on NVMe in the smallest host budget that the engine says
will do, so that every unit really leaves between uses. Losses, gradients, clip norms, final
weights, buffers, an evaluation loss and generated tokens must be the same bits; None gradients must
stay None; nothing may be held after a backward.

Bitwise equality can be asked for because both sides run the same kernels on tensors of the same
shapes, strides and 64-byte alignment, in the same order.
"""

from __future__ import annotations

import gc
from functools import cache, lru_cache
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.streaming.updates import policy
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import in_turn, sampled
from tests.support.offloading import offloaded, swap_config

from .harness import (
    LEAST_HOST_NBYTES,
    Plan,
    Record,
    Side,
    assert_same_run,
    held_units,
    offloaded_run,
    run,
    smallest_host_nbytes,
)
from .zoo import MODULES, PEFT, TRANSFORMERS, ZOO

# Plain AdamW keeps the state of a bf16 parameter in bf16, the engine keeps an fp32 master: the
# gradients must be equal, the updates cannot be.
WITHOUT_UPDATES = {"MixedDtypes"}


@cache
def plan_for(name: str, checkpointing: bool) -> Plan:
    return Plan(
        steps=3 if ZOO[name].family == "module" else 2,
        max_norm=0.5,
        checkpointing=checkpointing,
        generate=True,
        updates=name not in WITHOUT_UPDATES,
    )


@lru_cache(maxsize=8)
def reference(name: str, checkpointing: bool) -> Record:
    model = ZOO[name].build(0)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    record = run(ZOO[name], Side(model, is_plain=True), plan_for(name, checkpointing))
    # The modules of this architecture, imported just now, stay: no later collection looks at them.
    del model
    gc.collect()
    gc.freeze()
    absent = {n for g in record.gradients for n, t in g.items() if t is None} & trainable
    assert absent or not ZOO[name].unused, "every parameter got a gradient: the case is lost"
    return record


def test_the_zoo_is_wide() -> None:
    families = {ZOO[name].family for name in TRANSFORMERS}
    assert len(TRANSFORMERS) >= 30
    assert families >= {
        "dense", "tied", "encoder-decoder", "moe", "state-space", "recurrent", "hybrid", "encoder",
        "shared-layers", "vision", "detection", "vision-language", "audio",
    }  # fmt: skip
    assert len(PEFT) >= 5 and len(MODULES) >= 20


# The two ways of a model come one after the other, and share its reference.
WAYS = ["nvme", "late-device"]
CHECKPOINTING = [name for name in ZOO if ZOO[name].checkpointing]


@pytest.mark.parametrize(
    ("name", "where"),
    in_turn(ZOO, WAYS),
)
def test_trains_like_plain_pytorch(name: str, where: str, swap_directory: Path) -> None:
    """All state on NVMe in the smallest host budget; or on the host, with a device that has its own
    memory, random copy delays and poisoned releases.

    A wait that the engine forgot reads NaN there, and NaN is not equal to a number. On NVMe the
    model that trains is the one that the engine has just refused: a refusal changes nothing.
    """
    entry = ZOO[name]
    expected = reference(name, False)
    model = entry.build(0)
    if where == "nvme":
        config, device = swap_config(swap_directory, placement="nvme"), None
        needed_nbytes = smallest_host_nbytes(lambda: model, config)
        config["tiers"]["host"]["capacity"] = needed_nbytes
        if needed_nbytes == LEAST_HOST_NBYTES:  # Not refused: that engine has ended the model.
            model = entry.build(0)
    else:
        config = swap_config(None, placement="host")
        device = SimulatedDevice(seed=3, delay_s=2e-4)
    with offloaded(model, config, device=device) as model:
        assert_same_run(expected, run(entry, Side(model), plan_for(name, False)))


@pytest.mark.parametrize("name", sampled(CHECKPOINTING, lambda name: name in CHECKPOINTING[::8]))
def test_trains_like_plain_pytorch_with_checkpointing(
    name: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gradient_checkpointing_enable(use_reentrant=False)` on both sides. The backward updates all
    units that it can, and takes back what a clipped step decides otherwise."""
    monkeypatch.setattr(policy, "_FIRST_SHARE", 1.0)
    config = swap_config(swap_directory, placement="nvme", updates="both_passes")
    assert_same_run(reference(name, True), offloaded_run(ZOO[name], plan_for(name, True), config))


# --- exceptions -------------------------------------------------------------------------------


class FailAt(TorchDispatchMode):
    """Raises at the `count`-th operation that computes, in the forward or in the backward.

    Copies, allocations and views are not counted: those are the engine's own business.
    """

    COMPUTES = (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "layer_norm", "embedding", "softmax",
        "gelu", "silu", "tanh", "scaled_dot_product", "nll_loss", "mse_loss", "native_batch_norm",
        "lstm", "gru",
    )  # fmt: skip

    def __init__(self, count: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left = count
        self.error = error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(word in func.__name__ for word in self.COMPUTES):
            self.left -= 1
            if self.left < 0:
                raise self.error(f"made to fail at {func}")
        return func(*args, **(kwargs or {}))


FAILING = ["gpt2", "llama-tied", "t5", "mixtral", "zamba2", "qwen2_vl", "Recurrent", "lora-experts"]


@pytest.mark.parametrize(("name", "checkpointing"), in_turn(FAILING, [False, True]))
def test_no_unit_is_in_use_after_an_exception(
    name: str, checkpointing: bool, swap_directory: Path
) -> None:
    """Fail at operations through the whole forward and backward; then train as if nothing was.

    The ladder climbs in steps so that about 10 places fail, the last of them deep in the backward.
    """
    entry = ZOO[name]
    if checkpointing and not entry.checkpointing:
        pytest.skip("the architecture has no gradient checkpointing")
    plan = plan_for(name, checkpointing)
    with offloaded(entry.build(0), swap_config(swap_directory)) as model:
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        counter = FailAt(1 << 60, RuntimeError)
        with counter:
            entry.loss(model, entry.batch(5)).backward()
        total = (1 << 60) - counter.left
        assert total > 4
        failed_in = set()
        for count in range(0, total, max(1, total // 10)):
            model.zero_grad()
            phase = "forward"
            try:
                with FailAt(count, RuntimeError):
                    loss = entry.loss(model, entry.batch(5))
                    phase = "backward"
                    loss.backward()
            except RuntimeError as error:
                assert "made to fail" in str(error)
                failed_in.add(phase)
            loss = None
            assert not held_units(model), f"held after a failure at operation {count} in {phase}"
        assert failed_in == {"forward", "backward"}
        model.zero_grad()
        # Random numbers were drawn and buffers may have moved; these models have neither.
        assert_same_run(reference(name, checkpointing), run(entry, Side(model), plan))
