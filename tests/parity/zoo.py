"""The zoo: tiny, randomly initialised, otherwise unmodified models of many families.

One `Entry` per model: how to build it, a batch with labels, its loss and, for generative models, a
prompt. Everything is a pure function of a seed; nothing is downloaded. Sizes are the smallest the
architecture accepts, so that the whole table runs forward and backward in well under a minute.

Dropout and layer drop are switched off by configuration except in the entries whose name ends in
"-dropout": those seed every generator before each forward (see `harness.seed_everything`), which
makes the random choices themselves part of what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import infinity
from tests.support import models

Batch = dict[str, Any]

VOCAB = 96
LENGTH = 12
BATCH = 2


@dataclass(frozen=True)
class Entry:
    """One model under test. `build` and `batch` take a seed; `prompt` is None if it cannot
    generate.

    `checkpointing` says whether the model is also run with non-reentrant gradient checkpointing.
    `unused` says that some parameters are known to receive no gradient in this loss (they must keep
    `grad is None`); the harness checks that this stays true, so that the case is not lost silently.
    """

    name: str
    family: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    prompt: Callable[[int], Batch] | None = None
    generate_options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    unused: bool = False
    construct: Callable[[], nn.Module] | None = None
    """Construction alone, as it may run on the meta device; None where that is not offered."""


ZOO: dict[str, Entry] = {}


def _register(entry: Entry) -> Entry:
    assert entry.name not in ZOO, entry.name
    ZOO[entry.name] = entry
    return entry


# --- configurations ---------------------------------------------------------------------------


def silence(config: Any) -> None:
    """Set every dropout-like probability of a configuration and of its parts to zero, in place."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            silence(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        elif any(
            word in key for word in ("dropout", "drop_path", "layerdrop", "pdrop", "drop_rate")
        ):
            setattr(config, key, type(value)(0))  # the type is validated: an int stays an int


def configuration(model_type: str, *, dropout: bool = False, **options: Any) -> Any:
    """The configuration of `model_type` with `options`; silent unless `dropout`."""
    config = transformers.AutoConfig.for_model(model_type, **options)
    if not dropout:
        silence(config)
    return config


def constructor(model_class: Any, make_config: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Construction from a configuration. `model_class` is a class or an Auto class, or its name: its
    module is imported by the first test that needs it, not by every worker."""

    def construct() -> nn.Module:
        named = getattr(transformers, model_class) if isinstance(model_class, str) else model_class
        make = getattr(named, "from_config", named)
        return make(make_config())

    return construct


def seeded(construct: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A builder: seed, construct, perturb, train mode."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = construct()
        perturb(model, seed)
        return model.train()

    return build


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Give every all-zero parameter small noise: a gate, query or bias at zero would hide
    errors."""
    for name, parameter in model.named_parameters():
        if not parameter.any():
            parameter.normal_(std=0.1, generator=generator(seed))
        assert torch.isfinite(parameter).all(), f"{name} was left uninitialised"


# --- batches and losses -----------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int = LENGTH, *, low: int = 4, high: int = VOCAB) -> Tensor:
    """Token ids of shape (BATCH, length), int64."""
    return torch.randint(low, high, (BATCH, length), generator=generator(seed))


def noise(seed: int, *shape: int) -> Tensor:
    """Standard normal fp32 of `shape`."""
    return torch.randn(shape, generator=generator(seed))


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes from its labels."""
    return model(**batch).loss


def flatten_floats(output: Any) -> list[Tensor]:
    """Every floating-point tensor of a (nested) output, in order; under grad those that require
    it."""
    if isinstance(output, Tensor):
        counts = output.requires_grad or not torch.is_grad_enabled()
        return [output] if output.is_floating_point() and counts else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [leaf for item in output for leaf in flatten_floats(item)]
    return []


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean of squares over all float outputs: for models that compute no loss themselves."""
    outputs = flatten_floats(model(**batch))
    assert outputs, "the model returned no differentiable output"
    return torch.stack([output.float().pow(2).mean() for output in outputs]).sum()


def lm_batch(seed: int) -> Batch:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def lm_prompt(seed: int) -> Batch:
    ids = tokens(seed, 5)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def seq2seq_batch(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 1, 7)}


# --- causal language models -------------------------------------------------------------------

