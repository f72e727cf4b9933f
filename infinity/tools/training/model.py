"""The model of `[model]`: read and checked first, built on meta, then streamed into its tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from infinity.checkpoint import WeightSource, weight_source
from infinity.config import JobConfig, Model, SwapConfig
from infinity.config.extras import require_release
from infinity.config.hub import in_hub_cache
from infinity.config.schema import changed
from infinity.config.schema.train import METHODS, Train
from infinity.config.values import Capacity
from infinity.errors import CapacityError, ConfigError, refusing
from infinity.modules.accumulate.module_state import evaluating
from infinity.modules.reading.configuration import (
    CLASS_NAME,
    auto_class,
    check_numbers,
    check_sides,
    config_of_directory,
    config_of_table,
    empty_denoiser,
    empty_model,
    model_for_text,
    names_scorer,
    table_of_denoiser,
    table_of_file,
    towers,
)
from infinity.tools.mlp_slices import slice_mlps
from infinity.tools.training.adapter import (
    attach_adapter,
    refuse_tokens_of_head,
    with_new_adapters,
)
from infinity.tools.training.own_experts import CHOSEN, locate

_log = logging.getLogger("infinity")

_C = TypeVar("_C", bound=SwapConfig)

# TRL computes the loss from the last hidden states and the rows of the head. The logits of these
# model types are others: dense layers before the head, a cap that TRL does not know, or rows of
# the head that are left out.
OTHER_LOGITS = frozenset({
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_mm_model",
    "inkling_text", "kosmos-2.5", "megatron-bert", "modernbert-decoder", "prophetnet",
    "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A configuration of transformers, or the table of config.json of diffusers, and for a
    checkpoint its weights, of which none is read yet. `model_class`: the automatic class of a model
    that scores sequences or embeds text; None for any other."""

    hf_config: Any
    weights: WeightSource | None
    path: Path | None
    model_class: Any = None

    @property
    def kind(self) -> str:
        """The model type of transformers, or the class of diffusers."""
        is_table = isinstance(self.hf_config, dict)
        return str(self.hf_config[CLASS_NAME] if is_table else self.hf_config.model_type)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return int(self.hf_config.get_text_config().vocab_size)


def plan_model(
    model: Model, train: Train | None = None, *, reads_weights: bool = True
) -> ModelPlan:
    """Reads the configuration and, with `reads_weights`, the headers of the weights. `train` may
    ask for a head over sequences.

    Raises ConfigError for a directory or table that transformers cannot use, and CorruptionError
    for weight files that contradict each other.
    """
    require_release("transformers", "[model]")
    if model.path is None:
        assert model.config is not None
        hf_config = config_of_table(model.config)
        kind = _headed(hf_config, train, "[model.config]")
        return ModelPlan(hf_config=hf_config, weights=None, path=None, model_class=kind)
    trusts_code = model.trust_remote_code
    if (table := table_of_denoiser(model.path)) is not None:
        weights = weight_source(model.path) if reads_weights else None
        return ModelPlan(hf_config=table, weights=weights, path=model.path)
    hf_config = config_of_directory(model.path, trusts_code=trusts_code)
    # Before weights are looked for.
    kind = _headed(hf_config, train, str(model.path / "config.json"), trusts_code=trusts_code)
    weights = weight_source(model.path) if reads_weights else None
    if weights is not None:
        longest = max((side for name in weights.names() for side in weights.shape(name)), default=0)
        file = model.path / "config.json"
        check_sides(table_of_file(file), longest, f"model.path: {file}: ")
    return ModelPlan(hf_config=hf_config, weights=weights, path=model.path, model_class=kind)


def _headed(hf_config: Any, train: Train | None, where: str, *, trusts_code: bool = False) -> Any:
    """Gives the configuration the labels that `train` asks for. Returns the class of a model that
    does not generate text, or None. Raises ConfigError if transformers has no such class, and for a
    head that knows other labels."""
    purpose = METHODS["sft"].purpose if train is None else train.facts.purpose
    kind = auto_class(hf_config, where, trusts_code=trusts_code, purpose=purpose)
    if train is None or purpose != "scores sequences":
        return kind if purpose == "embeds text" else None
    known = list(hf_config.id2label.values())
    is_other = known[0] != "LABEL_0" and known != [*train.labels]
    if train.labels and is_other and names_scorer(hf_config):
        raise ConfigError(
            f"train.labels: the head of {where} knows {', '.join(known)}, in this order"
        )
    hf_config.num_labels = len(train.labels) or 1
    if train.labels:
        hf_config.id2label = dict(enumerate(train.labels))
        hf_config.label2id = {name: number for number, name in enumerate(train.labels)}
        hf_config.problem_type = "single_label_classification"
    return kind


