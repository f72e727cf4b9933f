"""Configurations of transformers: read from a directory or a table, and checked before transformers
builds anything of them; and the class that config.json names, built without memory.

The class is one that generates text. A model of text and images has parts beside its text model
(towers): vision, audio, and projections. Training on text freezes them. They stay in their files,
and no pass reads them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bounded import MAX_TEXT_NBYTES, MalformedError, read_json, table_of
from infinity.config.paths import refuse_absent_model
from infinity.config.schema.train import Purpose
from infinity.config.values import nearest
from infinity.errors import ConfigError, refusing
from infinity.modules.reading.empty_weights import init_empty_weights

_log = logging.getLogger("infinity")

MOST_TOKENS = 2**31  # Their ids are 32-bit integers to tokenizers and kernels.
# Keys that transformers accepts although no configuration class declares them.
_EXTRA_KEYS = frozenset({
    "attn_implementation", "experts_implementation", "num_labels", "partial_rotary_factor",
    "rope_scaling", "rope_theta", "torch_dtype",
})  # fmt: skip


def config_of_table(table: dict[str, Any]) -> Any:
    """Returns the configuration of a table with `model_type`. Raises ConfigError, which names the
    key."""
    from transformers import AutoConfig

    check_numbers(table, "model.config.")
    options = {key: value for key, value in table.items() if key != "model_type"}
    model_type = table["model_type"]
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        near = nearest(model_type, _model_types())
        raise ConfigError(
            f"model.config.model_type: transformers has no {model_type!r}"
            + (f"; did you mean {near!r}?" if near else "")
        ) from None
    for key in _unread_keys(options, default):
        near = nearest(key, sorted({*default.to_dict(), *default.attribute_map}))
        if near:
            raise ConfigError(
                f"model.config.{key}: a {model_type} configuration has no such key; "
                f"did you mean {near!r}?"
            )
        _log.warning("model.config.%s: nothing of %s is known to read it", key, model_type)
    with refusing("model.config", Exception):  # transformers raises its own in validation.
        return AutoConfig.for_model(model_type, **options)


def _unread_keys(table: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yields the keys that no class of this configuration declares, and no code of it reads."""
    kind = type(config)
    known = _EXTRA_KEYS | set(dir(kind)) | set(config.attribute_map)
    known |= set(inspect.signature(kind.__init__).parameters)
    unknown = [key for key in table if key not in known]
    source = _source_of(config) if unknown else ""
    for key in unknown:  # Some are read by getattr, with a default of the model.
        if not re.search(
            rf"\b(config|self)\.{re.escape(key)}\b|[\"']{re.escape(key)}[\"']", source
        ):
            yield key


def config_of_directory(path: Path, *, trusts_code: bool = False) -> Any:
    """Returns the configuration of a directory. With `trusts_code`, code of the directory may run.

    Raises ConfigError for a file that transformers cannot use, for an architecture that it does not
    have, and for a size that its class does not read.
    """
    refuse_absent_model(path)
    file = path / "config.json"
    table = table_of_file(file)
    if CLASS_NAME in table:
        raise ConfigError(
            f"model.path: {path} is a {table[CLASS_NAME]} of diffusers, which `infinity train` "
            'trains with train.method = "diffusion" (`infinity new` writes a file); here a '
            "language model is expected"
        )
    check_numbers(table, f"model.path: {file}: ")
    kind = str(table.get("model_type"))
    if (
        table.get("auto_map")
        and not trusts_code
        and kind not in {*_model_types(), *_SAME_ARCHITECTURE}
    ):
        raise ConfigError(
            f"model.path: {file}: transformers has no {kind!r}, and the directory has code of its "
            "own for it; expected another architecture, or model.trust_remote_code = true, which "
            "runs that code"
        )
    # A broken file makes transformers raise any exception.
    with refusing(f"model.path: {file} cannot be used", Exception):
        config = published_config(path, trusts_code=trusts_code)
    parts: list[tuple[Any, Any]] = [
        (table, config),
        (table.get("text_config"), config.get_text_config()),
    ]
    for part, own in parts:
        for key in _unread_keys(part, own) if isinstance(part, dict) else ():
            if not _SIZED.fullmatch(key) or "mtp" in key or "nextn" in key:
                continue
            raise ConfigError(
                f"model.path: {file}: {key} is a size that {config.model_type} of this "
                "transformers does not read, so its model is another one; expected a newer "
                "transformers, or a directory that was converted for it"
            )
    return config


