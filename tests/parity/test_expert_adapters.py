"""PEFT's adapters on packed experts (`target_parameters`), computed as factors.

Two comparisons. With PEFT's own computation, which adds the adapter to the weights first: equal to
rounding (docs/design/0007-tiles.md), and to the bit where the adapter is zero. With the factored
computation in memory (`infinity.factored_experts`), the definition of exact: the offloaded model
has its bits, whole or in tiles of any number of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.modules.tiling.expert_adapters import AdaptedWeight
from infinity.modules.tiling.experts import TiledExperts
from tests.support.bits import same_bits
from tests.support.exhaustive import in_turn
from tests.support.offloading import offloaded, swap_config

from .zoo import ZOO

MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(
    name: str, implementation: str = "eager", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A model of the zoo with adapters on its experts, none of them zero."""
    model: Any = ZOO[name].build(0)
    model.set_experts_implementation(implementation)
    settings = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, **options}
    torch.manual_seed(1)
    config = LoraConfig(target_modules=[], target_parameters=TARGETS, **settings)
    return get_peft_model(model.to(dtype), config, autocast_adapter_dtype=False).train()


def loss_of(name: str, model: Any, number: int = 1) -> torch.Tensor:
    return ZOO[name].loss(model, ZOO[name].batch(number))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


# --- with PEFT's own computation --------------------------------------------------------------


@pytest.mark.parametrize(("name", "implementation"), in_turn(MODELS, IMPLEMENTATIONS))
def test_factors_agree_with_the_sum_to_rounding(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = adapted(name, implementation)
    factored = infinity.factored_experts(adapted(name, implementation))
    monkeypatch.setattr(AdaptedWeight, "merged", None)  # No operation needs the sum.
    expected, actual = loss_of(name, merged), loss_of(name, factored)
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    plain, found = gradients_of(merged), gradients_of(factored)
    assert plain.keys() == found.keys() and len(plain) >= 8
    for each, gradient in plain.items():
        assert gradient is not None and gradient.any()
        torch.testing.assert_close(
            found[each], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
        )
    assert all(p.grad is None for p in factored.parameters() if not p.requires_grad)


@pytest.mark.parametrize(("name", "implementation"), in_turn(MODELS, IMPLEMENTATIONS))
def test_a_new_adapter_has_the_bits_of_the_sum(name: str, implementation: str) -> None:
    """A new lora_B is zero. Then lora_A has a gradient of zero, and lora_B the same one."""
    merged = adapted(name, implementation, init_lora_weights=True)
    factored = infinity.factored_experts(adapted(name, implementation, init_lora_weights=True))
    assert torch.equal(loss_of(name, factored), loss_of(name, merged))


@pytest.mark.parametrize("options", [{"use_rslora": True, "r": 4}, {"r": 1, "lora_alpha": 7}])
def test_scaling_and_rank_are_those_of_peft(options: Any) -> None:
    merged = adapted("gpt_oss", **options)
    factored = infinity.factored_experts(adapted("gpt_oss", **options))
    torch.testing.assert_close(
        loss_of("gpt_oss", factored), loss_of("gpt_oss", merged), rtol=1e-6, atol=0
    )


def test_several_adapters_are_active_and_disabled_as_in_peft() -> None:
    merged, factored = adapted("qwen3_moe"), infinity.factored_experts(adapted("qwen3_moe"))
    for model in (merged, factored):
        torch.manual_seed(2)
        config = LoraConfig(
            r=3, target_modules=[], target_parameters=TARGETS, init_lora_weights=False
        )
        model.add_adapter("second", config)
    before = loss_of("qwen3_moe", factored)
    for active in ("default", "second", ["default", "second"]):
        for model in (merged, factored):
            model.base_model.set_adapter(active)
        losses = loss_of("qwen3_moe", factored), loss_of("qwen3_moe", merged)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert not torch.equal(losses[0], before)
    with merged.disable_adapter(), factored.disable_adapter():
        assert torch.equal(loss_of("qwen3_moe", factored), loss_of("qwen3_moe", merged))
    merged.merge_adapter()
    factored.merge_adapter()
    assert torch.equal(loss_of("qwen3_moe", factored), loss_of("qwen3_moe", merged))


def test_any_other_use_of_the_weight_gets_the_sum() -> None:
    weight, left, right = torch.randn(3, 4, 5), torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    whole = AdaptedWeight(lambda: weight, left, right, 0.5)
    expected = weight + 0.5 * left @ right
    assert whole.shape == (3, 4, 5) and whole.dtype == torch.float32 and len(whole) == 3
    torch.testing.assert_close(torch.einsum("emn->en", whole), expected.sum(1))
    torch.testing.assert_close(whole.flatten(), expected.flatten())
    torch.testing.assert_close(2 * whole[1], 2 * expected[1])
    torch.testing.assert_close(whole[:, 1], expected[:, 1])
    rows = torch.randn(2, 6, 4)
    torch.testing.assert_close(rows @ whole[torch.tensor(2)], rows @ expected[2])
    torch.testing.assert_close(
        torch.nn.functional.linear(rows, whole[0].T, torch.ones(5)), rows @ expected[0] + 1
    )


class _Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation has made in new memory."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.numel = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if (
                isinstance(each, torch.Tensor)
                and each.untyped_storage().data_ptr() not in self.known
            ):
                self.numel = max(self.numel, each.numel())
        return out