# Names that most decoder configurations share.
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(
    name: str,
    family: str,
    model_type: str | None = None,
    *,
    base: Mapping[str, Any] = DECODER,
    model_class: str = "AutoModelForCausalLM",
    generate: bool = True,
    checkpointing: bool = True,
    dropout: bool = False,
    unused: bool = False,
    **options: Any,
) -> Entry:
    """Register a causal language model built from its configuration alone."""
    merged = {**base, **options}
    construct = constructor(
        model_class,
        lambda: configuration(model_type or name, dropout=dropout, **merged),
    )
    return _register(
        Entry(
            name=name,
            family=family,
            build=seeded(construct),
            construct=construct,
            batch=lm_batch,
            loss=model_loss,
            prompt=lm_prompt if generate else None,
            checkpointing=checkpointing,
            unused=unused,
        )
    )


GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

causal("gpt2", "dense", base=GPT2)
causal("gpt2-dropout", "dense", "gpt2", base=GPT2, dropout=True)
causal("llama", "dense")
causal("llama-tied", "tied", "llama", tie_word_embeddings=True)
causal("mistral", "dense", sliding_window=6)
causal("qwen2", "dense")
causal("qwen3", "dense", head_dim=8)
causal("gemma", "tied", head_dim=8)
causal("gemma2", "tied", head_dim=8, sliding_window=6)
causal("gemma3_text", "tied", head_dim=8, sliding_window=6)
causal("phi", "dense")
causal("phi3", "dense", partial_rotary_factor=1.0)
causal("opt", "tied", ffn_dim=48, word_embed_proj_dim=24)
causal(
    "bloom", "tied",
    base={"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2},
)  # fmt: skip
causal("gpt_neox", "dense")
causal("gptj", "dense", base={**GPT2, "rotary_dim": 4})
causal("falcon", "dense", new_decoder_architecture=True, num_kv_heads=2)
causal("olmo2", "dense")
causal("stablelm", "dense")
causal("cohere", "tied")
causal("mpt", "tied", base={"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4,
                            "max_seq_len": 64})  # fmt: skip

# mixtures of experts
causal("mixtral", "moe", num_local_experts=4, num_experts_per_tok=2)
causal("qwen2_moe", "moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
       shared_expert_intermediate_size=24)  # fmt: skip
causal("qwen3_moe", "moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
       head_dim=8)  # fmt: skip
causal("olmoe", "moe", num_experts=4, num_experts_per_tok=2)
causal("gpt_oss", "moe", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6)
causal("deepseek_v2", "moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
       n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
       qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
       num_key_value_heads=4)  # fmt: skip
causal("deepseek_v3", "moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
       n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
       qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1,
       num_key_value_heads=4)  # fmt: skip
causal("jetmoe", "moe", num_local_experts=4, num_experts_per_tok=2, kv_channels=8,
       num_key_value_heads=2, checkpointing=False)  # fmt: skip
causal("granitemoe", "moe", num_local_experts=4, num_experts_per_tok=2)
causal("llama4_text", "moe", num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48,
       interleave_moe_layer_step=2, head_dim=8, attention_chunk_size=8)  # fmt: skip
causal("dbrx", "moe", base={"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2,
                            "max_seq_len": 64, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4,
                                            "clip_qkv": 8.0},
                            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4,
                                           "moe_top_k": 2, "hidden_size": 32}})  # fmt: skip
causal("glm4_moe", "moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
       n_shared_experts=1, first_k_dense_replace=1, head_dim=8)  # fmt: skip

# state spaces and recurrences
causal("mamba", "state-space", state_size=8, expand=2, conv_kernel=4, use_mambapy=False)
causal("falcon_mamba", "state-space", state_size=8, expand=2, conv_kernel=4)
causal("mamba2", "state-space", state_size=8, num_heads=8, head_dim=8, n_groups=1, expand=2,
       chunk_size=8)  # fmt: skip
causal("rwkv", "recurrent", attention_hidden_size=32, context_length=64)
causal("recurrent_gemma", "recurrent", lru_width=32, attention_window_size=8, head_dim=8,
       block_types=["recurrent", "recurrent", "attention"])  # fmt: skip

# hybrids of attention and state space
causal("jamba", "hybrid", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
       expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2,
       mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4,
       use_mamba_kernels=False)  # fmt: skip
causal("bamba", "hybrid", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8,
       mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2,
       mamba_chunk_size=8)  # fmt: skip
causal("zamba2", "hybrid", num_hidden_layers=4, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2,
       mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=8, chunk_size=8, num_mem_blocks=1,
       use_mem_rope=True, adapter_rank=4, num_key_value_heads=4,
       layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
       attention_head_dim=16)  # fmt: skip
causal("falcon_h1", "hybrid", mamba_n_heads=8, mamba_d_head=8, mamba_d_ssm=64, mamba_n_groups=1,
       mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8)  # fmt: skip