def build_model(plan: ModelPlan, config: SwapConfig, others: Sequence[SwapConfig] = ()) -> Any:
    """Builds the model on meta, with real buffers, for `infinity.offload`; with `[adapter]`,
    the adapter around it, which has memory and values, and those of `others` beside it.

    Towers beside the text model are frozen. Checks every name and shape of the checkpoint against
    the model. Raises ConfigError if the architecture has no language model, cannot
    checkpoint activations, or does not match the weights.
    """
    assert config.model is not None and config.train is not None
    # Small parameters may keep the values of their constructors, so these are seeded, too.
    torch.manual_seed(config.model.seed)
    dtype = getattr(torch, config.precision.compute_dtype)
    where = str(config.model.path / "config.json") if config.model.path else "[model.config]"
    trusts_code = config.model.trust_remote_code
    if isinstance(plan.hf_config, dict):
        model = empty_denoiser(plan.hf_config, dtype, where)
    else:
        chosen, made = plan.model_class, plan.hf_config
        _refuse_other_logits(made, config.train, where)
        model = empty_model(made, dtype, where, trusts_code=trusts_code, kind=chosen)
        if getattr(made.get_text_config(), "is_moe", True) is False:  # TRL adds routers' losses.
            model.config.get_text_config().router_aux_loss_coef = 0.0
    for tower in towers(model).values():
        tower.requires_grad_(False)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # The fallback of transformers, without its warning.
    if plan.weights is not None:
        plan.weights.plan(model, ignore=config.model.ignore)
        assert plan.path is not None
        take_generation_config(model, plan.path)
    if config.train.activation_checkpointing:
        checkpoint_activations(model)
    if config.adapter is not None:
        wanted = [(c.adapter, c.model.seed) for c in (config, *others) if c.adapter and c.model]
        model = attach_adapter(model, wanted, plan.weights)
        refuse_tokens_of_head(model)
        if config.train.facts.has_reference and CHOSEN.get(model):
            raise ConfigError(
                f'train.method: "{config.train.method}" may compare with the model without its '
                "adapter, which would have the experts that are trained in full; expected "
                '"sft" or "distill", or no adapter.experts_full'
            )
    if config.train.mlp_tokens is not None:
        slice_mlps(model, config.train.mlp_tokens)
    return model


def refuse_untrainable(path: Path, config: SwapConfig, *, has_images: bool = False) -> None:
    """Raises ConfigError as `build_model` does for the class of a directory, its checkpointing of
    activations and a new adapter, and for one that needs images where there are none. Needs no
    weights."""
    trusts_code = config.model is not None and config.model.trust_remote_code
    where, hf_config = str(path / "config.json"), config_of_directory(path, trusts_code=trusts_code)
    kind = _headed(hf_config, config.train, where, trusts_code=trusts_code)
    _refuse_other_logits(hf_config, config.train, where)
    if has_images:
        model = empty_model(hf_config, torch.bfloat16, where, trusts_code=trusts_code)
    else:
        model = model_for_text(hf_config, where, trusts_code=trusts_code, kind=kind)
    if config.train is not None and config.train.activation_checkpointing:
        checkpoint_activations(model)
    if config.train is not None and config.train.mlp_tokens is not None:
        slice_mlps(model, config.train.mlp_tokens)
    take_generation_config(model, path)
    new = [options for options in config.every_adapter if options.resume is None]
    for options in new:
        locate(model, options.experts_full or ())
    with torch.device("meta"):
        with_new_adapters(model, new)


def _refuse_other_logits(hf_config: Any, train: Train | None, where: str) -> None:
    is_other = hf_config.model_type in OTHER_LOGITS
    if is_other and (train is None or train.facts.purpose == "generates text"):
        raise ConfigError(
            f"{where}: TRL computes a loss from the head and the last hidden states, and the "
            f"logits of {hf_config.model_type!r} are others, so it would learn from another loss; "
            'expected another model, or train.method = "reward", "classify" or "embed"'
        )


def take_generation_config(model: Any, directory: Path) -> None:
    """Copies the checkpoint's generation settings, so that the export has them. Raises ConfigError
    for a file that cannot be used."""
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    if not file.is_file():
        return
    check_numbers(table_of_file(file), f"model.path: {file}: ")
    # A broken file makes transformers raise any exception.
    with refusing(f"model.path: {file} cannot be used", Exception):
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)


