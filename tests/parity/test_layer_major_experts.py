"""Experts larger than the device budget: every tile once per direction for all micro-batches.

Bits are compared with the model in memory that runs one micro-batch after the other, untiled
experts in the loop over experts ("eager"), adapters as factors. Bytes are the engine's counters.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import infinity
from infinity.modules.tiling.experts import ExpertsTile, TiledExperts
from infinity.modules.tiling.experts_call import ExpertsCall
from infinity.state.store import LocalStore
from infinity.state.units import Unit
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import same_bits
from tests.support.exhaustive import in_turn, sampled
from tests.support.hooks import harmless
from tests.support.offloading import offloaded, swap_config

from .harness import held_units
from .zoo import DECODER, VOCAB, configuration

EXPERTS = 6
SIZES: dict[str, Any] = {
    **DECODER, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 96, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": 96, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 16, "sliding_window": 6},
}  # fmt: skip


def expert_nbytes(kind: str) -> int:
    """gpt-oss has biases."""
    return (3 * 96 * 64 + (2 * 96 + 64 if kind == "gpt_oss" else 0)) * 4


def build(kind: str, *, adapters: bool = True, layers: int = 2) -> Any:
    """The base, or the base with adapters on experts and attention, none of them zero."""
    torch.manual_seed(0)
    config = configuration(kind, **{**SIZES, **KINDS[kind], "num_hidden_layers": layers})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    if not adapters:
        return model.train()
    torch.manual_seed(1)
    lora = LoraConfig(
        r=2, target_modules=["o_proj"], init_lora_weights=False,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    return get_peft_model(model, lora).train()


def batch(number: int, rows: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, VOCAB, (rows, 12 + number % 3), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: Any, number: int) -> torch.Tensor:
    inputs = {name: ids.to(model.device) for name, ids in batch(number).items()}
    loss: torch.Tensor = model(**inputs).loss
    return loss


def plain_steps(model: Any, count: int, steps: int) -> list[torch.Tensor]:
    """Trains in memory, one micro-batch after the other; returns the losses."""
    infinity.factored_experts(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    losses = []
    for _ in range(steps):
        for number in range(count):
            loss = loss_of(model, number)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def layer_major_steps(model: Any, count: int, steps: int) -> list[torch.Tensor]:
    optimizer = infinity.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(steps):
        losses += infinity.forward_backward(model, partial(loss_of, model), range(count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_training(
    plain: Any, losses: list[torch.Tensor], model: Any, found: list[torch.Tensor]
) -> None:
    assert all(map(same_bits, losses, found))
    engine = infinity.engine_of(model)
    for name, parameter in plain.named_parameters():
        assert same_bits(engine.read_parameter(name), parameter), name


def cut_config(directory: Path, kind: str, experts: int, **options: Any) -> dict[str, Any]:
    tile = experts * expert_nbytes(kind) if experts < EXPERTS else 0
    schedule = {"tile": tile, **options.pop("schedule", {})}
    return swap_config(directory, schedule=schedule, **options)


def num_tiles(model: nn.Module) -> set[int]:
    return {len(each.tiles) for each in model.modules() if isinstance(each, TiledExperts)}


# --- bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "count"),
    in_turn(KINDS, [1, 7]),
)
def test_no_bit_depends_on_tile_size_or_budget(kind: str, count: int, swap_directory: Path) -> None:
    """One, three or all experts a tile; host memory for little, or for everything; on the host's
    memory, or on a device with its own memory. Seven micro-batches are more than keep a graph."""
    plain = build(kind)
    losses = plain_steps(plain, count, 2)
    for experts, host_nbytes, device, waiting in (
        (1, "3MiB", None, "device"),
        (3, "3MiB", SimulatedDevice(7), "nvme"),
        (1, "32MiB", SimulatedDevice(7), "host"),
        (3, "32MiB", None, "nvme"),
        (EXPERTS, "32MiB", None, "device"),
    ):
        config = cut_config(swap_directory, kind, experts, host_nbytes=host_nbytes)
        config["placement"]["experts"] = waiting
        with offloaded(build(kind), config, device=device) as model:
            assert num_tiles(model) == ({-(-EXPERTS // experts)} if experts < EXPERTS else set())
            assert_same_training(plain, losses, model, layer_major_steps(model, count, 2))
            assert not held_units(model)


@pytest.mark.parametrize("kind", KINDS)
def test_one_micro_batch_after_the_other_has_the_same_bits(kind: str, swap_directory: Path) -> None:
    """Plain `backward()`, with checkpoints of activations or without."""
    plain = build(kind)
    losses = plain_steps(plain, 2, 1)
    for checkpointing in (False, True):
        with offloaded(build(kind), cut_config(swap_directory, kind, 1)) as model:
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            optimizer = infinity.AdamW(model, lr=1e-2)
            found = []
            for number in range(2):
                loss = loss_of(model, number)
                loss.backward()
                found.append(loss.detach())
            optimizer.step()
            assert_same_training(plain, losses, model, found)


@pytest.mark.parametrize(("experts", "activations"), [(1, "host"), (3, "nvme")])
def test_trained_experts_have_the_same_bits(
    experts: int, activations: str, swap_directory: Path
) -> None:
    """All weights of the model train. Inputs and outputs of experts wait on the host or a drive."""
    plain = build("qwen3_moe", adapters=False)
    losses = plain_steps(plain, 5, 2)
    config = cut_config(
        swap_directory, "qwen3_moe", experts, host_nbytes="8MiB",
        placement={kind: ["nvme"] for kind in ("parameters", "master", "moments", "gradients")}
        | {"activations": [activations]},
    )  # fmt: skip
    with offloaded(build("qwen3_moe", adapters=False), config, device=SimulatedDevice(3)) as model:
        assert_same_training(plain, losses, model, layer_major_steps(model, 5, 2))


def test_a_frozen_base_below_the_first_adapter(swap_directory: Path) -> None:
    """Blocks whose outputs need no gradient: nothing of them waits for a backward."""
    plain, other = build("qwen3_moe", layers=3), build("qwen3_moe", layers=3)
    for model in (plain, other):
        for name, parameter in model.named_parameters():
            if "layers.0." in name or "layers.1." in name:
                parameter.requires_grad_(False)
    losses = plain_steps(plain, 5, 1)
    with offloaded(other, cut_config(swap_directory, "qwen3_moe", 2)) as model:
        assert_same_training(plain, losses, model, layer_major_steps(model, 5, 1))


class Twice(nn.Module):
    """A block with two modules of experts, one behind the other, and a reading of both."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = experts
        self.gate = nn.Linear(64, EXPERTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat).softmax(-1).topk(2)
        middle = self.first(flat, indices, weights)
        middle += flat
        return (flat * self.second(middle.tanh(), indices, weights) + middle).view_as(x)


