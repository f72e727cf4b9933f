"""Finds the change that an adapter of PEFT makes to each tensor of a checkpoint, and the layouts in
which servers read it.

PEFT packs the factors of all experts of a layer into two matrices, under the names of the model in
transformers. Servers read the names of the checkpoint, and most of them one pair of factors for
each expert. What a server would drop, or read as something else, is refused by the name of the
module.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

from infinity.bounded import read_json, table_of
from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
from infinity.checkpoint.huggingface.names import PlacedSource, SourcePlaces, TensorGroup
from infinity.config.hub import in_hub_cache
from infinity.config.paths import ADAPTER_NAMES
from infinity.errors import ConfigError, UnsupportedError, listed
from infinity.fused.launches import FORMS
from infinity.modules.reading.configuration import empty_model, is_router
from infinity.modules.reading.dtypes import names_kept_wide

_log = logging.getLogger("infinity")

CONFIG_NAME, WEIGHTS_NAME = ADAPTER_NAMES
PREFIX = "base_model.model."  # Of PEFT, before the names of the base.
ADAPTER = "default"  # The name that PEFT gives an adapter.
EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")


# -- What an adapter changes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """The part of an adapter that changes one tensor of the checkpoint."""

    layer: Any  # One of PEFT's, or the tensor that replaces the stored one.
    placed: PlacedSource
    is_full: bool  # The tensor is all of the parameter, perhaps transposed.
    is_wide: bool  # The model has the parameter in float32, however it is stored.


def adapter_layers(adapted: Any) -> dict[str, list[Any]]:
    """Returns what changes each parameter, by the parameter's name in the base: layers of PEFT, or
    the tensor that replaces it."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper
    from peft.utils.other import (
        AuxiliaryTrainingWrapper,
        ModulesToSaveWrapper,
        TrainableTokensWrapper,
    )

    found: dict[str, list[Any]] = {}
    for name, module in adapted.named_modules():
        path = name.removeprefix(PREFIX)
        if isinstance(module, TrainableTokensWrapper):
            found.setdefault(f"{path}.weight", []).append(module.token_adapter)
        elif isinstance(module, ModulesToSaveWrapper):
            saved: Any = module.modules_to_save[ADAPTER]
            found |= {f"{path}.{leaf}": [value] for leaf, value in saved.state_dict().items()}
        elif isinstance(module, ParamWrapper):
            while path.endswith(".base_layer"):  # Several parameters of a module nest.
                path = path.removesuffix(".base_layer")
            found.setdefault(f"{path}.{module.parameter_name}", []).append(module)
        elif isinstance(module, (Linear, Embedding)) and not _INSIDE & {*path.split(".")}:
            found.setdefault(f"{path}.weight", []).append(module)
        elif isinstance(module, (LoraLayer, AuxiliaryTrainingWrapper)):
            raise UnsupportedError(
                f"{path} is a {type(module).__name__} of PEFT; adapters of linear layers, of "
                "embeddings and of packed experts, modules_to_save and trainable tokens are merged "
                "here, others in memory by merge_and_unload"
            )
    return found


# Modules that a wrapper of PEFT adds around one of the base.
_INSIDE = {"original_module", "modules_to_save", "token_adapter"}


def base_on_meta(
    source: WeightSource, hf_config: Any, *, kind: Any = None, trusts_code: bool = False
) -> tuple[Any, list[TensorGroup]]:
    """Returns the model of a directory of weights on meta, and the groups of its import.

    hf_config: of the directory; kind: of `empty_model`

    Raises ConfigError, CorruptionError and StorageError as `WeightSource.plan` and `empty_model`.
    """
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    # Some configurations name the dtype of codes.
    dtype = hf_config.dtype if hf_config.dtype in FORMS else torch.float32
    where = str(source.path / "config.json")
    model = empty_model(hf_config, dtype, where, trusts_code=trusts_code, kind=kind)
    return model, source.plan(model, strict=False).groups


