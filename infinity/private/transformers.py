"""The parts of transformers, PEFT, TRL and accelerate that this package uses and that change from
one release to the next."""

from __future__ import annotations

from typing import Any

from infinity.private import PrivatePart, find

_CONVERSIONS = "names and layouts of a checkpoint cannot be converted"

PARTS = {
    "Concatenate": PrivatePart("transformers.core_model_loading:Concatenate", _CONVERSIONS),
    "MergeModulelist": PrivatePart("transformers.core_model_loading:MergeModulelist", _CONVERSIONS),
    "PrefixChange": PrivatePart("transformers.core_model_loading:PrefixChange", _CONVERSIONS),
    "Transpose": PrivatePart("transformers.core_model_loading:Transpose", _CONVERSIONS),
    "WeightConverter": PrivatePart("transformers.core_model_loading:WeightConverter", _CONVERSIONS),
    "WeightRenaming": PrivatePart("transformers.core_model_loading:WeightRenaming", _CONVERSIONS),
    "dot_natural_key": PrivatePart("transformers.core_model_loading:dot_natural_key", _CONVERSIONS),
    "get_model_conversion_mapping": PrivatePart(
        "transformers.conversion_mapping:get_model_conversion_mapping", _CONVERSIONS
    ),
    "rename_source_key": PrivatePart(
        "transformers.core_model_loading:rename_source_key", _CONVERSIONS
    ),
    "active_collector": PrivatePart(
        "transformers.utils.output_capturing:_active_collector",
        "router logits that a block records get no gradient",
    ),
    "convert_peft_config_for_transformers": PrivatePart(
        "peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",
        "targets inside routed experts are not recognised",
        has_substitute=True,
    ),
}

# Methods of Trainer that `OffloadedTrainer` overrides, and that a release may rename.
TRAINER_METHODS = (
    "_clip_grad_norm", "_get_grad_norm", "_get_output_dir", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_maybe_log_save_evaluate", "_push_from_checkpoint",
    "_save_checkpoint", "_save_optimizer_and_scheduler", "compute_loss", "evaluation_loop",
    "get_batch_samples", "get_optimizer_cls_and_kwargs", "prediction_step", "training_step",
)  # fmt: skip

# Attributes that are not public and that modules of this package read or set where they stand.
ATTRIBUTES = frozenset(
    {
        # PreTrainedModel, and its parameters
        "_from_config", "_is_hf_initialized", "_weight_conversions",
        # Trainer
        "_determine_best_metric", "_evaluate", "_load_callback_state", "_prepare_inputs",
        # Classes with `use_experts_implementation`
        "_apply_gate",
        # accelerate.Accelerator.prepare, peft.tuners.lora.layer.ParamWrapper
        "_is_accelerate_prepared", "_did_swap_in_out_features",
        # trl.GRPOTrainer
        "_buffered_inputs", "_last_loaded_step", "_tokenize_prompts",
        # Models of diffusers, and pipelines of FLUX and Qwen-Image
        "_keep_in_fp32_modules", "_pack_latents", "_prepare_latent_image_ids", "_unpack_latents",
    }
)  # fmt: skip


def __getattr__(name: str) -> Any:
    return find(PARTS, globals(), name)