causal("lfm2", "hybrid", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
causal("qwen3_next", "hybrid", num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
       moe_intermediate_size=24, shared_expert_intermediate_size=24, head_dim=8,
       layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
       linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
causal("nemotron_h", "hybrid", layers_block_type=["mamba", "moe", "attention"], head_dim=8,
       ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=1, chunk_size=8,
       n_routed_experts=4, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24,
       use_mamba_kernels=False)  # fmt: skip
causal("granitemoehybrid", "hybrid", layer_types=["mamba", "attention"], num_hidden_layers=2,
       num_local_experts=4, shared_intermediate_size=24, mamba_n_heads=8, mamba_d_head=8,
       mamba_d_state=8, mamba_chunk_size=8)  # fmt: skip
causal("minimax", "hybrid", num_hidden_layers=2, num_local_experts=4, block_size=8, head_dim=8,
       layer_types=["linear_attention", "full_attention"])  # fmt: skip
causal("qwen3_5_text", "hybrid", num_hidden_layers=2, head_dim=8,
       layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
       linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
causal("hrm_text", "shared-layers", num_hidden_layers=2, head_dim=8, num_key_value_heads=4)
causal("diffllama", "dense", head_dim=8)
causal("gpt_neo", "tied", base={"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2,
                                "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                                "window_size": 6, "max_position_embeddings": 64,
                                "pad_token_id": 0, "bos_token_id": 1,
                                "eos_token_id": 2})  # fmt: skip
causal("gemma3n_text", "tied", num_hidden_layers=4, head_dim=8, vocab_size_per_layer_input=VOCAB,
       hidden_size_per_layer_input=8, num_kv_shared_layers=2, laurel_rank=4, sliding_window=6,
       intermediate_size=48, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
       layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip


# --- everything else --------------------------------------------------------------------------


def other(
    name: str,
    family: str,
    model_class: str,
    make_config: Callable[[], Any],
    batch: Callable[[int], Batch],
    *,
    loss: Callable[[nn.Module, Batch], Tensor] = model_loss,
    prompt: Callable[[int], Batch] | None = None,
    generate_options: Mapping[str, Any] | None = None,
    checkpointing: bool = True,
    unused: bool = False,
) -> Entry:
    """Register a model of a named transformers class."""
    construct = constructor(model_class, make_config)
    return _register(
        Entry(
            name=name,
            family=family,
            build=seeded(construct),
            construct=construct,
            batch=batch,
            loss=loss,
            prompt=prompt,
            generate_options=generate_options or {},
            checkpointing=checkpointing,
            unused=unused,
        )
    )


# encoder-decoder ------------------------------------------------------------------------------

T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "num_decoder_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
other("t5", "encoder-decoder", "T5ForConditionalGeneration",
      lambda: configuration("t5", **T5), seq2seq_batch, prompt=lm_prompt)  # fmt: skip
other("switch_transformers", "encoder-decoder", "SwitchTransformersForConditionalGeneration",
      lambda: configuration("switch_transformers", **T5, num_experts=4, expert_capacity=16,
                            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
      seq2seq_batch, prompt=lm_prompt)  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
other("bart", "encoder-decoder", "BartForConditionalGeneration",
      lambda: configuration("bart", **BART, forced_eos_token_id=2), seq2seq_batch,
      prompt=lm_prompt)  # fmt: skip
other("marian", "encoder-decoder", "MarianMTModel",
      lambda: configuration("marian", **BART, forced_eos_token_id=2), seq2seq_batch,
      prompt=lm_prompt)  # fmt: skip

other("longt5", "encoder-decoder", "LongT5ForConditionalGeneration",
      lambda: configuration("longt5", **T5, local_radius=3,
                            encoder_attention_type="transient-global",
                            global_block_size=4), seq2seq_batch)  # fmt: skip
other("prophetnet", "encoder-decoder", "ProphetNetForConditionalGeneration",
      lambda: configuration("prophetnet", vocab_size=VOCAB, hidden_size=32, num_encoder_layers=2,
                            num_decoder_layers=2, num_encoder_attention_heads=4,
                            num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                            max_position_embeddings=64, ngram=2, decoder_start_token_id=1),
      seq2seq_batch)  # fmt: skip
other("nllb_moe", "encoder-decoder", "NllbMoeForConditionalGeneration",
      lambda: configuration("nllb-moe", **BART, num_experts=4, encoder_sparse_step=2,
                            decoder_sparse_step=2, moe_token_dropout=0.0, expert_capacity=16),
      seq2seq_batch, unused=True)  # fmt: skip

# encoders -------------------------------------------------------------------------------------

ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "type_vocab_size": 2,
    "pad_token_id": 0,
}  # fmt: skip


def encoder(name: str, model_class: str, family: str = "encoder", **options: Any) -> Entry:
    unused = bool(options.pop("unused", False))
    checkpointing = bool(options.pop("checkpointing", True))
    base = dict(options.pop("base", ENCODER))
    dropout = bool(options.pop("dropout", False))
    model_type = str(options.pop("model_type", name))
    return other(
        name, family, model_class,
        lambda: configuration(model_type, dropout=dropout, **{**base, **options}), lm_batch,
        unused=unused, checkpointing=checkpointing,
    )  # fmt: skip


encoder("bert", "BertForMaskedLM")
encoder("bert-dropout", "BertForMaskedLM", model_type="bert", dropout=True)
encoder("roberta", "RobertaForMaskedLM")
encoder("albert", "AlbertForMaskedLM", "shared-layers", embedding_size=16, num_hidden_groups=1,
        checkpointing=False)  # fmt: skip
encoder("deberta_v2", "DebertaV2ForMaskedLM", model_type="deberta-v2", relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_relative_positions=8,
        position_biased_input=False)  # fmt: skip
encoder("modernbert", "ModernBertForMaskedLM", pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, local_attention=8)  # fmt: skip
encoder("xlnet", "XLNetLMHeadModel", base={"vocab_size": VOCAB, "d_model": 32, "n_layer": 3,
        "n_head": 4, "d_inner": 48}, checkpointing=False, unused=True)  # fmt: skip
encoder("big_bird", "BigBirdForMaskedLM", attention_type="original_full", unused=True)
encoder("funnel", "FunnelForMaskedLM", base={"vocab_size": VOCAB, "d_model": 32, "d_head": 8,
        "n_head": 4, "d_inner": 48, "block_sizes": [1, 2], "num_decoder_layers": 1},
        checkpointing=False)  # fmt: skip
encoder("longformer", "LongformerForMaskedLM", attention_window=4, unused=True)
encoder("mobilebert", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=16,
        true_hidden_size=16, num_feedforward_networks=2)  # fmt: skip
encoder("fnet", "FNetForMaskedLM", unused=True, use_tpu_fourier_optimizations=False)
encoder("mpnet", "MPNetForMaskedLM", checkpointing=False)
other("reformer", "reversible", "ReformerModelWithLMHead",
      lambda: configuration("reformer", vocab_size=VOCAB, hidden_size=32, attention_head_size=8,
                            num_attention_heads=4, feed_forward_size=48, axial_pos_embds=False,
                            max_position_embeddings=64, attn_layers=["local", "local"],
                            local_attn_chunk_length=4, is_decoder=True, hash_seed=0,
                            pad_token_id=0),
      lm_batch, checkpointing=False, unused=True)  # fmt: skip
other("perceiver", "latent", "PerceiverForMaskedLM",
      lambda: configuration("perceiver", vocab_size=VOCAB, num_latents=6, d_latents=16, d_model=32,
                            num_blocks=1, num_self_attends_per_block=2,
                            num_self_attention_heads=2, num_cross_attention_heads=2,
                            max_position_embeddings=LENGTH, qk_channels=16, v_channels=16),
      lambda seed: {"inputs": tokens(seed), "labels": tokens(seed + 1)},
      checkpointing=False)  # fmt: skip

# vision ---------------------------------------------------------------------------------------

IMAGE = 32


def pixels(seed: int, size: int = IMAGE) -> Tensor:
    return noise(seed, BATCH, 3, size, size)


def image_batch(seed: int) -> Batch:
    return {"pixel_values": pixels(seed), "labels": torch.tensor([seed % 3, (seed + 1) % 3])}


VIT = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": IMAGE, "patch_size": 8, "num_labels": 3,
}  # fmt: skip
other("vit", "vision", "ViTForImageClassification",
      lambda: configuration("vit", **VIT), image_batch)  # fmt: skip
other("dinov2", "vision", "Dinov2ForImageClassification",
      lambda: configuration("dinov2", **VIT), image_batch, unused=True)  # fmt: skip
other(
    "beit",
    "vision",
    "BeitForImageClassification",
    # Fmt: skip
    lambda: configuration("beit", **VIT, use_relative_position_bias=True),
    image_batch,
)
other("vit_mae", "vision", "ViTMAEForPreTraining",
      lambda: configuration("vit_mae", **VIT, decoder_hidden_size=16, decoder_num_hidden_layers=1,
                            decoder_num_attention_heads=2, decoder_intermediate_size=24),
      lambda seed: {"pixel_values": pixels(seed)})  # fmt: skip
other("convnext", "vision", "ConvNextForImageClassification",
      lambda: configuration("convnext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1],
                            num_labels=3, image_size=IMAGE), image_batch,
      checkpointing=False)  # fmt: skip
other(
    "swin",
    "vision",
    "SwinForImageClassification",
    lambda: configuration(
        "swin",
        image_size=IMAGE,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2, 1],
        # Fmt: skip
        num_heads=[2, 2, 4],
        window_size=4,
        num_labels=3,
    ),
    image_batch,
)
other("resnet", "vision", "ResNetForImageClassification",
      lambda: configuration("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2],
                            num_labels=3), image_batch, checkpointing=False)  # fmt: skip
other("segformer", "vision", "SegformerForSemanticSegmentation",
      lambda: configuration("segformer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                            num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
                            num_labels=3),
      lambda seed: {"pixel_values": pixels(seed),
                    "labels": torch.randint(0, 3, (BATCH, IMAGE, IMAGE),
                                            generator=generator(seed))})  # fmt: skip

# detection ------------------------------------------------------------------------------------


# The matching losses need scipy; the networks are compared through all their outputs instead.


def detection_batch(seed: int) -> Batch:
    return {"pixel_values": pixels(seed)}


def _resnet_backbone() -> Any:
    return configuration("resnet", embedding_size=8, hidden_sizes=[8, 8, 16, 16],
                         depths=[1, 1, 1, 1], out_features=["stage4"])  # fmt: skip


other("yolos", "detection", "YolosForObjectDetection",
      lambda: configuration("yolos", **{**VIT, "image_size": [IMAGE, IMAGE]},
                            num_detection_tokens=4, use_mid_position_embeddings=True),
      detection_batch, loss=square_loss)  # fmt: skip
other("detr", "detection", "DetrForObjectDetection",
      lambda: configuration("detr", use_timm_backbone=False, backbone=None,
                            use_pretrained_backbone=False, backbone_config=_resnet_backbone(),
                            d_model=32, encoder_layers=2, decoder_layers=2, num_queries=4,
                            encoder_attention_heads=4, decoder_attention_heads=4,
                            encoder_ffn_dim=48, decoder_ffn_dim=48, num_labels=3),
      detection_batch, loss=square_loss)  # fmt: skip

other("deformable_detr", "detection", "DeformableDetrForObjectDetection",
      lambda: configuration("deformable_detr", use_timm_backbone=False, backbone=None,
                            use_pretrained_backbone=False,
                            backbone_config=configuration(
                                "resnet", embedding_size=8, hidden_sizes=[8, 8, 16, 16],
                                depths=[1, 1, 1, 1], out_features=["stage3", "stage4"]),
                            d_model=32, encoder_layers=2, decoder_layers=2, num_queries=4,
                            encoder_attention_heads=4, decoder_attention_heads=4,
                            encoder_ffn_dim=48, decoder_ffn_dim=48, num_labels=3,
                            num_feature_levels=2, encoder_n_points=2, decoder_n_points=2,
                            with_box_refine=True, disable_custom_kernels=True),
      detection_batch, loss=square_loss)  # fmt: skip
other("sam", "segmentation", "SamModel",
      lambda: configuration("sam",
                            vision_config={"hidden_size": 32, "output_channels": 16,
                                           "num_hidden_layers": 2, "num_attention_heads": 4,
                                           "image_size": IMAGE, "patch_size": 8, "window_size": 2,
                                           "global_attn_indexes": [1], "mlp_dim": 48,
                                           "num_pos_feats": 8},
                            prompt_encoder_config={"hidden_size": 16, "image_size": IMAGE,
                                                   "patch_size": 8, "mask_input_channels": 4},
                            mask_decoder_config={"hidden_size": 16, "mlp_dim": 32,
                                                 "num_attention_heads": 2, "iou_head_hidden_dim": 16,
                                                 "iou_head_depth": 2}),
      lambda seed: {"pixel_values": pixels(seed),
                    "input_points": IMAGE * torch.rand(BATCH, 1, 2, 2, generator=generator(seed))},
      loss=square_loss, unused=True)  # fmt: skip
other("dpt", "depth", "DPTForDepthEstimation",
      lambda: configuration("dpt", **{**VIT, "num_hidden_layers": 4},
                            backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
                            fusion_hidden_size=16, readout_type="project"),
      lambda seed: {"pixel_values": pixels(seed)}, loss=square_loss, unused=True)  # fmt: skip

# vision and language --------------------------------------------------------------------------

CLIP_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
IMAGE_TOKEN = 3


def image_prompt(seed: int, num_image_tokens: int, length: int = LENGTH) -> Tensor:
    """Token ids that start with the image placeholder, repeated."""
    ids = tokens(seed, length)
    ids[:, :num_image_tokens] = IMAGE_TOKEN
    return ids


def vlm_batch(num_image_tokens: int, size: int = 16) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        ids = image_prompt(seed, num_image_tokens)
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        return {"input_ids": ids, "labels": labels, "pixel_values": pixels(seed, size),
                "attention_mask": torch.ones_like(ids)}  # fmt: skip

    return batch


def vlm_prompt(num_image_tokens: int, size: int = 16) -> Callable[[int], Batch]:
    def prompt(seed: int) -> Batch:
        ids = image_prompt(seed, num_image_tokens, num_image_tokens + 3)
        return {"input_ids": ids, "pixel_values": pixels(seed, size),
                "attention_mask": torch.ones_like(ids)}  # fmt: skip

    return prompt


TINY_LLAMA = {**DECODER, "num_hidden_layers": 2}

other("clip", "vision-language", "CLIPModel",
      lambda: configuration("clip", projection_dim=16,
                            text_config={**CLIP_VISION, "vocab_size": VOCAB,
                                         "max_position_embeddings": 64, "eos_token_id": 2,
                                         "bos_token_id": 1},
                            vision_config=CLIP_VISION),
      lambda seed: {"input_ids": tokens(seed), "pixel_values": pixels(seed, 16),
                    "return_loss": True})  # fmt: skip
other("siglip", "vision-language", "SiglipModel",
      lambda: configuration("siglip",
                            text_config={**CLIP_VISION, "vocab_size": VOCAB,
                                         "max_position_embeddings": LENGTH, "projection_size": 32,
                                         "eos_token_id": 2, "bos_token_id": 1},
                            vision_config=CLIP_VISION),
      lambda seed: {"input_ids": tokens(seed), "pixel_values": pixels(seed, 16),
                    "return_loss": True})  # fmt: skip
other("llava", "vision-language", "LlavaForConditionalGeneration",
      lambda: configuration("llava", text_config=configuration("llama", **TINY_LLAMA),
                            vision_config=configuration("clip_vision_model", **CLIP_VISION),
                            image_token_index=IMAGE_TOKEN, vision_feature_layer=-2),
      vlm_batch(4), prompt=vlm_prompt(4), unused=True)  # fmt: skip
other("paligemma", "vision-language", "PaliGemmaForConditionalGeneration",
      lambda: configuration("paligemma",
                            text_config=configuration("gemma", **{**TINY_LLAMA, "head_dim": 8}),
                            vision_config={**CLIP_VISION, "model_type": "siglip_vision_model",
                                           "vision_use_head": False, "projection_dim": 32},
                            image_token_index=IMAGE_TOKEN, projection_dim=32),
      lambda seed: {**vlm_batch(4)(seed),
                    "token_type_ids": torch.ones(BATCH, LENGTH, dtype=torch.long)},
      prompt=vlm_prompt(4))  # fmt: skip


def qwen_vl_batch(seed: int) -> Batch:
    # One image of 4x4 patches; merged 2x2 it becomes 4 tokens between start and end markers.
    ids = tokens(seed, LENGTH, low=8)[:1]
    ids[:, 0], ids[:, 1:5], ids[:, 5] = 4, 6, 5
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids < 8, -100),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": noise(seed, 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 6).long(),
    }


