"""The adapter of `[adapter]`: attached by PEFT to a model on meta, checked, saved in PEFT's format.

PEFT makes the modules, draws their first values and names them. This file chooses the modules of
"auto", compares a saved adapter with the model before anything is written, and gives PEFT's own
`save_pretrained` the adapter's values, so that no byte of the base is read.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infinity.bounded import read_json, table_of
from infinity.checkpoint.durable import replace_files
from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader
from infinity.config.extras import release_of
from infinity.config.hub import base_name, published_commit
from infinity.config.paths import refuse_absent_adapter
from infinity.config.schema.inputs import ALL_LINEAR, AUTO_TARGETS, AdapterConfig
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, listed, refusing, reporting
from infinity.integrations.server_layouts import CONFIG_NAME, PREFIX, WEIGHTS_NAME, warn_unused
from infinity.modules.reading.adapters import SCORER, adapter_of, changes_base, names_of_adapters
from infinity.modules.reading.configuration import HEADS, is_router, scores_sequences, towers
from infinity.modules.tiling.split import modules_of, parameters_of
from infinity.sizes import MIB
from infinity.tools.training.base_identity import (
    IDENTITY_NAME,
    BaseIdentity,
    check_base,
    check_census,
    identify,
    write_identity,
)
from infinity.tools.training.own_experts import (
    CHOSEN,
    EXPERTS_NAME,
    counts_of_experts,
    experts_nbytes,
    give_own_weights,
    names_in,
    save_experts,
)

_PARTIAL_NAME = ".adapter.partial"
_COMPARED_NBYTES = 16 * MIB
_RELEASE_OF_EXPERTS = (0, 19)  # Of PEFT, since which packed experts are stored as today.
# Attention and feed-forward modules of transformers of diffusers.
_OF_DENOISER = re.compile(r"attn\d?|ff|ff_context|ffn|(img|txt|proj)_mlp")

# The base of each adapter that this module has attached, for `save_adapter`.
_BASES: WeakKeyDictionary[nn.Module, BaseIdentity] = WeakKeyDictionary()


@contextmanager
def without_renaming_notice() -> Iterator[None]:
    """Drops the warnings that PEFT or TRL reads what transformers has renamed, and that a name such
    as "lora" or "a" is in PEFT's prefix, which no tensor is found by: nobody has to do anything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", "Adapter name '.*' should not be contained in the prefix")
        yield


def attach_adapter(
    model: Any, adapters: Sequence[tuple[AdapterConfig, int]], base: WeightSource | None
) -> Any:
    """Returns the model with one adapter or several around it; the base is frozen.

    model: on meta, from `infinity.init_empty_weights`; the adapters have memory and values
    adapters: each with the seed of its first values, which are those of `peft.get_peft_model` after
        `torch.manual_seed`, whatever other adapters there are
    base: the base's weights, whose directory adapter_config.json names

    Raises ConfigError, which names the module or tensor, for targets that the model lacks and for
    a saved adapter that is of another model, or of another base of the same model.
    """
    if base is None:
        raise ConfigError(
            "adapter: expected model.path, the directory of the base's weights; got "
            "[model.config], whose random weights no other program could find again"
        )
    identity, adapted, (first, *others) = identify(base), model, [o for o, _ in adapters]
    heads = _new_heads(model, base)
    experts = _experts_of(model, first, identity, is_single=not others)
    chosen = give_own_weights(model, experts, base, first.resume) if experts else ()
    parts = {part for name, _ in model.named_parameters() for part in name.split(".")}
    if taken := [options.name for options, _ in adapters if options.name in parts]:
        raise ConfigError(
            f"adapter.name: {type(model).__name__} has a part called {taken[0]!r}; expected "
            "another name"
        )
    # Of the base alone, which has no modules of adapters.
    configs = [_config(model, options, base, identity, heads) for options, _ in adapters]
    new = set[str]()
    for (options, seed), config in zip(adapters, configs, strict=True):
        torch.manual_seed(seed)
        adapted = _wrapped(adapted, config, options)
        if options.resume is not None:
            _load(adapted, options.resume, base, options.peft_name)
        else:
            new |= {*adapted.base_model.targeted_module_names}
    warn_unused(frozenset(new), getattr(model.config, "model_type", ""))
    names = names_of_adapters(adapted) if others else ()
    for name, parameter in adapted.named_parameters():
        if adapter_of(name, names):  # PEFT trains one of several.
            parameter.requires_grad_(True)
    _BASES[adapted], CHOSEN[adapted] = identity, chosen
    return adapted