def largest_new_tensor(module: Any, *args: torch.Tensor) -> int:
    known = {each.untyped_storage().data_ptr() for each in module.parameters()}
    with _Largest(known) as found:
        module(*args).sum().backward()
    return found.numel


def test_no_operation_makes_a_tensor_as_large_as_the_packed_weight() -> None:
    """Neither the sum for all experts nor a gradient of the frozen weight. PEFT makes both."""
    numel = {}
    for is_factored in (False, True):
        model = adapted("mixtral")
        if is_factored:
            infinity.factored_experts(model)
        experts = model.base_model.model.model.layers[0].mlp.experts
        weight = experts.get_base_layer().down_proj
        hidden = torch.randn(3, weight.shape[1], requires_grad=True)
        numel[is_factored] = largest_new_tensor(
            experts, hidden, torch.tensor([[0, 1], [1, 3], [0, 3]]), torch.rand(3, 2)
        )
    assert numel[False] >= weight.numel()
    assert numel[True] < weight[0].numel()


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    """As those of PEFT, so AdamW keeps the same state for them."""
    for is_factored in (False, True):
        model = adapted("mixtral")
        if is_factored:
            infinity.factored_experts(model)
        experts = model.base_model.model.model.layers[0].mlp.experts
        hidden = torch.randn(3, 32, requires_grad=True)
        experts(hidden, torch.tensor([[1, 3], [3, 1], [1, 3]]), torch.rand(3, 2)).sum().backward()
        for wrapper in (experts, experts.base_layer):
            first, second = (
                getattr(wrapper, each)["default"].weight.grad for each in ("lora_A", "lora_B")
            )
            by_expert = first.view(4, 2, -1), second.view(-1, 2, 4).permute(2, 0, 1)
            for part in by_expert:
                assert [bool(each.any()) for each in part] == [False, True, False, True]


# --- offloaded --------------------------------------------------------------------------------


@contextmanager
def pair(
    directory: Path, name: str, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Any, Any]]:
    """The model in memory with factors, and the offloaded one without tiles."""
    config = swap_config(directory, host_nbytes="16MiB")
    if dtype == torch.bfloat16:
        config["precision"] = {**config.get("precision", {}), "compute": "bfloat16"}
    plain = infinity.factored_experts(adapted(name, dtype=dtype))
    config["schedule"] = {**config.get("schedule", {}), "tile": 0}
    with offloaded(adapted(name, dtype=dtype), config) as model:
        yield plain, model


@pytest.mark.parametrize(("name", "is_layer_major"), in_turn(MODELS, [False, True]))
def test_training_has_the_bits_of_factors_in_memory(
    name: str, is_layer_major: bool, swap_directory: Path
) -> None:
    batches = [ZOO[name].batch(number) for number in range(3)]
    with pair(swap_directory, name) as (plain, model):
        trained = [each for each in plain.parameters() if each.requires_grad]
        reference = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        optimizer = infinity.AdamW(model, lr=1e-2)
        assert not any(isinstance(module, TiledExperts) for module in model.modules())
        for _ in range(3):
            expected = [ZOO[name].loss(plain, batch) for batch in batches]
            for loss in expected:
                loss.backward()
            if is_layer_major:
                found = infinity.forward_backward(
                    model, lambda batch: ZOO[name].loss(model, batch), batches
                )
            else:
                found = [ZOO[name].loss(model, batch) for batch in batches]
                for loss in found:
                    loss.backward()
            assert same_bits(torch.stack(found), torch.stack(expected))
            reference.step()
            optimizer.step()
            reference.zero_grad()
            optimizer.zero_grad()
        engine = infinity.engine_of(model)
        for each, parameter in plain.named_parameters():
            assert same_bits(engine.read_parameter(each), parameter), each