def qwen_vl_prompt(seed: int) -> Batch:
    batch = qwen_vl_batch(seed)
    del batch["labels"]
    return batch


QWEN_VL_TOKENS = {
    "image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 4, "vision_end_token_id": 5,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
other("qwen2_vl", "vision-language", "Qwen2VLForConditionalGeneration",
      lambda: configuration("qwen2_vl", text_config={**TINY_LLAMA, "rope_parameters": MROPE},
                            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32,
                                           "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
                                           "spatial_merge_size": 2, "temporal_patch_size": 2},
                            **QWEN_VL_TOKENS),
      qwen_vl_batch, prompt=qwen_vl_prompt)  # fmt: skip
other("qwen3_vl", "vision-language", "Qwen3VLForConditionalGeneration",
      lambda: configuration("qwen3_vl",
                            text_config={**TINY_LLAMA, "head_dim": 8, "rope_parameters": MROPE},
                            vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48,
                                           "num_heads": 4, "patch_size": 4, "out_hidden_size": 32,
                                           "spatial_merge_size": 2, "temporal_patch_size": 2,
                                           "num_position_embeddings": 16,
                                           "deepstack_visual_indexes": [0]},
                            **QWEN_VL_TOKENS),
      qwen_vl_batch, prompt=qwen_vl_prompt)  # fmt: skip