def changes_of_tensors(
    adapted: Any, layers: dict[str, list[Any]], source: WeightSource, groups: Iterable[TensorGroup]
) -> dict[str, list[Change]]:
    """Returns the changes of every tensor of the checkpoint, by its name.

    layers: of `adapter_layers`, by the names of the base's parameters
    groups: of the import of `source` into the base without an adapter

    Raises UnsupportedError for tensors that no part of a parameter is, ConfigError for a parameter
    that the checkpoint lacks.
    """
    places, wide = SourcePlaces(adapted.get_base_model()), names_kept_wide(adapted)
    found: dict[str, list[Change]] = {}
    left = set(layers)
    for group in groups:
        if not any(target in layers for target in group.targets):
            continue
        shapes = [source.shape(name) for name in group.source_names]
        placed = places.of(group, shapes, group.targets)
        if placed is None:
            raise UnsupportedError(
                f"{', '.join(group.source_names[:3])} are converted when they are read, so "
                "an adapter cannot be merged into them one by one; merge it in memory by "
                "merge_and_unload"
            )
        for target, boxes in zip(group.targets, placed, strict=True):
            left.discard(target)
            for box in boxes:
                name = group.source_names[box.index]
                is_full = sorted(source.shape(name)) == sorted(group.targets[target])
                is_wide = wide is not None and wide.search(target) is not None
                found.setdefault(name, []).extend(
                    Change(factors, box, is_full, is_wide) for factors in layers.get(target, [])
                )
    if left:
        raise ConfigError(
            f"{source.path} lacks {min(left)!r}, which the adapter has: there is no tensor to "
            "merge it into; use the adapter with its base (PEFT, infinity score --adapter)"
        )
    return found


def variant_of(layer: Any) -> str:
    """Returns the name of what a layer adds that is not B A, "" if it adds no more."""
    variant = getattr(layer, "lora_variant", {}).get(ADAPTER)
    name = "" if variant is None else type(variant).__name__
    return "" if name in _ONLY_FACTORS else "DoRA" if name.startswith("Dora") else name


# Variants of LoRA by PEFT's names: that change training only.
_ONLY_FACTORS = (
    "MiCAEmbeddingVariant", "MiCALinearVariant", "MontecloraLinearVariant", "VeloraLinearVariant",
)  # fmt: skip