def _experts_of(
    model: nn.Module, options: AdapterConfig, identity: BaseIdentity, *, is_single: bool
) -> list[str]:
    """Returns the names of the experts to train in full: those of the saved adapter, or of the
    file. Raises ConfigError for a census of another base, and where the two contradict."""
    names, saved = [*(options.experts_full or ())], options.resume
    before = [] if saved is None else names_in(saved)
    if saved is not None and names and set(names) != set(before):
        raise ConfigError(
            f"adapter.experts_full names {len(names)} experts, and the saved adapter {saved} has "
            f"{listed(before) or 'none'}: leave out the key, or begin without adapter.resume"
        )
    if before and not is_single:
        raise ConfigError(
            f"the saved adapter {saved} has experts that are trained in full, which one of several "
            "adapters cannot have; train it alone"
        )
    if options.experts_census is not None:
        counts = counts_of_experts(model)
        check_census(options.experts_census, options.experts_score, identity, counts)
    return before or names


def attach_scorer(
    adapted: Any, scorer: Any, saved: Path, base: WeightSource, *, any_base: bool
) -> None:
    """Attaches a saved adapter that scores sequences to a model that has adapters over the same
    base, as `SCORER`, and makes the scorer's blocks those of the model.

    adapted: of `attach_adapter`, for text
    scorer: on meta, of the class of the saved adapter; its head gets the saved values
    any_base: also where it was trained over another base of the same shapes

    Raises ConfigError for an adapter of another base or another kind of head.
    """
    model = adapted.get_base_model()
    options = AdapterConfig.model_validate({"resume": saved, "name": SCORER, "any_base": any_base})
    if names_in(saved):
        raise ConfigError(
            f"the saved adapter {saved} trains experts in full; merge it into a model"
        )
    config = _config(model, options, base, _BASES[adapted], [], task=_task_of(scorer))
    config.task_type = config.modules_to_save = None
    _wrapped(adapted, config, options)
    blocks = scorer.base_model_prefix
    setattr(scorer, blocks, None)
    head = dict(scorer.named_parameters())
    values = _load(adapted, saved, base, SCORER, beside={PREFIX + n: p for n, p in head.items()})
    scorer.load_state_dict(
        {name: values[PREFIX + name].to(p.dtype) for name, p in head.items()}, assign=True
    )
    setattr(scorer.eval(), blocks, getattr(model, blocks))
    for name, parameter in adapted.named_parameters():
        if adapter_of(name, (SCORER,)):
            parameter.requires_grad_(False)


def _config(
    model: nn.Module, options: AdapterConfig, base: WeightSource, identity: BaseIdentity,
    heads: list[str], *, task: str | None = None,
) -> Any:  # fmt: skip
    if options.resume is None:
        config = _new_config(model, options)
        config.modules_to_save = list(heads) or None
    else:
        config = _saved_config(model, options)
        if config.task_type not in (None, task or _task_of(model)):
            raise ConfigError(
                f"the saved adapter {options.resume} is for {config.task_type}, and a "
                f"{type(model).__name__} is for {_task_of(model)}; begin a new one, or use it "
                "as it was trained"
            )
        if not options.any_base:
            check_base(options.resume, identity, config.base_model_name_or_path)
    config.base_model_name_or_path = base_name(base.path)
    config.revision = published_commit(base.path)
    if config.target_modules is None and config.target_parameters:
        config.target_modules = []  # Otherwise PEFT adds its own choice of modules.
    return config