def idefics3_batch(seed: int) -> Batch:
    ids = image_prompt(seed, 1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels(seed, 16)[:, None]}  # fmt: skip


def idefics3_prompt(seed: int) -> Batch:
    batch = idefics3_batch(seed)
    del batch["labels"]
    return batch


other("idefics3", "vision-language", "Idefics3ForConditionalGeneration",
      lambda: configuration("idefics3", text_config=configuration("llama", **TINY_LLAMA),
                            vision_config={**CLIP_VISION}, image_token_id=IMAGE_TOKEN,
                            scale_factor=2, pad_token_id=0),
      idefics3_batch, prompt=idefics3_prompt)  # fmt: skip


def mllama_batch(seed: int) -> Batch:
    ids = image_prompt(seed, 1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels(seed, 16)[:, None, None],
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, 1, dtype=torch.long),
    }


other("mllama", "vision-language", "MllamaForConditionalGeneration",
      lambda: configuration("mllama",
                            text_config={**DECODER, "num_hidden_layers": 3,
                                         "cross_attention_layers": [1],
                                         "rope_parameters": {"rope_type": "default",
                                                             "rope_theta": 1e4}},
                            vision_config={"hidden_size": 32, "num_hidden_layers": 2,
                                           "num_global_layers": 1, "attention_heads": 4,
                                           "intermediate_size": 48, "image_size": 16,
                                           "patch_size": 8, "vision_output_dim": 64,
                                           "intermediate_layers_indices": [0],
                                           "max_num_tiles": 1,
                                           "supported_aspect_ratios": [[1, 1]]},
                            image_token_index=IMAGE_TOKEN),
      mllama_batch)  # fmt: skip