def factors_of(layer: Any, expert: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of A, (rank, in), and B, (out, rank), of a layer of PEFT, or of one expert.

    In packed experts the rows of A are (expert, rank), and the columns of B (rank, expert).
    """
    a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
    if expert is None:
        return a, b
    count = layer.num_experts
    return a.reshape(count, -1, a.shape[-1])[expert], b.reshape(len(b), -1, count)[..., expert]


# -- What a server reads ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The modules that the LoRA loader of one release reads, as its source says.

    known: the last names of modules that it loads; empty means every linear layer
    dropped: last names of modules whose factors it takes and does not use, in models of other types
        than `uses_dropped`
    needs: what else it needs in a module that has a projection, or it fails or drops that one
    packed: types of models whose experts it reads as PEFT packs them
    ungated: types of models whose experts have no gate
    reads_rslora: whether it reads `use_rslora`; otherwise the scale is alpha / rank
    """

    release: str
    source: str
    known: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    uses_dropped: frozenset[str] = frozenset()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()
    ungated: frozenset[str] = frozenset()
    reads_rslora: bool = False

    def drops(self, name: str, model_type: str) -> bool:
        """Whether it takes factors of modules of this last name and does not use them."""
        return name in self.dropped and model_type not in self.uses_dropped


LOADERS = {
    "vllm": Loader(
        release="vLLM 0.33.0",
        source="vllm/lora: lora_model, model_manager, lora_weights, peft_helper; commit 4ba787ec9",
        # Latent attention reads the base's matrix itself; minicpm3.py calls the module.
        dropped=frozenset({"kv_b_proj"}),
        uses_dropped=frozenset({"minicpm3"}),
        # Of experts only: `PackedLoRALayerWeights.pack_moe`.
        needs={
            "experts.gate_proj": ("up_proj", "down_proj"), "experts.down_proj": ("gate_proj",),
            "experts.w1": ("w2", "w3"), "experts.w2": ("w1",),
            "ungated.up_proj": ("down_proj",), "ungated.down_proj": ("up_proj",),
        },
        ungated=frozenset({"nemotron_h"}),  # Classes with `is_non_gated_moe`.
        packed=frozenset({  # Classes with `is_3d_moe_weight`.
            "gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_omni_moe",
            "qwen3_vl_moe", "qwen3_vl_moe_text",
        }),
        reads_rslora=True,
    ),
    "sglang": Loader(
        release="SGLang 0.5.23",
        source="sglang/srt/lora: lora, lora_config, lora_manager, mem_pool, utils; of the wheel",
        known=frozenset({
            "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
            "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "w1", "w2",
            "w3",
        }),
        needs={
            "q_proj": ("v_proj",), "v_proj": ("q_proj",), "k_proj": ("q_proj", "v_proj"),
            "q_a_proj": ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa": ("q_a_proj",),
            "up_proj": ("gate_proj",), "w3": ("w1",),
        },
    ),
}  # fmt: skip


@functools.cache  # Once in a process: a plan builds the model several times.
def warn_unused(modules: frozenset[str], model_type: str) -> None:
    """Logs modules whose factors a server takes and does not use, before an adapter of these
    modules is trained."""
    names = {module.rpartition(".")[2] for module in modules}
    for loader in LOADERS.values():
        if unused := {name for name in names if loader.drops(name, model_type)}:
            _log.warning(
                "%s does not use the factors of %s; to serve the adapter there, merge it, or set "
                "adapter.targets = %s",
                loader.release, listed(sorted(unused)), json.dumps(sorted(names - unused)),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Factors:
    """A, (rank, in), and B, (out, rank), of a stored matrix; or those of all experts of a packed
    tensor, as PEFT packs them."""

    a: torch.Tensor
    b: torch.Tensor
    is_packed: bool = False


# From the saved configuration, the factors of each matrix of the checkpoint, alpha, and what is
# refused so far, to the function that writes the files.
LayOut: TypeAlias = Callable[
    [dict[str, Any], dict[str, Factors], float, Loader, dict[str, list[str]]],
    Callable[[Path], object],
]


def plan_layout(
    loader: Loader,
    saved: Path,
    adapted: Any,
    changes: dict[str, list[Change]],
    lay_out: LayOut | None = None,
) -> Callable[[Path], object]:
    """Refuses what a server does not read, and returns the function that writes the rest into a
    directory.

    saved: the directory of the adapter
    adapted, changes: of that adapter, by `changes_of_tensors`; the function reads the adapter's
        parameters, so call it before the model is offloaded
    lay_out: plans the files; None those of PEFT's format with the names of the checkpoint

    Raises UnsupportedError, which names the modules.
    """
    config = table_of(read_json(saved / CONFIG_NAME), CONFIG_NAME)
    refused: dict[str, list[str]] = {}
    factors = {}
    for stored, parts in changes.items():
        name = stored.removesuffix(".weight")
        why = _why_not(name, parts, config, loader, adapted)
        if why is None:
            factors[name] = _factors(parts[0])
        else:
            refused.setdefault(why, []).append(name)
    is_ungated = adapted.get_base_model().config.model_type in loader.ungated
    experts = "ungated" if is_ungated else "experts"
    for name in factors:
        parent, _, last = name.rpartition(".")
        needed = loader.needs.get(last, ())
        if EXPERT.search(name):
            needed = loader.needs.get(f"{experts}.{last}", needed)
        lacking = [other for other in needed if f"{parent}.{other}" not in factors]
        if lacking:
            refused.setdefault(f"it needs {listed(lacking)} with it", []).append(name)
    # The alpha whose quotient by the rank is the scale.
    alpha = float(
        config["lora_alpha"] * (math.sqrt(config["r"]) if config.get("use_rslora") else 1)
    )
    write = (lay_out or _plan_safetensors)(config, factors, alpha, loader, refused)
    if refused:
        reasons = "; ".join(f"{listed(names)}: {why}" for why, names in refused.items())
        raise UnsupportedError(
            f"{loader.release} does not load this adapter as it was trained ({reasons}). "
            "`infinity merge` writes weights that every server loads"
        )
    return write


def over_its_base(saved: Path, model: Any) -> tuple[Any, dict[str, list[Change]]] | None:
    """Returns a saved adapter over its base on meta, and what it changes in each tensor of the
    checkpoint; None without experts where the directory of the base is not known. Reads all headers
    of the base: 15 s of a trillion parameters.

    model: the model that has the adapter

    Raises ConfigError for experts over a base that is not known; StorageError.
    """
    from peft import PeftModel
    from peft.tuners.lora.layer import ParamWrapper

    found = model.get_base_model()
    base = in_hub_cache(Path(found.config.name_or_path or "?"))
    if not (base / "config.json").is_file():
        if any(isinstance(module, ParamWrapper) for module in model.modules()):
            raise ConfigError(
                "servers read experts by the names of the checkpoint, and the model was loaded "
                f"from {str(base)!r}, which is no directory of one; load it by "
                "infinity.from_pretrained(DIRECTORY, ...)"
            )
        return None
    hf_config = copy.deepcopy(found.config)
    hf_config.dtype = torch.float32  # PEFT rounds what it loads to the dtype of the base.
    trusts_code = type(found).__module__.startswith("transformers_modules")
    # PEFT draws first values. The run's own random numbers stay those of a run without a server.
    with closing(weight_source(base)) as source, torch.random.fork_rng(devices=()):
        empty, groups = base_on_meta(source, hf_config, trusts_code=trusts_code)
        adapted = PeftModel.from_pretrained(
            empty, str(saved), low_cpu_mem_usage=True, torch_device="cpu"
        )
        return adapted, changes_of_tensors(adapted, adapter_layers(adapted), source, groups)


def _why_not(
    name: str, parts: list[Change], config: dict[str, Any], loader: Loader, adapted: Any
) -> str | None:
    """Returns the reason for which a server cannot have the change of a tensor, or None."""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    layer, placed = parts[0].layer, parts[0].placed
    if isinstance(layer, torch.Tensor):
        return "modules_to_save replaces it"
    if not isinstance(layer, (Linear, ParamWrapper)) or len(parts) > 1:
        return "embeddings and trainable tokens are no linear layers"
    last = name.rpartition(".")[2]
    if is_router(name) or getattr(layer, "num_experts", 0) == 1:
        return "it routes tokens"
    if adapted.get_base_model().get_output_embeddings() in (layer, layer.get_base_layer()):
        return "it is the head"
    if variant := variant_of(layer):
        return f"its layer is {variant} of PEFT"
    if layer.r[ADAPTER] != config["r"] or layer.lora_alpha[ADAPTER] != config["lora_alpha"]:
        return "rank_pattern or alpha_pattern gives it another rank or scale"
    model_type = adapted.get_base_model().config.model_type
    if isinstance(layer, ParamWrapper) and not isinstance(placed.box[0], int):
        is_read = model_type in loader.packed and parts[0].is_full
        return None if is_read else f"experts are packed in the files of a {model_type}"
    if isinstance(layer, ParamWrapper) and model_type in loader.packed:
        return f"experts of a {model_type} are read packed, and the files have them one by one"
    if loader.known and last not in loader.known:
        return "it has no place there"
    if loader.drops(last, model_type):
        return "attention reads the matrix of the base there; train without it"
    is_turned = isinstance(layer, ParamWrapper) and not layer._did_swap_in_out_features  # noqa: SLF001
    return None if placed.axes == ((1, 0) if is_turned else (0, 1)) else "it is stored transposed"


def _factors(change: Change) -> Factors:
    first, *box = change.placed.box
    if isinstance(first, int):
        a, b = factors_of(change.layer, first)
        is_turned = not change.layer._did_swap_in_out_features  # noqa: SLF001  (in, out)
        rows, columns = reversed(box) if is_turned else box
        return Factors(a[:, columns], b[rows])
    a, b = factors_of(change.layer)
    if len(box) > 1:
        return Factors(a, b, is_packed=True)
    return Factors(a, b) if change.is_full else Factors(a[:, box[0]], b[first])


def _plan_safetensors(
    saved: dict[str, Any],
    found: dict[str, Factors],
    alpha: float,
    loader: Loader,
    refused: dict[str, list[str]],
) -> Callable[[Path], None]:
    """PEFT's format, with the names of the checkpoint. `saved`: its adapter_config.json."""
    tensors = {}
    for name, factors in found.items():
        module = name
        if factors.is_packed:  # The wrapper of `down_proj` is around that of `gate_up_proj`.
            parent, _, last = name.rpartition(".")
            module = parent if last == "down_proj" else f"{parent}.base_layer"
            other = "gate_up_proj" if last == "down_proj" else "down_proj"
            if f"{parent}.{other}" not in found:
                refused.setdefault(f"it needs {other!r} with it", []).append(name)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = factors.a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = factors.b
    has_packed = any(factors.is_packed for factors in found.values())
    config = {
        **saved,
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
        "target_parameters": saved.get("target_parameters") if has_packed else None,
        "exclude_modules": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    if not loader.reads_rslora:
        config |= {"use_rslora": False, "lora_alpha": alpha}

    def write(out: Path) -> None:
        copies = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        save_file(copies, out / WEIGHTS_NAME, metadata={"format": "pt"})
        (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return write