def _new_heads(model: nn.Module, base: WeightSource) -> list[str]:
    """Returns the modules that the base lacks, without those that PEFT trains of its own accord.
    Their random values would be others whenever the base is loaded."""
    missing = base.plan(model, strict=False).missing if scores_sequences(model) else ()
    parts = [(name, [part for part in name.split(".") if part in HEADS]) for name in missing]
    found = {heads[0] if heads else name.rpartition(".")[0] for name, heads in parts}
    return sorted(found - {"score", "classifier"})


def _task_of(model: Any) -> str | None:
    if scores_sequences(model):
        return "SEQ_CLS"  # PEFT trains the heads of these.
    if not hasattr(model, "get_output_embeddings"):
        return None
    return "FEATURE_EXTRACTION" if model.get_output_embeddings() is None else "CAUSAL_LM"


def with_new_adapters(model: Any, adapters: Sequence[AdapterConfig]) -> Any:
    """Returns the model with adapters as `attach_adapter` makes new ones. Raises ConfigError."""
    # Configurations first: those of the base alone.
    for options, config in [(of, _new_config(model, of)) for of in adapters]:
        model = _wrapped(model, config, options)
    return model


def _wrapped(model: Any, config: Any, options: AdapterConfig) -> Any:
    import peft

    name, base = options.peft_name, config.base_model_name_or_path
    config.base_model_name_or_path = None  # PEFT writes where the model lies here, and warns.
    try:
        with without_renaming_notice():
            if isinstance(model, peft.PeftModel):
                model.add_adapter(name, config)
            else:
                model = peft.get_peft_model(model, config, name)
        config.base_model_name_or_path = base
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        # PEFT raises these for targets that are absent and for layers that it cannot adapt.
        if options.resume is None:
            _refuse_absent_targets(model, options.targets)
        raise ConfigError(f"adapter: {' '.join(str(error).split())}") from error
    takes_experts = model.peft_config[name].target_parameters
    if options.resume is None and not options.experts and takes_experts:
        raise ConfigError(
            f"adapter.targets: PEFT takes {listed(list(options.targets))} of a "
            f"{type(model).__name__} for its routed experts; set adapter.experts = true to adapt "
            "them, or leave gate_proj, up_proj and down_proj out"
        )
    return model


def refuse_tokens_of_head(adapted: Any) -> None:
    """Raises ConfigError for trainable tokens of a head that is tied to the embedding: TRL computes
    the loss from the head's own weight, past them."""
    from peft.utils.other import TrainableTokensWrapper

    base = adapted.get_base_model()
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if isinstance(head, TrainableTokensWrapper):
        raise ConfigError(
            "adapter.resume: the adapter has trainable tokens of an embedding that is tied to the "
            "head, which TRL's loss does not see; expected a base with tie_word_embeddings = "
            "false, or an adapter with modules_to_save"
        )


def adapter_nbytes(model: nn.Module, adapter: str) -> int:
    """Returns the bytes of the adapter's parameters, and of experts that are trained beside it."""
    own = sum(tensor.numel() * tensor.element_size() for _, tensor in _trained(model, adapter))
    return own + experts_nbytes(model)


def num_labels_of(saved: Path) -> int | None:
    """Returns the labels of a saved adapter that scores sequences, None for one of another task.
    Raises ConfigError for a directory without an adapter."""
    refuse_absent_adapter(saved)
    if table_of(read_json(saved / CONFIG_NAME), CONFIG_NAME).get("task_type") != "SEQ_CLS":
        return None
    with SafetensorsReader(saved / WEIGHTS_NAME) as reader:
        heads = tuple(f"{PREFIX}{name}." for name in HEADS)
        rows = [info.shape[0] for name, info in reader.tensors.items() if name.startswith(heads)]
    return min(rows, default=None)