other("blip_2", "vision-language", "Blip2ForConditionalGeneration",
      lambda: configuration("blip-2",
                            vision_config=CLIP_VISION,
                            qformer_config={"vocab_size": VOCAB, "hidden_size": 32,
                                            "num_hidden_layers": 2, "num_attention_heads": 4,
                                            "intermediate_size": 48, "encoder_hidden_size": 32,
                                            "cross_attention_frequency": 2},
                            text_config={"model_type": "opt", **DECODER, "ffn_dim": 48,
                                         "word_embed_proj_dim": 32},
                            num_query_tokens=4, image_token_index=IMAGE_TOKEN),
      vlm_batch(4))  # fmt: skip

# audio ----------------------------------------------------------------------------------------

WAVE = {
    "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_time_length": 2,
}  # fmt: skip


def wave_batch(seed: int) -> Batch:
    return {"input_values": noise(seed, BATCH, 256), "labels": tokens(seed, 5, high=16)}


other("wav2vec2", "audio", "Wav2Vec2ForCTC",
      lambda: configuration("wav2vec2", **WAVE, mask_time_prob=0.0), wave_batch)  # fmt: skip
other("wav2vec2-dropout", "audio", "Wav2Vec2ForCTC",
      lambda: configuration("wav2vec2", dropout=True, **WAVE, mask_time_prob=0.3, layerdrop=0.3),
      wave_batch, checkpointing=False)  # fmt: skip
