"""Adapters of PEFT over an offloaded base: what is done with them after `infinity.offload` gives the
same bits as without it, or is refused with the way to do it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.errors import ConfigError, ParameterNotResident, UnsupportedError
from tests.support.offloading import swap_config

IDS = torch.arange(12).view(2, 6)
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False,
        )
    )  # fmt: skip


def one() -> Any:
    return peft.get_peft_model(base(), peft.LoraConfig(r=4, **LORA))


def two() -> Any:
    model = one()
    model.add_adapter("other", peft.LoraConfig(r=2, **LORA))
    return model


def adaptive() -> Any:
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=8, **LORA
    )
    return peft.get_peft_model(base(), config)


def optimizer_of(model: nn.Module) -> Any:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if any(type(p) is not nn.Parameter for p in trainable):
        return infinity.AdamW(trainable, lr=1e-2)
    return torch.optim.AdamW(trainable, lr=1e-2, fused=True)


def train(
    model: Any, optimizer: Any = None, after: Callable[[int], Any] | None = None
) -> list[Tensor]:
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        if after is not None:
            after(step)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def loss_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, labels=IDS).loss


def backward(model: Any) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()


def merged(model: Any) -> list[Tensor]:
    seen = train(model)
    model.merge_adapter()
    seen.append(loss_of(model))
    model.unmerge_adapter()
    return seen + train(model)


def switched(model: Any) -> list[Tensor]:
    optimizer = optimizer_of(model)
    model.set_adapter("other")
    seen = [loss_of(model)]
    with model.disable_adapter():
        seen.append(loss_of(model))
    model.set_adapter("default")
    seen += train(model, optimizer)
    model.delete_adapter("other")
    return seen + train(model, optimizer)


def adapted(model: Any) -> list[Tensor]:
    return train(model, after=model.base_model.update_and_allocate)


def by_hand(model: Any) -> list[Tensor]:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight.data += layer.get_delta_weight("default")
    nn.init.zeros_(layer.lora_B["default"].weight)
    values = {k: v * 2 for k, v in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, values)
    return [loss_of(model), *train(model)]


def on_nvme(model: Any, directory: Path) -> Any:
    return infinity.offload(model, swap_config(directory, host_nbytes="16MiB"))


@pytest.mark.parametrize(
    ("build", "use"), [(one, merged), (two, switched), (adaptive, adapted), (one, by_hand)]
)
def test_adapters_are_used_after_offload_as_without_it(
    build: Callable[[], Any], use: Callable[[Any], list[Tensor]], tmp_path: Path
) -> None:
    plain = build()
    expected = use(plain)
    model = on_nvme(build(), tmp_path)
    engine = infinity.engine_of(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, use(model), strict=True))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, engine.read_parameter(name)), name
    engine.close()
    del model, engine
    gc.collect()


def test_an_adapter_over_tiles_is_merged_and_unloaded(tmp_path: Path) -> None:
    """PEFT adds to `.data` what needs a gradient, and gives the layer the weight that it has."""
    seen: list[Tensor] = []
    wide = LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = peft.get_peft_model(LlamaForCausalLM(wide), peft.LoraConfig(r=4, **LORA))
        if not is_plain:
            model = infinity.offload(model, swap_config(tmp_path, schedule={"tile": "64KiB"}))
            assert infinity.engine_of(model).tiled_params
        model.merge_adapter()
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        seen.append(layer.base_layer.weight.detach().clone())
        model.unmerge_adapter()
        model = model.merge_and_unload()
        seen.append(model.model.layers[0].self_attn.q_proj.weight.detach().clone())
        seen.append(loss_of(model))
        if not is_plain:
            layer = model.model.layers[0].self_attn.q_proj
            with pytest.raises(UnsupportedError, match="'weight' of a TiledLinear runs as tiles"):
                layer.weight = nn.Parameter(seen[0])
            infinity.engine_of(model).close()
    for expected, found in zip(seen[:2], seen[3:5], strict=True):
        assert torch.equal(expected, found)
    assert torch.allclose(seen[2], seen[5])


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "delora": ("DeloraConfig", {"r": 4, "target_modules": ["q_proj", "down_proj"]}),
    "deft": ("DeftConfig", {"target_modules": ["q_proj"]}),
    "osf": ("OSFConfig", {"target_modules": ["q_proj"]}),
    "psoft": ("PsoftConfig", {"target_modules": ["q_proj"]}),
    "tiny": ("TinyLoraConfig", {"target_modules": ["q_proj"]}),
    "gralora": ("GraloraConfig", {"target_modules": ["q_proj"]}),
    "miss": ("MissConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
    "cpt": ("CPTConfig", {
        "cpt_token_ids": [1, 2, 3, 5], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 2, 3],
        "opt_projection_epsilon": 0.2, "task_type": "CAUSAL_LM",
    }),
}  # fmt: skip


@pytest.mark.parametrize("method", MORE)
def test_further_methods_train_over_a_base_in_memory_as_without_offload(
    method: str, tmp_path: Path
) -> None:
    """CPT assigns its parameter's `.data` in each forward; DeLoRA, DEFT, OSF and others begin with
    values of the base's weights."""
    name, options = MORE[method]
    types = torch.tensor([[0, 0, 1, 2, 3, 4]] * 2)

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = optimizer_of(model), []
        for _ in range(3):
            # PEFT writes to the mask that it is given.
            inputs = {"input_type_mask": types.clone(), "attention_mask": torch.ones_like(types)}
            more = inputs if method == "cpt" else {}
            loss = model(input_ids=IDS, labels=IDS, **more).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    def build() -> Any:
        model = base()
        torch.manual_seed(3)
        return peft.get_peft_model(model, getattr(peft, name)(**options))

    plain = build()
    expected = run(plain)
    assert len({float(loss) for loss in expected}) == 3
    model = on_nvme(build(), tmp_path)
    with infinity.engine_of(model) as engine:
        assert all(map(torch.equal, expected, run(model)))
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, engine.read_parameter(name)), name