def checkpoint_activations(model: Any) -> None:
    """Makes the backward repeat the forward of every block. Raises ConfigError for a transformers
    or diffusers model that cannot."""
    # transformers 5.23 renamed the method.
    options = {"use_reentrant": False}
    with refusing("train.activation_checkpointing", ValueError):
        if hasattr(model, "enable_gradient_checkpointing"):  # Of diffusers.
            model.enable_gradient_checkpointing()
        elif hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def generate(
    model: Any, prompt_ids: list[int], *, num_tokens: int, temperature: float,
    should_stop: Callable[[], bool] = lambda: False, **options: Any,
) -> list[int]:  # fmt: skip
    """Returns the prompt and its continuation by transformers' own `generate`, in eval mode.

    options: further ones of `generate`; those of sampling count with a `temperature` above 0
    """
    from transformers import StoppingCriteriaList

    def stop(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), should_stop(), device=input_ids.device)

    input_ids = torch.tensor([prompt_ids], device=next(model.parameters()).device)
    if temperature > 0:
        options["temperature"] = temperature
    else:
        options.pop("top_k", None)
    pad_id = model.generation_config.pad_token_id
    with torch.no_grad(), evaluating(model):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=temperature > 0,
            use_cache=True,
            pad_token_id=0 if pad_id is None else pad_id,
            stopping_criteria=StoppingCriteriaList([stop]),
            **options,
        )
    ids: list[int] = output[0].tolist()
    return ids


# -- A second, frozen model: that before training, with which "dpo" compares, or a teacher ---------
#
# "dpo" of an adapter needs none: TRL keeps the adapter's first values beside it. The second model
# has an engine of its own. Its weights rest in the files of its directory and take next to no swap
# space. Each of the two models gets half of the host budget and of the device budget.


def reference_path(config: JobConfig) -> Path | None:
    """Returns the directory of the second model, or None where the run needs none. Raises
    ConfigError where "dpo" would need one of random weights."""
    distill = config.train.distill
    if distill is not None:
        path = in_hub_cache(distill.teacher)
        return path if path.is_dir() else None
    holds_to = config.train.method == "dpo" or (config.train.grpo and config.train.grpo.beta)
    if not holds_to or config.adapter is not None:
        return None
    if config.model.path is None:
        raise ConfigError(
            f'train.method: "{config.train.method}" holds to the weights of model.path; got '
            "[model.config], whose weights are random"
        )
    return config.model.path


def build_reference(config: JobConfig) -> Any:
    """Returns the second model on meta, or None where the run needs none. Raises as
    `build_model`."""
    path = reference_path(config)
    if path is None:
        return None
    options = changed(config.model, {"path": path, "config": None})
    config = changed(
        config, {"model": options, "adapter": None, "train.activation_checkpointing": False}
    )
    model = build_model(plan_model(options), config)
    model.requires_grad_(False)
    model._is_accelerate_prepared = True  # Trainer does not move it.
    return model.eval()


@contextmanager
def sharing_budgets(config: _C, *, has_second: bool) -> Iterator[_C]:
    """Yields the configuration of the trained model, with half of the budgets beside a second one;
    a CapacityError of the block says so."""
    if not has_second:
        yield config
        return
    host, device = config.tiers.host.capacity, config.tiers.device.capacity
    halved = {"tiers.host.capacity": _half(host), "tiers.device.capacity": _half(device)}
    try:
        yield changed(config, halved)
    except CapacityError as error:
        more = "the second model of train.method takes the other half, so the file needs twice that"
        error.args = (f"{error}; {more}",)
        raise


def with_own_drives(config: _C, name: str) -> _C:
    """Returns the configuration of a further model of a program: its swap directories lie beside
    those of the first, with the name behind theirs."""
    drives = [
        changed(drive, {"path": drive.path.with_name(f"{drive.path.name}-{name}")})
        for drive in config.tiers.nvme
    ]
    return changed(config, {"tiers.nvme": type(config.tiers.nvme)(drives)})


def _half(capacity: Capacity) -> Capacity:
    if capacity.nbytes is not None:
        return Capacity(nbytes=capacity.nbytes // 2)
    # "auto" takes half of what is free, so the second engine takes half of what the first leaves.
    return capacity if capacity.percent is None else Capacity(percent=capacity.percent / 2)