other("hubert", "audio", "HubertForCTC",
      lambda: configuration("hubert", **WAVE, mask_time_prob=0.0), wave_batch)  # fmt: skip
WHISPER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
other("whisper", "audio", "WhisperForConditionalGeneration",
      lambda: configuration("whisper", **WHISPER),
      lambda seed: {"input_features": noise(seed, BATCH, 8, 32), "labels": tokens(seed, 7)},
      prompt=lambda seed: {"input_features": noise(seed, BATCH, 8, 32)})  # fmt: skip

other("moonshine", "audio", "MoonshineForConditionalGeneration",
      lambda: configuration("moonshine", vocab_size=VOCAB, hidden_size=32, intermediate_size=48,
                            encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
                            encoder_num_attention_heads=4, decoder_num_attention_heads=4,
                            max_position_embeddings=64, pad_token_id=0),
      lambda seed: {"input_values": noise(seed, BATCH, 2048), "labels": tokens(seed, 7)},
      prompt=lambda seed: {"input_values": noise(seed, BATCH, 2048)})  # fmt: skip
other("encodec", "audio", "EncodecModel",
      lambda: configuration("encodec", hidden_size=16, num_filters=4, upsampling_ratios=[4, 2],
                            codebook_size=16, codebook_dim=16, num_lstm_layers=1, kernel_size=3,
                            last_kernel_size=3),
      lambda seed: {"input_values": noise(seed, BATCH, 1, 256)}, loss=square_loss,
      checkpointing=False, unused=True)  # fmt: skip
other(
    "speecht5",
    "audio",
    "SpeechT5ForSpeechToText",
    lambda: configuration(
        "speecht5",
        **{**WAVE, "vocab_size": VOCAB},
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        mask_time_prob=0.0,
        decoder_start_token_id=1,
    ),
    # Fmt: skip
    lambda seed: {"input_values": noise(seed, BATCH, 256), "labels": tokens(seed, 7)},
)