def test_an_adapter_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    model = on_nvme(two(), tmp_path)
    model.set_adapter("other")
    with pytest.raises(UnsupportedError, match=r"other\.weight.* set requires_grad before"):
        train(model)
    infinity.engine_of(model).close()


def test_an_adapter_that_came_after_offload_is_not_left_untrained(tmp_path: Path) -> None:
    model = on_nvme(one(), tmp_path)
    optimizer = optimizer_of(model)
    model.add_adapter("late", peft.LoraConfig(r=2, **LORA))
    model.set_adapter("late")
    engine = infinity.engine_of(model)
    before = {name: engine.read_parameter(name) for name in engine.parameter_names()}
    with pytest.raises(ConfigError, match=r"late\.weight.* Add adapters and heads before"):
        train(model, optimizer)
    backward(model)
    for _ in range(2):  # At the first step, and before it changes anything.
        with pytest.raises(ConfigError, match=r"late\.weight.* Add adapters and heads before"):
            optimizer.step()
    for name, value in before.items():
        assert torch.equal(engine.read_parameter(name), value)
    with pytest.raises(ConfigError, match="attach adapters and new heads before"):
        infinity.AdamW(model)
    infinity.engine_of(model).close()


def test_an_adapter_that_came_after_offload_trains_with_an_optimizer_of_torch(
    tmp_path: Path,
) -> None:
    """And is refused when that optimizer makes no steps."""
    model = on_nvme(one(), tmp_path)
    optimizer = optimizer_of(model)
    model.add_adapter("late", peft.LoraConfig(r=2, **LORA))
    model.set_adapter("late")
    late = {n: p for n, p in model.named_parameters() if ".late." in n}
    other = torch.optim.AdamW(late.values(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in late.items()}
    for _ in range(3):
        backward(model)
        optimizer.step()
        other.step()
        other.zero_grad()
    changed = [name for name in late if not torch.equal(late[name], before[name])]
    assert len(changed) == len(late)
    backward(model)
    optimizer.step()
    with pytest.raises(ConfigError, match="no optimizer changes them"):
        optimizer.step()
    infinity.engine_of(model).close()


def test_another_vocabulary_is_refused_and_the_same_is_not(tmp_path: Path) -> None:
    model = on_nvme(base(), tmp_path)
    before = loss_of(model)
    model.resize_token_embeddings(64)
    with pytest.raises(
        ParameterNotResident, match=r"vocabularies, heads.* before infinity\.offload"
    ):
        model.resize_token_embeddings(80, mean_resizing=False)
    assert torch.equal(before, loss_of(model))
    infinity.engine_of(model).close()


def test_files_are_not_read_over_a_base_that_an_adapter_has_changed(tmp_path: Path) -> None:
    """PiSSA moves the largest part of the weights into the adapter: with the files' own weights it
    would count twice."""
    model = base()
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")
    model, config = peft.get_peft_model(model, lora), swap_config(tmp_path / "swap")
    with pytest.raises(ConfigError, match=r"adapter 'default' .*'pissa'.*leave `weights` out"):
        infinity.offload(model, config, weights=tmp_path / "base")
    expected = loss_of(model)
    assert torch.equal(loss_of(infinity.offload(model, config)), expected)
    infinity.close(model)


def test_an_adapter_of_lora_ga_without_its_gradients_leaves_the_base_to_the_files(
    tmp_path: Path,
) -> None:
    model = base()
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(
        target_modules=["q_proj"], init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig()
    )
    model = peft.get_peft_model(model, lora)
    expected = loss_of(model)
    infinity.offload(model, swap_config(tmp_path / "swap"), weights=tmp_path / "base")
    assert torch.equal(loss_of(model), expected)
    infinity.close(model)