class Twices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        moe = [build("qwen3_moe", adapters=False).model.layers[i].mlp.experts for i in (0, 1)]
        self.blocks = nn.ModuleList([Twice(moe), nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("count", [2, 6])
def test_several_modules_of_experts_in_one_block(count: int, swap_directory: Path) -> None:
    """Also with an output that the block changes in place."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 5, 64, generator=generator) for _ in range(count)]
    torch.manual_seed(5)
    plain = Twices()
    losses = [plain(x) for x in inputs]
    for loss in losses:
        loss.backward()
    torch.manual_seed(5)
    config = cut_config(swap_directory, "qwen3_moe", 2, host_nbytes="16MiB")
    with offloaded(Twices(), config) as model:
        found = infinity.forward_backward(model, model, inputs)
        assert all(map(same_bits, [loss.detach() for loss in losses], found))
        engine = infinity.engine_of(model)
        for name, parameter in plain.named_parameters():
            gradient = engine.read_gradient(name)
            assert gradient is not None and parameter.grad is not None
            assert same_bits(gradient, parameter.grad), name


# --- bytes ------------------------------------------------------------------------------------


def read_nbytes(model: Any) -> int:
    return int(infinity.engine_of(model).counters.snapshot().get("nvme_read_nbytes", 0))


def tight(directory: Path, kind: str, experts: int, **options: Any) -> dict[str, Any]:
    """The frozen base on NVMe, all else in memory, which has no space to keep the base."""
    return cut_config(
        directory, kind, experts, placement={"parameters": ["nvme"]}, host_nbytes="1MiB",
        prefetch=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("experts", sampled([1, 3], (3).__eq__))
def test_a_step_reads_the_experts_twice_for_any_number_of_micro_batches(
    experts: int, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts are hit. Each is read once per direction, but for what is still in host memory
    where the direction changes. The engine's counters show the same, less what is outside of
    blocks, which every micro-batch reads."""
    asked: list[int] = []
    read = LocalStore.read

    def note(store: LocalStore, unit: Unit, *args: Any, **kwargs: Any) -> Any:
        if ".tiles." in unit.name:
            asked.append(unit.weight_nbytes)
        return read(store, unit, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "read", note)
    nbytes = 4 * EXPERTS * expert_nbytes("qwen3_moe")
    moved = {}
    for count in (1, 7):
        with offloaded(
            build("qwen3_moe", layers=4), tight(swap_directory, "qwen3_moe", experts)
        ) as model:
            for _ in range(2):
                before = read_nbytes(model)
                asked.clear()
                infinity.forward_backward(
                    model, lambda n: model(**batch(n, rows=6)).loss, range(count)
                )
            moved[count] = sum(asked)
            rest_nbytes = 4 * sum(
                parameter.numel() * count
                for name, parameter in model.named_parameters()
                if "experts" not in name
            )
            assert 0 <= read_nbytes(model) - before - sum(asked) <= 4 * rest_nbytes
    assert len(set(moved.values())) == 1, moved
    assert 2 * nbytes - (1 << 20) <= moved[1] <= 2 * nbytes, (moved, nbytes)


def test_each_tile_is_acquired_once_in_a_direction_for_all_micro_batches(
    swap_directory: Path,
) -> None:
    """Also where more micro-batches pass than keep a graph, and where one alone may."""
    held: list[str] = []
    for count, together in ((1, 4), (4, 4), (7, 4), (3, 1)):
        config = cut_config(
            swap_directory, "deepseek_v3", 2, schedule={"tile_micro_batches": together}
        )
        with offloaded(build("deepseek_v3"), config) as model:
            for name, module in model.named_modules():
                if isinstance(module, ExpertsTile):
                    hold = module.held

                    def note(name: str = name, hold: Any = hold) -> Any:
                        held.append(name)
                        return hold()

                    module.__dict__["held"] = note
            held.clear()
            infinity.forward_backward(model, lambda n: model(**batch(n, rows=6)).loss, range(count))
            tiles = list(dict.fromkeys(held))
            assert len(tiles) == 3 and held == [*tiles, *reversed(tiles)]


@pytest.mark.parametrize("count", [2, 6])
def test_micro_batches_wait_at_experts_without_memory(
    count: int, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tile runs for one of them, hidden states and sum of the others have none, in the
    backward of more than keep a graph neither gradients."""
    config = cut_config(swap_directory, "deepseek_v3", 2)
    config["placement"]["experts"] = "nvme"
    calls: set[ExpertsCall] = set()
    seen: dict[str, set[tuple[int, ...]]] = {"run_forward": set(), "run_backward": set()}
    for name, sizes in seen.items():
        run = getattr(ExpertsCall, name)

        def note(call: Any, *args: Any, run: Any = run, sizes: Any = sizes, **kwargs: Any) -> None:
            calls.add(call)
            run(call, *args, **kwargs)
            others = [
                each.untyped_storage().nbytes()
                for other in calls - {call}
                if other._arguments is not None
                for each in other.arguments.per_token()
            ]
            sizes.add(tuple(sorted(set(others))))

        monkeypatch.setattr(ExpertsCall, name, note)
    with offloaded(build("deepseek_v3"), config) as model:
        infinity.forward_backward(model, partial(loss_of, model), range(count))
        engine = infinity.engine_of(model)
        assert engine.counters.snapshot()["activation_out_nbytes"] > 0
        assert not engine.waiting._away
    assert seen["run_forward"] <= {(), (0,)} and (0,) in seen["run_forward"]
    assert (seen["run_backward"] <= {(), (0,)}) == (count > 4)


def test_experts_without_tokens_are_not_read(swap_directory: Path) -> None:
    """Neither in evaluation nor in training with adapters, whose gradients are zeros there."""
    with offloaded(build("qwen3_moe"), tight(swap_directory, "qwen3_moe", 1)) as model:
        ids = torch.tensor([[5, 9]])
        routed: list[set[int]] = []
        for module in model.modules():
            if isinstance(module, TiledExperts):
                module.register_forward_pre_hook(
                    harmless(lambda _, args: routed.append(set(args[1].flatten().tolist())))
                )
        with torch.no_grad():
            model(input_ids=ids)
        before, _ = read_nbytes(model), routed.clear()
        with torch.no_grad():
            model(input_ids=ids)
        num_hit = sum(map(len, routed))
        assert num_hit < 2 * EXPERTS
        rest = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if "experts" not in name
        )
        assert read_nbytes(model) - before <= num_hit * expert_nbytes("qwen3_moe") * 1.1 + rest
        routed.clear()
        before = read_nbytes(model)
        infinity.forward_backward(model, lambda ids: model(input_ids=ids, labels=ids).loss, [ids])
        assert read_nbytes(model) - before <= 2 * (
            num_hit * expert_nbytes("qwen3_moe") * 1.1 + rest
        )


# --- memory and failures ----------------------------------------------------------------------


def test_a_device_budget_of_one_expert_is_enough(swap_directory: Path) -> None:
    window_nbytes = expert_nbytes("qwen3_moe") + (96 << 10)
    config = cut_config(swap_directory, "qwen3_moe", 1, device_nbytes=window_nbytes)
    plain = build("qwen3_moe")
    losses = plain_steps(plain, 6, 1)
    device = SimulatedDevice(5)
    with offloaded(build("qwen3_moe"), config, device=device) as model:
        assert_same_training(plain, losses, model, layer_major_steps(model, 6, 1))
        assert 0 < device.attached_high_water_nbytes <= window_nbytes


def test_ranks_that_share_inputs_keep_outputs_of_experts_for_themselves(
    swap_directory: Path,
) -> None:
    """Layer inputs are equal on the ranks of a model-parallel group; parts of sums are not."""
    with offloaded(
        build("qwen3_moe"), cut_config(swap_directory, "qwen3_moe", 2), device=SimulatedDevice(1)
    ) as model:
        engine = infinity.engine_of(model)
        shared: list[Any] = []

        class Shared:
            def __getattr__(self, name: str) -> Any:
                if name == "save":
                    return lambda tensor: (
                        shared.append(engine.activations.save(tensor)) or shared[-1]
                    )
                return getattr(engine.activations, name)

        engine._model_passes.save_inputs_in(Shared())
        losses = infinity.forward_backward(model, partial(loss_of, model), range(2))
        assert len(shared) == 2 * 1  # The first block has an input without a gradient.
        assert same_bits(losses[1], loss_of(model, 1).detach())


class Kept(torch.autograd.Function):
    """Saves a tensor for its backward, as attention does."""

    alive: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x.clone()
        Kept.alive.add(saved)
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + 0 * ctx.saved_tensors[0]


class Keeping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(x)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(("count", "most"), [(2, 2), (3, 3), (7, 0)])
def test_micro_batches_that_wait_at_experts_keep_no_activations(
    count: int, most: int, swap_directory: Path
) -> None:
    """None in the forward; in the backward as many as may, or none where there are more."""
    model = build("qwen3_moe")
    for layer in model.base_model.model.model.layers:
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, Keeping())
    config = cut_config(
        swap_directory, "qwen3_moe", 2, schedule={"tile_micro_batches": 3}, host_nbytes="16MiB"
    )
    seen: dict[bool, list[int]] = {False: [], True: []}
    with offloaded(model, config):
        for module in model.modules():
            if isinstance(module, ExpertsTile):
                module.register_forward_pre_hook(
                    harmless(lambda *_: seen[torch.is_grad_enabled()].append(len(Kept.alive)))
                )
        infinity.forward_backward(model, partial(loss_of, model), range(count))
    assert max(seen[False]) == 0 and max(seen[True]) == most
    assert not Kept.alive


@pytest.mark.parametrize("count", [2, 5])
def test_a_failure_anywhere_leaves_a_model_that_trains(count: int, swap_directory: Path) -> None:
    plain = build("qwen3_moe")
    losses = plain_steps(plain, count, 1)
    with offloaded(build("qwen3_moe"), cut_config(swap_directory, "qwen3_moe", 3)) as model:
        left = [0]

        def fail(module: nn.Module, args: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("made to fail")

        hooks = [
            module.register_forward_pre_hook(harmless(fail))
            for module in model.modules()
            if isinstance(module, ExpertsTile)
        ]
        for number in range(0, 2 * 2 * 2 * count, 3):
            left[0] = number
            with pytest.raises(RuntimeError, match="made to fail"):
                infinity.forward_backward(model, partial(loss_of, model), range(count))
            assert not held_units(model)
            assert not any("micro-batch" in each.name for each in threading.enumerate())
            model.zero_grad()
        for hook in hooks:
            hook.remove()
        assert_same_training(plain, losses, model, layer_major_steps(model, count, 1))


# --- losses that need more than the logits ----------------------------------------------------


def with_router_loss(model: Any, number: int) -> torch.Tensor:
    """Reads the logits of all routers behind the last block."""
    loss: torch.Tensor = model(**batch(number), output_router_logits=True).loss
    return loss


def preference(model: Any, number: int, beside: Any) -> torch.Tensor:
    """Compares the model with itself without adapters, as DPO does."""
    ids = batch(number)["input_ids"]

    def reference() -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter():
            logits: torch.Tensor = model(input_ids=ids).logits
            return logits

    result = beside(reference)
    logits = model(input_ids=ids).logits
    return (logits - result()).square().mean()


@pytest.mark.parametrize("loss", ["router", "preference"])
@pytest.mark.parametrize("count", [3, 6])
def test_losses_of_routers_and_of_references(loss: str, count: int, swap_directory: Path) -> None:
    """A gradient that reaches a router past the experts, and calls that pass them beside others."""

    def in_memory(model: Any, number: int) -> torch.Tensor:
        if loss == "router":
            return with_router_loss(model, number)
        return preference(model, number, lambda call: call)

    def offloaded_loss(number: int) -> torch.Tensor:
        if loss == "router":
            return with_router_loss(model, number)
        return preference(model, number, partial(infinity.beside, model))

    def trained_router(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.requires_grad_(True)
        return model

    plain = infinity.factored_experts(trained_router(build("qwen3_moe")))
    losses = [in_memory(plain, number) for number in range(count)]
    for each in losses:
        each.backward()
    with offloaded(
        trained_router(build("qwen3_moe")), cut_config(swap_directory, "qwen3_moe", 2)
    ) as model:
        found = infinity.forward_backward(model, offloaded_loss, range(count))
        assert all(map(same_bits, [each.detach() for each in losses], found))
        engine = infinity.engine_of(model)
        for name, parameter in plain.named_parameters():
            gradient = engine.read_gradient(name)
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None and parameter.grad is not None:
                assert same_bits(gradient, parameter.grad), name