# time series ----------------------------------------------------------------------------------

other("patchtst", "time-series", "PatchTSTForPrediction",
      lambda: configuration("patchtst", num_input_channels=2, context_length=32, patch_length=8,
                            patch_stride=8, prediction_length=4, d_model=32, ffn_dim=48,
                            num_hidden_layers=2, num_attention_heads=4, norm_type="batchnorm"),
      lambda seed: {"past_values": noise(seed, BATCH, 32, 2),
                    "future_values": noise(seed + 1, BATCH, 4, 2)},
      checkpointing=False)  # fmt: skip


# --- adapters (PEFT) --------------------------------------------------------------------------


def adapter(name: str, base: str, make_config: Callable[[], Any], *, unused: bool = False) -> Entry:
    """Register `base` of the zoo with a PEFT adapter attached; the base weights are frozen.
    Adapters on packed experts are factors, as in the offloaded model (docs/design/0007-tiles.md).
    """
    entry = ZOO[base]

    def build(seed: int) -> nn.Module:
        import peft

        model = entry.build(seed)
        torch.manual_seed(seed + 1)
        adapted = peft.get_peft_model(model, make_config())
        perturb(adapted, seed + 1)  # the zero half of a low-rank pair would hide its partner
        return infinity.factored_experts(adapted).train()

    return _register(
        replace(entry, name=name, family="peft", build=build, construct=None, unused=unused)
    )


def _lora(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)

    return make


def _peft(class_name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return getattr(peft, class_name)(task_type="CAUSAL_LM", **options)

    return make


adapter("lora", "llama", _lora(target_modules=["q_proj", "v_proj"]))
adapter("lora-all-linear-dropout", "llama", _lora(target_modules="all-linear", lora_dropout=0.2))
adapter("lora-conv1d", "gpt2", _lora(target_modules=["c_attn"], fan_in_fan_out=True, bias="all"))
adapter("lora-tied-embedding", "llama-tied", _lora(target_modules=["embed_tokens", "down_proj"]))
adapter("dora", "llama", _lora(target_modules=["q_proj", "down_proj"], use_dora=True))
adapter("rslora-state-space", "mamba", _lora(target_modules=["in_proj"], use_rslora=True))
adapter("lora-experts", "mixtral",
        _lora(target_modules=["q_proj"],
              target_parameters=["mlp.experts.gate_up_proj",
                                 "mlp.experts.down_proj"]))  # fmt: skip
adapter("lora-modules-to-save", "llama",
        _lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))  # fmt: skip
adapter("lora-token-indices", "llama",
        _lora(target_modules=["q_proj"],
              trainable_token_indices={"embed_tokens": [4, 5, 6]}))  # fmt: skip
adapter("lora-one-layer", "llama",
        _lora(target_modules=["q_proj"], layers_to_transform=[1]))  # fmt: skip
adapter("ia3", "llama", _peft("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"],
                              feedforward_modules=["down_proj"]))  # fmt: skip
adapter("prompt-tuning", "llama", _peft("PromptTuningConfig", num_virtual_tokens=3))
adapter("loha", "llama", _peft("LoHaConfig", r=2, target_modules=["q_proj"]))
adapter("oft", "llama", _peft("OFTConfig", oft_block_size=8, target_modules=["q_proj"]))
adapter("vera", "llama", _peft("VeraConfig", r=4, target_modules=["q_proj"]))


# --- plain modules ----------------------------------------------------------------------------


def module_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The output itself when it is a scalar, else the mean of squares of everything returned."""
    output = model(**batch)
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    return torch.stack([leaf.float().pow(2).mean() for leaf in flatten_floats(output)]).sum()


def module(name: str, build: Callable[[], models.TinyModel], *, unused: bool = False) -> Entry:
    """Register a plain `nn.Module` of `tests.support.models`."""

    def build_seeded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build().train()

    inputs = build().inputs
    return _register(
        Entry(name=name, family="module", build=build_seeded, batch=inputs, loss=module_loss,
              construct=build, unused=unused)
    )  # fmt: skip


NOT_ALL_USED = ("Unused", "Conditional", "InnerGradient")
for _class in models.ALL.values():
    module(_class.__name__, _class, unused=_class.__name__ in NOT_ALL_USED)
module("ConvNet-channels-last", lambda: models.ConvNet(channels_last=True))

TRANSFORMERS = [name for name, entry in ZOO.items() if entry.family not in ("module", "peft")]
PEFT = [name for name, entry in ZOO.items() if entry.family == "peft"]
MODULES = [name for name, entry in ZOO.items() if entry.family == "module"]
