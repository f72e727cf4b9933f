"""The class of a configuration of transformers that generates text, built without memory.

The class is the one that config.json names. A model of text and images has parts beside its text
model (towers): vision, audio, and projections. Training on text freezes them. They stay in their
files, and no pass reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.reading.empty_weights import init_empty_weights

# Tables of transformers' classes, and the automatic class of each.
_KINDS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "AutoModelForCausalLM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING": "AutoModelForImageTextToText",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING": "AutoModelForMultimodalLM",
}


def empty_model(
    hf_config: Any, dtype: torch.dtype, where: str, *, trusts_code: bool = False
) -> Any:
    """Returns the model on meta, with real buffers, from `init_empty_weights`.

    `where` names the configuration in errors. With `trusts_code`, code of the directory may run.
    Raises ConfigError if transformers has no class that generates text, or cannot build it with
    these sizes.
    """
    kind = auto_class(hf_config, where, trusts_code=trusts_code)
    try:
        with init_empty_weights():
            return kind.from_config(hf_config, dtype=dtype, trust_remote_code=trusts_code)
    except Exception as error:  # Sizes that do not go together make a constructor raise anything.
        raise ConfigError(
            f"model: no language model can be made of {hf_config.model_type!r} with the sizes of "
            f"{where}: {str(error) or type(error).__name__}"
        ) from error


def auto_class(hf_config: Any, where: str, *, trusts_code: bool = False) -> Any:
    """Returns the first of transformers' automatic classes that gives the named architecture, or
    else any. Raises ConfigError if none generates text."""
    import transformers

    named = set(getattr(hf_config, "architectures", None) or ())
    found = []
    for table, kind in _KINDS.items():
        mapping = getattr(transformers, table, {})
        if type(hf_config) in mapping:
            found.append(getattr(transformers, kind))
            if named & {model.__name__ for model in _listed(mapping[type(hf_config)])}:
                return found[-1]
    if found:
        return found[0]
    own = getattr(hf_config, "auto_map", None) or {}
    coded = [getattr(transformers, kind) for kind in _KINDS.values() if kind in own]
    if trusts_code and coded:
        return coded[0]
    remedy = "model.trust_remote_code = true runs the code of the directory" if own else (
        "a newer transformers may have one"
    )  # fmt: skip
    raise ConfigError(
        f"model: transformers {transformers.__version__} has no class that generates text for "
        f"{hf_config.model_type!r} of {where}; {remedy}"
    )


def _listed(classes: Any) -> tuple[Any, ...]:
    return tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)


def text_model_of(model: Any) -> Any:
    """Returns the part that turns embeddings of tokens into hidden states."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    has_blocks = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    return decoder if has_blocks else model


def towers(model: Any) -> dict[str, nn.Module]:
    """Returns the largest modules with parameters, by name, that are neither the text model nor its
    embedding or head, and that contain none of these."""
    text = text_model_of(model)
    if text is model:
        return {}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
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