def save_adapter(
    model: Any, directory: Path, *, tokenizer: Any = None, adapter: str = "default"
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for `PeftModel.from_pretrained`.

    Beside them go the experts that were trained in full, and the identity of the base, if
    `attach_adapter` has attached the adapter. Reads the trained units only. The files get their
    names when all of them are synced, the weights last. Raises StorageError, and leaves an earlier
    adapter as it was.
    """
    engine = engine_of(model)
    values = {name: engine.read_parameter(name) for name, _ in _trained(model, adapter)}
    # Buffers are those of modules that the adapter replaces.
    values |= dict(model.named_buffers(remove_duplicate=False))
    partial = directory / _PARTIAL_NAME
    try:
        with reporting("save the adapter", directory):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            model.save_pretrained(
                partial,
                state_dict=values,
                save_embedding_layers=False,
                selected_adapters=[adapter],  # TRL adds a second one, the reference of "dpo".
            )
            _save_for_diffusers(model, values, partial)
            for file in (partial / adapter).glob("*"):  # Where PEFT puts any but "default".
                file.rename(partial / file.name)
            if adapter != "default":
                (partial / adapter).rmdir()
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            if model in _BASES:
                write_identity(_BASES[model], partial)
                save_experts(model, PREFIX, partial)
            before, after = directory / CONFIG_NAME, partial / CONFIG_NAME
            is_other = not before.is_file() or before.read_bytes() != after.read_bytes()
            optional = (IDENTITY_NAME, EXPERTS_NAME)
            is_other |= any((place / EXPERTS_NAME).exists() for place in (directory, partial))
            gone = [WEIGHTS_NAME] if is_other else []
            gone += [name for name in optional if not (partial / name).exists()]
            replace_files(partial, directory, last=WEIGHTS_NAME, gone=gone)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_for_diffusers(model: Any, values: dict[str, torch.Tensor], directory: Path) -> None:
    """Writes an adapter of a transformer of diffusers also as `load_lora_weights` of a pipeline
    reads it. Returns at once for any other model."""
    if not hasattr(model.get_base_model(), "save_config"):
        return
    import peft
    from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

    found = peft.get_peft_model_state_dict(model, state_dict=values)
    FluxLoraLoaderMixin.save_lora_weights(  # The mixins of other pipelines write the same.
        directory,
        transformer_lora_layers={name.removeprefix(PREFIX): found[name] for name in found},
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )


def auto_targets(model: Any) -> list[str]:
    """Returns the shortest endings of names that mean the linear layers of attention, of dense MLPs
    and of shared experts, and no other linear layer.

    PEFT takes some names for the routed experts that they meant in checkpoints of transformers 4
    (`gate_proj` of Qwen-MoE, DeepSeek, GLM); these are left out.
    """
    beside = tuple(f"{name}." for name in towers(model))
    linear = [name for name in _linear_names(model) if not f"{name}.".startswith(beside)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    wanted = [n for n in linear if model.get_submodule(n) is not head and _is_auto_target(n, model)]
    names = {name for name, _ in model.named_modules()}.difference(wanted)
    of_others = {ending for name in names for ending in _endings(name)}
    endings: dict[str, None] = {}
    for name in wanted:
        endings[next(ending for ending in _endings(name) if ending not in of_others)] = None
    return sorted(ending for ending in endings if not _means_experts(model, ending))


def _endings(name: str) -> Iterator[str]:
    """Yields the last part of a name, its last two parts, and so on."""
    parts = name.split(".")
    return (".".join(parts[-count:]) for count in range(1, len(parts) + 1))


def _means_experts(model: nn.Module, ending: str) -> bool:
    """Whether PEFT adapts the routed experts where this target is named."""
    import peft

    from infinity.private.transformers import convert_peft_config_for_transformers

    if convert_peft_config_for_transformers is None:  # `attach_adapter` looks at the result.
        return False
    config = peft.LoraConfig(target_modules=[ending])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # It wants the projection that is fused with this one, too.
        return True
    return bool(config.target_parameters)


def expert_targets(model: nn.Module) -> list[str]:
    """Returns the endings of names that mean the packed weights of routed experts, as PEFT's
    `target_parameters` takes them. Raises ConfigError for a model without any."""
    found: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parameter.ndim == 3 and len(parts) > 1 and "experts" in parts[-2]:
            found[".".join(parts[-2:])] = None
    if not found:
        raise ConfigError(
            f"adapter.experts: {type(model).__name__} has no packed experts (parameters of three "
            "dimensions in a module called experts); leave the key out"
        )
    return sorted(found)


def _new_config(model: nn.Module, options: AdapterConfig) -> Any:
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    alpha, beside = options.alpha, [re.escape(name) for name in towers(model)]
    targets: Any = list(options.targets)
    if options.targets == (ALL_LINEAR,):
        targets = ALL_LINEAR
    elif options.targets == (AUTO_TARGETS,) and not (targets := auto_targets(model)):
        raise ConfigError(
            f'adapter.targets: "auto" finds no linear layer in {type(model).__name__} whose '
            "kernel reads it through its module; expected names of modules"
        )
    if not options.targets and not options.experts:  # Experts that are trained in full alone.
        targets = DUMMY_TARGET_MODULES
    return peft.LoraConfig(
        task_type=_task_of(model),
        r=options.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.method == "dora",
        target_modules=targets,
        target_parameters=expert_targets(model) if options.experts else None,
        # The modules beside the text model have no adapter.
        exclude_modules=rf"({'|'.join(beside)})(\..*)?" if beside else None,
    )


def _refuse_absent_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raises ConfigError for a target that names no module, with the linear layers that there
    are."""
    if set(targets) & {AUTO_TARGETS, ALL_LINEAR}:
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            linear = dict.fromkeys(name.rpartition(".")[2] for name in _linear_names(model))
            raise ConfigError(
                f"adapter.targets: {target!r} is no module of a {type(model).__name__}; expected "
                f"some of its linear layers ({', '.join(sorted(linear))}), or {AUTO_TARGETS!r}"
            )


def _saved_config(model: nn.Module, options: AdapterConfig) -> Any:
    """Returns the configuration of the adapter to go on from. Raises ConfigError if it cannot be
    read, is no LoRA, or contradicts a key of the file."""
    import peft

    path = options.resume
    assert path is not None
    refuse_absent_adapter(path)
    # A broken file makes PEFT raise any exception.
    with refusing(f"the saved adapter {path / CONFIG_NAME} cannot be used", Exception):
        config: Any = peft.PeftConfig.from_pretrained(str(path))
    if not isinstance(config, peft.LoraConfig):
        raise ConfigError(
            f"the saved adapter {path} is of type {config.peft_type}; expected LORA or DoRA"
        )
    _refuse_more_than_factors(path, config)
    config.inference_mode = False
    if config.init_lora_weights == "eva":
        config.init_lora_weights = True  # Its values are saved, and the base is as it was.
    _refuse_contradictions(model, path, config, options)
    return config


def _refuse_more_than_factors(path: Path, config: Any) -> None:
    """Raises ConfigError for trained biases, because the base's own would be read over them, for
    repeated layers, and for a base that PEFT has changed. A merge changes matrices only."""
    of_base = "values that PEFT took out of its base"
    for is_more, what, key, plain in (
        (config.bias != "none", "trained biases", "bias", "none"),
        (config.lora_bias, "trained biases", "lora_bias", False),
        (config.layer_replication is not None, "replicated layers", "layer_replication", None),
        (changes_base(config), of_base, "init_lora_weights", True),
    ):
        if is_more:
            raise ConfigError(
                f"the saved adapter {path} has {what} ({key} = {getattr(config, key)!r} in "
                f"{CONFIG_NAME}), which would be lost here; merge it in memory by PEFT's "
                "merge_and_unload and go on from the merged directory, or use an adapter with "
                f"{key} = {plain!r}"
            )


def _refuse_contradictions(
    model: nn.Module, path: Path, config: Any, options: AdapterConfig
) -> None:
    saved = {
        "targets": options.targets
        if "targets" not in options.set_keys or _has_targets(model, config, options)
        else config.target_modules,
        "method": "dora" if config.use_dora else "lora",
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "dropout": config.lora_dropout,
        "rslora": config.use_rslora,
        "experts": bool(config.target_parameters),
    }
    wrong = [
        f"adapter.{key} is {value!r}, and {saved[key]!r} in {path / CONFIG_NAME}"
        for key, value in options.set_keys.items()
        if key in saved and value != saved[key]
    ]
    if wrong:
        raise ConfigError("; ".join(wrong) + ": leave out the key, or begin without adapter.resume")


def _has_targets(model: nn.Module, config: Any, options: AdapterConfig) -> bool:
    """Whether the targets of the file mean the linear layers and embeddings that a saved adapter
    has."""
    from peft.tuners.tuners_utils import check_target_module_exists

    wanted, names = _new_config(model, options), [*_linear_names(model)]
    names += [name for name, of in model.named_modules() if isinstance(of, nn.Embedding)]
    if wanted.target_modules == ALL_LINEAR:  # Which says nothing about heads.
        names = [name for name in names if any(map(str.isdigit, name.split(".")))]
        wanted.target_modules = names
    if not isinstance(wanted.target_modules, str):
        wanted.target_modules = {
            target for target in wanted.target_modules if not _means_experts(model, target)
        }

    def has(config: Any, name: str) -> bool:
        return bool(config.target_modules and check_target_module_exists(config, name))

    return all(has(wanted, name) == has(config, name) for name in names)


def _load(
    adapted: Any, path: Path, base: WeightSource, adapter: str, *,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Loads a saved adapter after every name and shape of its header has been compared. Returns the
    values of tensors that stand `beside` it in the file and not in the model."""
    import peft

    _refuse_exchanged_experts(adapted, path)
    own = dict(adapted.named_parameters()) | dict(adapted.named_buffers(remove_duplicate=False))
    wanted = peft.get_peft_model_state_dict(
        adapted, state_dict=own, adapter_name=adapter, save_embedding_layers=False
    )
    wanted |= beside
    file, base_name = path / WEIGHTS_NAME, type(adapted.get_base_model()).__name__
    with SafetensorsReader(file) as reader:
        found = {name: info.shape for name, info in reader.tensors.items()}
        lacking = [name for name in wanted if name not in found]
        foreign = [name for name in found if name not in wanted]
        if foreign and not lacking:
            foreign = _without_weights_of_base(adapted, reader, foreign, base)
        if lacking or foreign:
            what = f"lacks {listed(lacking)}" if lacking else f"has {listed(foreign)} beside them"
            raise ConfigError(
                f"the saved adapter {file} is of another base or another {CONFIG_NAME}: it {what}; "
                f"expected the {len(wanted)} tensors of this adapter on {base_name}"
            )
        for name, tensor in wanted.items():
            if tuple(tensor.shape) != found[name]:
                raise ConfigError(
                    f"the saved adapter {file} is of another base: {name!r} has shape "
                    f"{found[name]}, expected {tuple(tensor.shape)} on {base_name}"
                )
        values = {name: reader.read(name) for name in wanted}
    apart = {name: values.pop(name) for name in beside}
    peft.set_peft_model_state_dict(adapted, values, adapter_name=adapter)
    return apart


def _refuse_exchanged_experts(adapted: Any, path: Path) -> None:
    """Raises ConfigError for experts of a release of PEFT that stored in and out of (expert, out,
    in) weights the other way round, which square experts do not show.

    PEFT writes its release into adapter_config.json since 0.18; the order is today's since 0.19.
    """
    from peft.tuners.lora.layer import ParamWrapper

    version = table_of(read_json(path / CONFIG_NAME), CONFIG_NAME).get("peft_version")
    if isinstance(version, str) and release_of(version) >= _RELEASE_OF_EXPERTS:
        return
    for name, module in adapted.named_modules():
        if isinstance(module, ParamWrapper) and module._did_swap_in_out_features:  # noqa: SLF001
            raise ConfigError(
                f"the saved adapter {path} was written by PEFT {version or 'before 0.18'}, whose "
                f"factors of {name.removeprefix(PREFIX)} have in and out exchanged; expected PEFT "
                "0.19 or later. Merge it by merge_and_unload of the release that wrote it"
            )


def _without_weights_of_base(
    adapted: Any, reader: SafetensorsReader, names: list[str], base: WeightSource
) -> list[str]:
    """Returns the names that are no weights of the base.

    PEFT saves the weights of an embedding or a head with the adapter on it, and would load them in
    place of the base's. Raises ConfigError if they differ from these.
    """
    plan = base.plan(adapted, strict=False)
    stored = {
        plan.view.targets[target].canonical: group.source_names[0]
        for group in plan.groups
        if group.transform is None
        for target in group.targets
    }
    left = []
    for name in names:
        target = plan.view.targets.get(name.removeprefix(PREFIX).replace(".base_layer.", "."))
        weight = None if target is None else target.canonical
        if weight not in stored or base.shape(stored[weight]) != reader.tensors[name].shape:
            left.append(name)
        elif not _is_equal(reader, name, base, stored[weight]):
            raise ConfigError(
                f"the saved adapter {reader.path} has {name!r}, whose values are not those of "
                f"{stored[weight]!r} in {base.path}; expected an adapter over this base. Save it "
                "by save_pretrained(..., save_embedding_layers=False) to keep the base's values"
            )
    base.close()
    return left


def _is_equal(reader: SafetensorsReader, name: str, base: WeightSource, stored: str) -> bool:
    """Compares a tensor of the reader with one of the base, as numbers, a few rows at a time."""
    info = reader.tensors[name]
    step = max(1, _COMPARED_NBYTES * info.shape[0] // max(info.nbytes, 1)) if info.shape else 1
    for start in range(0, info.shape[0] if info.shape else 0, step):
        rows = base.read_rows(stored, start, min(start + step, info.shape[0]))
        saved = torch.empty(rows.shape, dtype=info.dtype)
        reader.read_into(name, start * math.prod(info.shape[1:]), saved)
        if not torch.equal(rows.double(), saved.double()):
            return False
    return True


def _trained(model: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, parameter) of the trainable parameters, a tiled one under its own name, without
    those of other adapters."""
    others = set(names_of_adapters(model)) - {adapter}
    for path, module in modules_of(model):
        for leaf, parameter in parameters_of(module).items():
            name = f"{path}.{leaf}" if path else leaf
            if parameter is not None and parameter.requires_grad and not adapter_of(name, others):
                yield name, parameter


def _linear_names(model: nn.Module) -> Iterator[str]:
    """Yields the names of linear layers, of those also that GPT-2 calls Conv1D."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield name


def _is_auto_target(name: str, model: nn.Module) -> bool:
    parts = name.split(".")
    if hasattr(model, "save_config"):  # Of diffusers: not what modulates, embeds or projects.
        return any(_OF_DENOISER.fullmatch(part) for part in parts)
    is_routed = any("experts" in one and other.isdigit() for one, other in pairwise(parts))
    # The matrices of a state-space mixer are read by its kernel, past their modules. Nemotron-H
    # calls its attention a mixer, too.
    mixer = model.get_submodule(name.rpartition(".")[0])
    is_mixer = any("mamba" in part or "ssm" in part for part in parts)
    is_mixer |= hasattr(mixer, "A_log") and hasattr(mixer, "in_proj")
    rows = int(model.get_submodule(name).weight.shape[0])  # type: ignore[index]
    # A head over sequences is trained itself, and so may be what lies between it and the blocks.
    has_other_end = _task_of(model) in ("SEQ_CLS", "FEATURE_EXTRACTION")
    is_head = has_other_end and not any(map(str.isdigit, parts))
    return not (is_routed or is_mixer or is_head or is_router(name) or rows == 1)