def test_in_bfloat16_losses_and_gradients_have_the_bits_of_factors_in_memory(
    swap_directory: Path,
) -> None:
    with pair(swap_directory, "qwen3_moe", torch.bfloat16) as (
        plain,
        model,
    ):
        expected, found = loss_of("qwen3_moe", plain), loss_of("qwen3_moe", model)
        assert same_bits(found, expected)
        expected.backward()
        found.backward()
        engine = infinity.engine_of(model)
        for each, gradient in gradients_of(plain).items():
            actual = engine.read_gradient(each)
            assert actual is not None and gradient is not None
            assert same_bits(actual, gradient.float()), each


def test_the_adapter_file_is_that_of_peft(swap_directory: Path, tmp_path: Path) -> None:
    plain = adapted("gpt_oss")
    with offloaded(adapted("gpt_oss"), swap_config(swap_directory)) as model:
        model.save_pretrained(tmp_path / "ours")
        plain.save_pretrained(tmp_path / "theirs")
        files = [
            safetensors.torch.load_file(tmp_path / each / "adapter_model.safetensors")
            for each in ("ours", "theirs")
        ]
        assert list(files[0]) == list(files[1])
        assert all(same_bits(files[0][each], value) for each, value in files[1].items())
        loaded = PeftModel.from_pretrained(ZOO["gpt_oss"].build(0), tmp_path / "ours").train()
        infinity.factored_experts(loaded).get_base_model().set_experts_implementation("eager")
        assert same_bits(loss_of("gpt_oss", loaded), loss_of("gpt_oss", model))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_server_finds_the_factors_of_each_expert_in_the_saved_file(
    name: str, swap_directory: Path, tmp_path: Path
) -> None:
    """Read as vLLM reads it (LoRAModelManager._stack_moe_lora_weights, docs/ADAPTERS.md): the first
    factor by expert, then rank; the second by rank, then expert; "base_layer" is gate and up."""
    with offloaded(adapted(name), swap_config(swap_directory)) as model:
        model.save_pretrained(tmp_path / "saved")
    tensors = safetensors.torch.load_file(tmp_path / "saved" / "adapter_model.safetensors")
    plain = adapted(name)
    before = {n: each.clone() for n, each in ZOO[name].build(0).state_dict().items()}
    after = plain.merge_and_unload().state_dict()
    checked = set()
    for experts in (n.removesuffix(".gate_up_proj") for n in after if n.endswith("gate_up_proj")):
        for infix, weight in (("base_layer.", "gate_up_proj"), ("", "down_proj")):
            keys = [f"base_model.model.{experts}.{infix}lora_{each}.weight" for each in "AB"]
            first, second = (tensors[key] for key in keys)
            checked.update(keys)
            old, new = before[f"{experts}.{weight}"], after[f"{experts}.{weight}"]
            firsts = first.reshape(len(old), -1, first.shape[-1])
            seconds = second.reshape(second.shape[0], -1, len(old)).permute(2, 0, 1)
            delta = 3 / 2 * (seconds @ firsts)
            delta = delta.transpose(1, 2) if name == "gpt_oss" else delta
            assert torch.allclose(old + delta, new, atol=1e-6) and not torch.equal(old, new)
    assert checked == set(tensors)


def test_a_failed_offload_leaves_peft_s_own_computation(tmp_path: Path) -> None:
    model = adapted("mixtral")
    before = loss_of("mixtral", model)
    config = swap_config(tmp_path, host_nbytes="64KiB", update_chunk="8KiB")
    with pytest.raises(infinity.CapacityError):
        infinity.offload(model, config)
    assert not any("_activate_lora" in module.__dict__ for module in model.modules())
    assert same_bits(loss_of("mixtral", model), before)
