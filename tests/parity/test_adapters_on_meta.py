"""Adapters over a base that `infinity.init_empty_weights` built without memory start as over one in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import infinity
from infinity.errors import ConfigError
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.offloading import offloaded

PROJECTIONS = ["q_proj", "v_proj"]
TOKENS = torch.arange(32).reshape(2, 16)

# r=80 makes matrices of 80 KiB, above what `init` keeps real.
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=80, target_modules=PROJECTIONS),
    "gaussian-rslora": lambda: peft.LoraConfig(
        r=80, target_modules=PROJECTIONS, init_lora_weights="gaussian", use_rslora=True
    ),
    "dora": lambda: peft.LoraConfig(r=80, target_modules=PROJECTIONS, use_dora=True),
    "saved-head-and-norm": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, modules_to_save=["lm_head", "norm"]
    ),
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, trainable_token_indices=[1, 2]
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=320, num_hidden_layers=1, num_attention_heads=4,
            vocab_size=128, tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, norms among them, that no constructor draws."""
    path = tmp_path_factory.mktemp("base")
    model = llama()
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def in_memory(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return LlamaForCausalLM.from_pretrained(path, dtype=dtype)


def on_meta() -> Any:
    with infinity.init_empty_weights():
        model = llama()
    assert model.lm_head.weight.is_meta and model.lm_head.weight.device.type == "cpu"
    return model


def on_nvme(
    model: Any, tmp_path: Path, weights: Path | None, frozen: str = "auto", **precision: str
) -> Any:
    config = {
        "placement": {"frozen": frozen},
        "tiers": {
            "nvme": [{"path": str(tmp_path / "swap")}],
            "host": {"capacity": "32MiB", "huge_pages": False},
        },
    }
    return offloaded(model, config | {"precision": precision}, weights=weights)


def loss_of(model: Any) -> torch.Tensor:
    return model.train()(input_ids=TOKENS, labels=TOKENS).loss


def assert_same_model(plain: Any, model: Any) -> None:
    values = {name: model.get_parameter(name).detach() for name, _ in plain.named_parameters()}
    assert_same(dict(plain.named_parameters()), values)
    assert torch.equal(loss_of(plain), loss_of(model))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_new_adapter_starts_as_over_a_base_in_memory(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    plain, model = in_memory(checkpoint), on_meta()
    torch.manual_seed(3)
    plain = peft.get_peft_model(plain, ADAPTERS[kind]())
    torch.manual_seed(3)
    with on_nvme(peft.get_peft_model(model, ADAPTERS[kind]()), tmp_path, checkpoint) as model:
        assert_same_model(plain, model)


@pytest.mark.filterwarnings("error:.*no-op.*")
@pytest.mark.parametrize(("kind", "low_cpu_mem_usage"), in_turn(ADAPTERS, [False, True]))
def test_a_loaded_adapter_keeps_its_values(
    kind: str, low_cpu_mem_usage: bool, checkpoint: Path, tmp_path: Path
) -> None:
    plain = peft.get_peft_model(in_memory(checkpoint), ADAPTERS[kind]())
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    plain.save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(
        on_meta(), tmp_path / "adapter", is_trainable=True, low_cpu_mem_usage=low_cpu_mem_usage
    )
    with on_nvme(model, tmp_path, checkpoint) as model:
        assert_same_model(plain, model)


def small_llama() -> LlamaForCausalLM:
    """Every weight is small enough to keep its constructor's value until it gets another one."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=64, tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("kind", ["dora", "tokens"])
def test_values_that_derive_from_small_base_weights_are_those_of_the_checkpoint(
    kind: str, is_loaded: bool, tmp_path: Path
) -> None:
    """PEFT has derived them from what the constructor drew; those that were loaded are kept."""
    torch.manual_seed(7)
    plain = small_llama()
    plain.save_pretrained(tmp_path / "base")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(3)
    plain = peft.get_peft_model(plain, ADAPTERS[kind]())
    torch.manual_seed(8)
    with infinity.init_empty_weights():
        model: Any = small_llama()
    assert not model.lm_head.weight.is_meta
    torch.manual_seed(3)
    if is_loaded:
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        plain.save_pretrained(tmp_path / "adapter")
        model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    else:
        model = peft.get_peft_model(model, ADAPTERS[kind]())
    with on_nvme(model, tmp_path, tmp_path / "base") as model:
        assert_same_model(plain, model)


@pytest.mark.parametrize("is_small", [False, True])
def test_merged_tokens_return_to_the_rows_of_the_checkpoint(is_small: bool, tmp_path: Path) -> None:
    """PEFT keeps the rows of before, which a small weight's constructor has drawn."""
    build = small_llama if is_small else llama
    build().save_pretrained(tmp_path / "base")
    plain = peft.get_peft_model(in_memory(tmp_path / "base"), ADAPTERS["tokens"]())
    with infinity.init_empty_weights():
        model: Any = build()
    model = peft.get_peft_model(model, ADAPTERS["tokens"]())
    with on_nvme(model, tmp_path, tmp_path / "base", "copy") as model:
        model.merge_adapter()
        model.unmerge_adapter()
        rows = model.base_model.model.model.embed_tokens.token_adapter.base_layer.weight
        assert torch.equal(rows, plain.base_model.model.model.embed_tokens.weight)


def test_transformers_own_load_adapter_keeps_the_values(checkpoint: Path, tmp_path: Path) -> None:
    plain = peft.get_peft_model(in_memory(checkpoint), ADAPTERS["lora"]())
    torch.nn.init.normal_(
        plain.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight
    )
    plain.save_pretrained(tmp_path / "adapter")
    model = on_meta()
    model.load_adapter(tmp_path / "adapter", is_trainable=True)
    with on_nvme(model, tmp_path, checkpoint) as model:
        assert torch.equal(loss_of(plain), loss_of(model))


def test_fp32_adapters_over_a_bf16_base_start_as_plain(checkpoint: Path, tmp_path: Path) -> None:
    with infinity.init_empty_weights():
        model = LlamaForCausalLM._from_config(llama().config, dtype=torch.bfloat16)
    plain = in_memory(checkpoint, torch.bfloat16)
    torch.manual_seed(3)
    plain = peft.get_peft_model(plain, ADAPTERS["dora"]())
    torch.manual_seed(3)
    model = peft.get_peft_model(model, ADAPTERS["dora"]())
    with on_nvme(model, tmp_path, checkpoint, compute="bfloat16") as model:
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
        assert_same_model(plain, model)


def test_lora_on_packed_experts_starts_as_over_a_base_in_memory(tmp_path: Path) -> None:
    def mixtral() -> Any:
        config = MixtralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=128, num_local_experts=4,
        )  # fmt: skip
        config._experts_implementation = "eager"
        return MixtralForCausalLM(config)

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=16, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[]
            ),
        )

    plain = mixtral()
    plain.save_pretrained(tmp_path / "base")
    with infinity.init_empty_weights():
        model = mixtral()
    with on_nvme(adapted(model), tmp_path, tmp_path / "base") as model:
        assert_same_model(adapted(plain), model)