# Published with code of their own for an architecture that transformers has under another name.
_SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}


def published_config(path: Path, *, trusts_code: bool = False) -> Any:
    """Returns the configuration of a directory. Runs no code of the directory unless it is trusted.

    Raises what transformers raises for a broken file, or for an architecture that it does not have.
    """
    from transformers import AutoConfig

    table = table_of_file(path / "config.json")
    same = _SAME_ARCHITECTURE.get(str(table.get("model_type")))
    if same is None:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trusts_code
        )
    own = {key: value for key, value in table.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(same, **{**own, "name_or_path": str(path)})


def table_of_file(file: Path) -> dict[str, Any]:
    """Reads a JSON table of bounded size, before transformers reads it again."""
    with refusing(f"model.path: {file} cannot be used", OSError, MalformedError):
        # Published configurations have numbers that are not finite, and repeated keys.
        content = read_json(file, max_nbytes=16 * MAX_TEXT_NBYTES, is_strict=False)
        return table_of(content, "it")


def _source_of(config: Any) -> str:
    """Returns the source code of a configuration class and of its causal LM."""
    module = type(config).__module__
    names = (module, module.replace(".configuration_", ".modeling_"))
    try:
        return "".join(inspect.getsource(importlib.import_module(name)) for name in names)
    except (ImportError, OSError):
        return ""


def _model_types() -> list[str]:
    from transformers import CONFIG_MAPPING

    return list(CONFIG_MAPPING.keys())


# -- A transformer of diffusers --------------------------------------------------------------------


CLASS_NAME = "_class_name"  # The key of config.json in which diffusers names the class.


def table_of_denoiser(path: Path) -> dict[str, Any] | None:
    """Returns config.json of a model of diffusers; None of any other directory. Raises
    ConfigError."""
    refuse_absent_model(path)
    table = table_of_file(path / "config.json")
    return {**table, "_name_or_path": str(path)} if CLASS_NAME in table else None


def empty_denoiser(table: dict[str, Any], dtype: torch.dtype, where: str) -> Any:
    """Returns the model of diffusers on meta, with real buffers, in the dtypes of
    `from_pretrained(torch_dtype=dtype)`. Raises ConfigError for a class that diffusers lacks, or
    cannot build."""
    import diffusers

    kind = getattr(diffusers, table[CLASS_NAME], None)
    if kind is None:
        raise ConfigError(
            f"model: diffusers {diffusers.__version__} has no {table[CLASS_NAME]!r} of {where}; "
            "expected a newer diffusers"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Sizes that do not go together make a constructor raise anything.
        what = f"model: {where} gives no {table[CLASS_NAME]}"
        with refusing(what, Exception), init_empty_weights():
            model = kind.from_config(table)
    finally:
        torch.set_default_dtype(before)
    vars(model)["name_or_path"] = table.get("_name_or_path")  # PEFT writes it.
    wide = {*(kind._keep_in_fp32_modules or ())}
    for name, parameter in model.named_parameters():
        if wide & {*name.split(".")}:
            parameter.data = parameter.data.to(torch.float32)
    return model


# -- The model of a configuration -----------------------------------------------------------------


# By purpose: tables of transformers' classes, and the automatic class of each.
_KINDS: dict[Purpose, dict[str, str]] = {
    "generates text": {
        "MODEL_FOR_CAUSAL_LM_MAPPING": "AutoModelForCausalLM",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING": "AutoModelForImageTextToText",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING": "AutoModelForMultimodalLM",
    },
    "scores sequences": {
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "AutoModelForSequenceClassification"
    },
    "embeds text": {"MODEL_MAPPING": "AutoModel"},
}
# How the classes of reward models and classifiers end, and what they call their heads.
OF_LABELS = "ForSequenceClassification"
HEADS = ("score", "classifier", "classification_head", "logits_proj")
_OTHER_TEXT = "its encoder takes other text than its decoder"
_ROUTERS = ("gate", "shared_expert_gate", "shared_experts_gate")


def is_router(name: str) -> bool:
    """Whether a module, or a parameter, of this name routes tokens or is part of a router."""
    return any(part in _ROUTERS or "router" in part for part in name.split("."))


def empty_model(
    hf_config: Any, dtype: torch.dtype, where: str, *, trusts_code: bool = False, kind: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns the model on meta, with real buffers, from `init_empty_weights`.

    `where` names the configuration in errors. With `trusts_code`, code of the directory may run.
    `kind`: an automatic class or a model class of transformers, None: the one that config.json
    names, if it generates text. `options` are those of `from_config`. Raises ConfigError if
    transformers has no such class, or cannot build it with these sizes.
    """
    if kind is None:
        kind = auto_class(hf_config, where, trusts_code=trusts_code)
    if hasattr(kind, "from_config"):
        make, options = kind.from_config, {**options, "trust_remote_code": trusts_code}
    else:
        make = kind._from_config
    what = f"model: no language model can be made of {hf_config.model_type!r} with the sizes of"
    # Sizes that do not go together make a constructor raise anything.
    with refusing(f"{what} {where}", Exception), init_empty_weights():
        return make(hf_config, dtype=dtype, **options)


def auto_class(
    hf_config: Any, where: str, *, trusts_code: bool = False, purpose: Purpose = "generates text"
) -> Any:
    """Returns the first of transformers' automatic classes that gives the named architecture, or
    else any. Raises ConfigError if none is for the purpose."""
    import transformers

    named = set(getattr(hf_config, "architectures", None) or ())
    kinds, found = _KINDS[purpose], []
    for table, kind in kinds.items():
        mapping = getattr(transformers, table, {})
        if type(hf_config) in mapping:
            found.append(getattr(transformers, kind))
            if named & {model.__name__ for model in _listed(mapping[type(hf_config)])}:
                return found[-1]
    if found:
        return found[0]
    own = getattr(hf_config, "auto_map", None) or {}
    coded = [getattr(transformers, kind) for kind in kinds.values() if kind in own]
    if trusts_code and coded:
        return coded[0]
    remedy = "model.trust_remote_code = true runs the code of the directory" if own else (
        _OTHER_TEXT if getattr(hf_config, "is_encoder_decoder", False) else
        "a newer transformers may have one"
    )  # fmt: skip
    raise ConfigError(
        f"model: transformers {transformers.__version__} has no class that {purpose} for "
        f"{hf_config.model_type!r} of {where}; {remedy}"
    )


def model_for_text(
    hf_config: Any, where: str, *, trusts_code: bool = False, kind: Any = None
) -> Any:
    """Returns the model on meta, its buffers included. Raises ConfigError for one whose forward
    asks for more than tokens, such as images, and for one without a head. The forward runs on meta,
    where it ends at the first value it needs. `kind` is that of `empty_model`."""
    from transformers import AutoModel

    with torch.device("meta"), torch.no_grad():
        model = empty_model(hf_config, torch.bfloat16, where, trusts_code=trusts_code, kind=kind)
        ids, refusal = torch.zeros(1, 8, dtype=torch.long, device="meta"), ""
        options = {"labels": ids, "use_cache": False}
        try:
            if scores_sequences(model):
                options = {"labels": ids[:, 0]}
            elif kind is AutoModel:
                del options["labels"]
            elif model.get_output_embeddings() is None:
                refusal = "it has no head"
            if not scores_sequences(model) and getattr(model.config, "is_encoder_decoder", False):
                refusal = _OTHER_TEXT
            model(input_ids=ids, **options)
        except Exception as error:  # Of another kind: it needs values.
            is_asking = isinstance(error, (TypeError, ValueError))
            if is_asking and not isinstance(error, ConfigError):
                refusal = refusal or str(error)
    if refusal:
        raise ConfigError(
            f"model: {type(model).__name__} of {where} does not train on text alone: {refusal}"
        )
    return model


def scores_sequences(model: Any) -> bool:
    """Whether the model is a reward model or a classifier, by its class."""
    return type(model).__name__.endswith(OF_LABELS)


def names_scorer(hf_config: Any) -> bool:
    """Whether a configuration is that of a reward model or a classifier."""
    return any(name.endswith(OF_LABELS) for name in hf_config.architectures or ())


def end_of_head(hf_config: Any) -> int | None:
    """Returns the token at which the head over sequences of a configuration reads a text, as those
    of T5 and BART do; None for one that reads elsewhere."""
    import transformers

    kinds = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(hf_config), None)
    codes = [inspect.unwrap(kind.forward).__code__ for kind in _listed(kinds) if kind is not None]
    is_read = any("eos_mask" in code.co_varnames for code in codes)
    return hf_config.eos_token_id if is_read else None


# Kinds whose positions begin behind the number of the padding token.
BEHIND_PADDING = {
    "camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
    "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


def positions_of(hf_config: Any) -> int | None:
    """Returns the longest sequence that a configuration allows, as far as its rotary embedding
    stretches it; None where it names none, or has no limit."""
    text = hf_config.get_text_config()
    found: int | None = getattr(text, "max_position_embeddings", None)
    rope: Any = getattr(text, "rope_parameters", None) or {}
    if found is None or found < 0:  # XLNet has positions without end.
        return None
    if text.model_type in BEHIND_PADDING:
        return found - (text.pad_token_id or 0) - 1
    if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return found
    with refusing("model: no length follows from rope_parameters of config.json", Exception):
        most = int(rope["factor"] * (rope.get("original_max_position_embeddings") or found))
    return max(found, most)


def _listed(classes: Any) -> tuple[Any, ...]:
    return tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)


def text_model_of(model: Any) -> Any:
    """Returns the part that turns embeddings of tokens into hidden states."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    has_blocks = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    return decoder if has_blocks else model


def embedding_of(model: Any) -> nn.Module:
    """Returns the table of tokens. Raises ConfigError for a model that has none."""
    try:
        found: nn.Module = model.get_input_embeddings()
    except NotImplementedError as error:
        raise ConfigError(f"{type(model).__name__} is no model of tokens alone: {error}") from error
    return found


def towers(model: Any) -> dict[str, nn.Module]:
    """Returns the largest modules with parameters, by name, that are neither the text model nor its
    embedding or head, and that contain none of these."""
    text = text_model_of(model)
    heads = HEADS if scores_sequences(model) else ()
    if text is model or (heads and model.config.get_text_config() is model.config):
        return {}
    ends = (embedding_of(model), model.get_output_embeddings())
    ends += tuple(getattr(model, name, None) for name in heads)
    own = {id(part) for part in (text, *ends) if part is not None}

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in own:
            return
        if name and not any(id(part) in own for part in module.modules()):
            if any(True for _ in module.parameters()):
                yield name, module
            return
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name)

    return dict(walk(model, ""))


_MLPS = ("mlp", "feedforward", "ffn", "actdense")


def mlps_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost modules, by name, whose class is named as an MLP and whose forward
    takes one tensor. Routed experts are left out, and what contains them."""
    found: dict[str, nn.Module] = {}
    within = "."
    for name, module in model.named_modules():
        if _is_routed(name) or name.startswith(within):
            continue
        is_mlp = type(module).__name__.lower().endswith(_MLPS) and _takes_one(type(module))
        if is_mlp and not any(_is_routed(part) for part, _module in module.named_modules()):
            found[name], within = module, f"{name}." if name else ""
    return found


def _is_routed(name: str) -> bool:
    return any("experts" in part and "shared" not in part for part in name.split("."))


def _takes_one(kind: type[nn.Module]) -> bool:
    _self, *parameters = inspect.signature(kind.forward).parameters.values()
    others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(parameter.kind not in others for parameter in parameters) == 1


# -- Impossible numbers of a configuration ---------------------------------------------------------
#
# transformers builds one module after the other, and lists with one entry per layer, for any number
# in the file. A number that is negative, or larger than that of any model, is refused before that.


# Counts of modules that are built one by one, under every name used by architectures.
_COUNT = re.compile(
    r"(\w+_)?(n|num)_(\w+_)?(layers?|blocks?|heads?|experts?|kv)"
    r"|(\w+_)?(layers|heads|experts)|depth"
)
# Lengths of a side of a weight.
_SIZE = re.compile(
    r"(\w+_)?(vocab|hidden|intermediate|ffn|inner)_(size|dim)|d_model|d_ff|n_embd|n_inner|d_kv"
    r"|ffn_hidden_size|(encoder|decoder)_ffn_dim|head_dim|n_positions|max_position_embeddings"
)
# Keys of these names change the size of a model.
_SIZED = re.compile(
    r"(\w+_)?(n|num)_(\w+_)?(layers?|blocks?|heads?|experts?)"
    r"|(\w+_)?(hidden|intermediate|ffn|inner)_(size|dim)|d_model|d_ff|n_embd|n_inner|head_dim"
)
_MOST_MODULES = 65_536
_MOST_LENGTH = 2**40
# A weight has a side of each of these lengths.
_SIDES = ("vocab_size", "hidden_size", "d_model", "n_embd")


def check_numbers(table: dict[str, Any], where: str) -> None:
    """Raises ConfigError that names the key of an impossible count, size, dtype or token id.
    `where` is put before the key."""
    for key, value in _leaves(table, ""):
        name = key.rpartition(".")[2]
        if name in ("dtype", "model_type") and isinstance(value, list):
            raise _impossible(f"{where}{key}", "a name", value)
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if name == "architectures" and value is not None and not is_list:
            raise _impossible(f"{where}{key}", "a list of names", value)
        if name.endswith("_token_id"):
            _check_ids(value, f"{where}{key}")
            continue
        most = _MOST_MODULES if _COUNT.fullmatch(name) else _MOST_LENGTH
        if most == _MOST_LENGTH and not _SIZE.fullmatch(name):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # None, lists and words have their own meaning, which transformers checks.
        most = MOST_TOKENS - 1 if name.endswith("vocab_size") else most
        least = 1 if name in ("num_hidden_layers", "n_layer", "n_layers", "vocab_size") else 0
        if not least <= value <= most:
            raise _impossible(f"{where}{key}", f"{least} to {most}", value)


def check_sides(table: dict[str, Any], longest: int, where: str) -> None:
    """Raises ConfigError that names a length of the configuration that no stored weight has.

    longest: the longest side of all stored weights
    """
    # Other parts, such as vision, may not be stored. Where the text has a part of its own, sides of
    # the whole are defaults of its class.
    part = "text_config." * isinstance(table.get("text_config"), dict)
    for key, value in _leaves(table, ""):
        is_side = key.startswith(part) and key.removeprefix(part) in _SIDES
        if is_side and isinstance(value, int) and value > longest:
            raise _impossible(
                f"{where}{key}", f"at most {longest}, the longest side of the stored weights", value
            )


def _check_ids(value: Any, what: str) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not -MOST_TOKENS < token < MOST_TOKENS:
            raise _impossible(what, f"an id below {MOST_TOKENS}, or a list of these", token)


def _impossible(what: str, expected: str, value: Any) -> ConfigError:
    is_long = isinstance(value, (int, float)) and abs(value) >= 10**40
    shown = "a number of more than 40 digits" if is_long else repr(value)[:80]
    return ConfigError(
        f"{what}: expected {expected}, got {shown}; correct it, or get the model's configuration "
        "again"
    )


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