def test_random_weights_leave_an_adapter_as_peft_made_it(tmp_path: Path) -> None:
    model = on_meta()
    torch.manual_seed(3)
    model = peft.get_peft_model(model, ADAPTERS["saved-head-and-norm"]())
    expected = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    with on_nvme(model, tmp_path, None) as model:
        for name, value in expected.items():
            assert torch.equal(value, model.get_parameter(name).detach()), name
        head = model.base_model.model.lm_head
        assert head.original_module.weight.std() > 0.01
        assert torch.equal(
            head.modules_to_save.default.weight.detach(), head.original_module.weight.detach()
        )


def test_an_initialisation_from_base_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs no weights of the model"):
        peft.get_peft_model(
            on_meta(), peft.LoraConfig(target_modules=PROJECTIONS, init_lora_weights="pissa")
        )


def test_an_adapter_made_on_meta_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        elsewhere = llama()
    with infinity.init_empty_weights():
        within = peft.get_peft_model(llama(), ADAPTERS["lora"]())
    for model in (peft.get_peft_model(elsewhere, ADAPTERS["lora"]()), within):
        with (
            pytest.raises(ConfigError, match="lora_A.default.weight of an adapter has no value"),
            on_nvme(model, tmp_path, checkpoint),
        ):
            pass


def test_a_state_dict_loaded_into_a_base_on_meta_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    plain, model = in_memory(checkpoint), on_meta()
    model.load_state_dict(plain.state_dict())
    assert not any(parameter.is_meta for parameter in model.parameters())
    with on_nvme(model, tmp_path, None) as model:
        assert_same_model(plain, model)


def test_a_write_that_would_be_lost_is_refused() -> None:
    model = on_meta()
    weight = model.lm_head.weight
    writes: list[Callable[[], Any]] = [
        lambda: torch.nn.init.normal_(weight),
        lambda: weight.data.zero_(),
        lambda: weight.detach()[0].fill_(1.0),
        lambda: weight.detach().copy_(torch.ones(128, 256)),
        lambda: weight.__setitem__(0, 1.0),
        lambda: weight.__imul__(2.0),
        lambda: torch.zeros(128, 256).copy_(weight),
    ]
    for write in writes:
        with torch.no_grad(), pytest.raises(ConfigError, match="without"):
            write()


def test_a_small_parameter_that_was_set_after_init_keeps_its_value(tmp_path: Path) -> None:
    model = on_meta()
    torch.nn.init.constant_(model.model.norm.weight, 0.5)
    other = model.model.layers[0].input_layernorm.weight
    with on_nvme(model, tmp_path, None) as model:
        assert torch.equal(model.model.norm.weight.detach(), torch.full((256,), 0.5))
        assert torch.equal(other, torch.ones(256))


@pytest.mark.parametrize("method", ["DeftConfig", "DeloraConfig", "OSFConfig", "PsoftConfig"])
def test_an_adapter_made_of_weights_without_a_value_is_refused(method: str, tmp_path: Path) -> None:
    """DEFT leaves its own memory as it finds it where the base is on meta: any values, or NaN."""
    config = getattr(peft, method)(target_modules=PROJECTIONS)
    with pytest.raises(ConfigError, match="outside of"):
        on_nvme(peft.get_peft_model(on_meta(), config), tmp_path, None).__enter__()


@pytest.mark.parametrize("method", ["cpt", "delora", "pissa"])
def test_an_adapter_that_starts_from_weights_to_come_is_refused_over_small_ones_too(
    method: str, tmp_path: Path
) -> None:
    """Small weights keep their constructor's values until offload: PEFT would start from these."""
    small = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    with infinity.init_empty_weights():
        base = LlamaForCausalLM(small)
    assert not any(parameter.is_meta for parameter in base.parameters())
    configs: dict[str, Any] = {
        "cpt": lambda: peft.CPTConfig(
            cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 2],
            task_type="CAUSAL_LM",
        ),
        "delora": lambda: peft.DeloraConfig(target_modules=PROJECTIONS),
        "pissa": lambda: peft.LoraConfig(target_modules=PROJECTIONS, init_lora_weights="pissa"),
    }  # fmt: skip
    model = peft.get_peft_model(base, configs[method]())
    with (
        pytest.raises(ConfigError, match="build the base in memory"),
        on_nvme(model, tmp_path, None),
    ):
        pass
