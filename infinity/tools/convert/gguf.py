"""A directory made of a GGUF file, whose quantised blocks stay as they are, to the byte.

Names, configuration and tokenizer are those of transformers' own reader of GGUF, which uses the
tables of the gguf package. That reader decodes every tensor into memory; here a tensor of blocks is
moved by whole rows, so its bits are those that the file has. llama.cpp turns some tensors for its
own kernels, and transformers turns them back; whatever is not a move of whole rows is refused for
blocks and done for numbers.

Source of the layout: docs/gguf.md of ggml; `transformers.modeling_gguf_pytorch_utils`.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.bounded import MalformedError, read_json, table_of
from infinity.checkpoint.huggingface.names import export_groups, planned_targets
from infinity.checkpoint.huggingface.weight_tensors import SINGLE_NAME
from infinity.codecs.affine import ggml
from infinity.codecs.records import RECORDS
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError, corrupt, listed, refusing
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor, as_numbers

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
# Types without a codec, which gguf's own reader decodes. They become bfloat16.
_DECODED = (
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
)  # fmt: skip
# Files of the original model that are taken where they lie beside the GGUF file.
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*",
    "generation_config.json", "LICENSE*",
)  # fmt: skip
# What decides values, and for most architectures transformers reads from config.json only.
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNREAD = ("rope.scaling.type", "rope.scaling.factor", "attention.sliding_window")
# A file has no scale of attention. llama.cpp tells by the layers whether a Gemma is one of 27B,
# whose scale is that of hidden_size / heads; the others have that of a head. Source:
# `f_attention_scale` in llama.cpp.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def gguf_package() -> Any:
    """Returns the gguf package. Raises ConfigError without it."""
    with refusing("GGUF files need pip install 'infinity-offload[gguf]'", ImportError):
        import gguf
    return gguf


class GgufSource:
    """The files of one model, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file of a split that is not there, and without the gguf package;
        CorruptionError for a file that it cannot read."""
        reader_of = gguf_package().GGUFReader
        self.path = path
        self.files = _files_of(path)
        # Of each file gguf's own: `data` is mapped, rows of numbers or of bytes of blocks.
        self.tensors: list[dict[str, Any]] = []
        self.architecture = ""
        self.values: dict[str, Any] = {}  # Those of _UNREAD that the first file has, by its keys.
        for file in self.files:
            try:
                reader: Any = reader_of(file)
                if not self.architecture:
                    self.architecture = str(reader.fields["general.architecture"].contents())
                    for name in (f"{self.architecture}.{key}" for key in _UNREAD):
                        if name in reader.fields:
                            self.values[name] = reader.fields[name].contents()
            except (ValueError, KeyError, IndexError, OverflowError) as error:
                raise corrupt(
                    str(file), f"it cannot be read as GGUF ({error}); download it again"
                ) from None
            self.tensors.append({tensor.name: tensor for tensor in reader.tensors})

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.data.nbytes for file in self.tensors for stored in file.values())


def _files_of(path: Path) -> list[Path]:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; expected a .gguf file, the first one of a split")
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    names = [f"{split['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ConfigError(f"{path.parent} has no {listed(missing)}, parts of the same model")
    return [path.parent / name for name in names]


def plan_gguf(path: Path, say: Callable[[str], None]) -> DirectoryPlan:
    """Plans a directory from the headers of a GGUF file or split. Decodes no tensor.

    say: takes a line about what the result lacks

    config.json and the tokenizer beside the file are taken, where they are there; else those that
    the file describes. Raises ConfigError for an architecture that transformers does not read from
    GGUF, for a type of blocks without a codec, and for blocks that would have to be changed.
    """
    source = GgufSource(path)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-gguf-"))
        plan = _plan(source, Path(scratch), say)
        plan.close = stack.pop_all().close
        return plan


def _plan(source: GgufSource, scratch: Path, say: Callable[[str], None]) -> DirectoryPlan:
    stored = {name: one for file in source.tensors for name, one in file.items()}
    model, processor = _model_of(source, is_tied="output.weight" not in stored)
    config = {**_config_of(source, model.config), "quantization_config": {"quant_method": "gguf"}}
    others = _tokenizer_files(source, scratch)
    plan = DirectoryPlan(source.path, source.nbytes, config, others=others)
    targets = _targets(source, model, processor, stored)
    if unread := _unread(source, stored.keys() - targets.keys()):
        say(
            f"{source.path.name}: {listed(unread)} have no place in the described model, whose "
            f"config.json may have rope_scaling, biases or such: {_remedy(source)}"
        )
    parts: dict[str, list[Any]] = {}
    for name, target in targets.items():
        parts.setdefault(target, []).append(stored[name])
    expected = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = [name for name in expected if name not in parts and name not in tied]
    if missing:
        raise ConfigError(f"{source.path} has no tensor for {listed(missing)}: {_remedy(source)}")
    file_of = {name: index for index, file in enumerate(source.tensors) for name in file}
    wide = list[str]()
    for target, tensors in parts.items():
        tensors.sort(key=lambda tensor: "ffn_up_" in tensor.name)  # Behind ffn_gate_.
        shape, count = tuple(expected[target].shape), len(source.files)
        if (numel := sum(int(tensor.n_elements) for tensor in tensors)) != math.prod(shape):
            raise ConfigError(
                f"{tensors[0].name!r} has {numel:,} elements, and {target} of the described model "
                f"{math.prod(shape):,} {shape}: {_remedy(source)}"
            )
        places = {target: shape}
        if tensors[0].data.ndim > 2:
            places = _published(model, target, expected[target])
        rows = [
            (tensor, data)
            for tensor in tensors
            for data in (tensor.data if len(places) > 1 else [tensor.data])
        ]
        if len(rows) != len(places):
            raise ConfigError(f"{source.path}: the experts of {target} are not laid out as in GGUF")
        for (name, size), (tensor, data) in zip(places.items(), rows, strict=True):
            shard = SINGLE_NAME
            if count > 1:
                shard = f"model-{file_of[tensor.name] + 1:05}-of-{count:05}.safetensors"
            plan.add(shard, name, _planned(name, size, tensor, data, processor))
        wide += [target] * any(tensor.tensor_type.name in _DECODED for tensor in tensors)
    if wide:
        say(f"{listed(wide)} become bfloat16: there is no codec for {', '.join(_DECODED)}")
    return plan


def _unread(source: GgufSource, names: Set[str]) -> list[str]:
    """Returns keys and tensors that the model has not taken, among `names` those without a place.
    A config.json beside the file has what stands in keys."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    if _beside(source) is not None:
        return sorted(names - {*_ROPE_FACTORS})
    mapping: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    known = mapping.get(source.architecture, {})
    keys = [key for key, value in source.values.items() if value and value != "none"]
    return [key for key in keys if key.partition(".")[2] not in known] + sorted(names)


def _beside(source: GgufSource) -> dict[str, Any] | None:
    """Returns the config.json of the original model; None without one, or for the line with the
    type alone that some repositories of GGUF files have."""
    path = source.path.parent / "config.json"
    if not path.is_file():
        return None
    try:
        table = table_of(read_json(path), "it")
    except MalformedError as error:
        raise corrupt(str(path), str(error)) from None
    return table if table.keys() - {"model_type"} else None


def _remedy(source: GgufSource) -> str:
    if _beside(source) is None:
        return "put the config.json of the original model beside the file"
    return f"is {source.path.parent / 'config.json'} that of the original model?"


def _config_of(source: GgufSource, found: Any) -> dict[str, Any]:
    table = _beside(source)
    if table is None or table.get("model_type") != found.model_type:  # That of a part.
        return {**found.to_diff_dict(), "dtype": "bfloat16"}
    table.setdefault("dtype", table.get("torch_dtype") or "bfloat16")
    return {key: value for key, value in table.items() if key != "quantization_config"}


def _model_of(source: GgufSource, *, is_tied: bool) -> tuple[Any, Any]:
    """Returns (the model on meta, the processor of its tensors). A GGUF file of a model with images
    has the text's part."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        TENSOR_PROCESSORS,
        TensorProcessor,
    )

    first = source.files[0]
    known = {re.sub("[-_]", "", name) for name in GGUF_SUPPORTED_ARCHITECTURES}
    if re.sub("[-_]", "", source.architecture) not in known:
        raise ConfigError(
            f"{first}: transformers does not read {source.architecture!r} from GGUF, so nothing "
            "says which of its tensors llama.cpp has changed; use the safetensors of the model"
        )
    beside = _beside(source)
    with refusing(
        f"{first}: transformers reads no model from it", Exception, remedy=f"; {_remedy(source)}"
    ):
        where = {} if beside is not None else {"gguf_file": first.name}
        config = AutoConfig.from_pretrained(first.parent, **where).get_text_config()
        if beside is None:
            config.tie_word_embeddings = is_tied  # The reader sees the first file of a split.
            if source.architecture in _LAYERS_OF_27B:
                is_27b = config.num_hidden_layers == _LAYERS_OF_27B[source.architecture]
                width = config.hidden_size // config.num_attention_heads
                config.query_pre_attn_scalar = width if is_27b else config.head_dim
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(source.architecture, TensorProcessor)
    config.architectures = [type(model).__name__]
    return model, processor(config=config.to_dict())  # type: ignore[no-untyped-call]


def _tokenizer_files(source: GgufSource, scratch: Path) -> tuple[Path, ...]:
    from transformers import AutoTokenizer

    directory = source.path.parent
    beside = {path for pattern in _BESIDE for path in directory.glob(pattern) if path.is_file()}
    if any(path.name.startswith(("tokenizer.json", "tokenizer.model")) for path in beside):
        return tuple(sorted(beside))
    what = f"{source.path}: transformers makes no tokenizer of it"
    remedy = "; put the files of the original model's tokenizer beside it"
    with refusing(what, Exception, remedy=remedy):
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=source.files[0].name)
    tokenizer.save_pretrained(scratch)
    made = {path.name: path for path in scratch.iterdir()}
    return tuple(({path.name: path for path in beside} | made).values())


def _targets(
    source: GgufSource, model: Any, processor: Any, stored: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the name in the model of each tensor that the model has a place for."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # transformers asks for all names of the architecture once for each module: for 41 s of a model
    # of 62 layers.
    make_names = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(make_names)
    try:
        # By the architecture of the file: that of a Mistral is Llama's.
        known = get_gguf_hf_weights_map(model, processor, source.architecture)
    finally:
        gguf.get_tensor_name_map = make_names
    if source.architecture == "llama":  # Mixtral, whose reader would take it for a Llama.
        for name, target in [*known.items()]:
            if name.endswith("ffn_down_exps"):
                packed = target.replace("down_proj", "gate_up_proj")
                known |= {name.replace("down", half): packed for half in ("gate", "up")}
    found = {name: known.get(name, known.get(name.removesuffix(".weight"))) for name in stored}
    return {name: target for name, target in found.items() if target is not None}


def _published(model: Any, target: str, stacked: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes under which experts are published, all first parts before all
    second ones."""
    (group,) = export_groups(model, [target])
    made = planned_targets(group, {target: (tuple(stacked.shape), stacked.dtype)}, model)
    return {name: shape for name, (shape, _) in made.items()}


def _planned(
    name: str, shape: tuple[int, ...], tensor: Any, data: np.ndarray[Any, Any], processor: Any
) -> PlannedTensor:
    """Plans `data`, a tensor or one of its experts."""
    kind = tensor.tensor_type.name
    if kind in FLOAT_DTYPES or kind in _DECODED:
        dtype = FLOAT_DTYPES.get(kind, torch.bfloat16)
        return as_numbers(
            name, shape, dtype, lambda: _numbers(tensor, data, processor).to(dtype).view(shape)
        )
    if kind not in RECORDS:
        raise ConfigError(
            f"{tensor.name!r} is {kind}, for which there is no codec; codecs exist for "
            f"{', '.join(RECORDS)}, and {', '.join(_DECODED)} become numbers. Use a file in these"
        )
    order = _order_of_rows(tensor, data, processor)
    (part,) = ggml(kind).parts(shape)

    def make() -> torch.Tensor:
        moved = data if order is None else data[order]
        return torch.from_numpy(np.array(moved)).view(part.shape)

    return as_numbers(f"{name}{part.suffix}", part.shape, torch.uint8, make)


def _numbers(tensor: Any, data: np.ndarray[Any, Any], processor: Any) -> torch.Tensor:
    """Returns numbers as transformers has them."""
    from gguf import dequantize

    numbers = _turned(processor, dequantize(data, tensor.tensor_type), tensor.name)
    return torch.from_numpy(np.array(numbers, order="C"))


def _order_of_rows(
    tensor: Any, data: np.ndarray[Any, Any], processor: Any
) -> np.ndarray[Any, Any] | None:
    """Returns the order in which the model has the rows of a tensor; None for that of the file.

    Raises ConfigError if more than rows would have to move.
    """
    rows = data.shape[0]
    marked = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    turned = _turned(processor, marked.copy(), tensor.name)
    if turned is None or turned.shape != marked.shape:
        raise _changed(tensor)
    order = (turned[:, 0] // 2).astype(np.int64)
    if not np.array_equal(marked[order.clip(0, rows - 1)], turned):
        raise _changed(tensor)
    return None if np.array_equal(order, np.arange(rows)) else order


def _turned(processor: Any, numbers: np.ndarray[Any, Any], name: str) -> Any:
    # That of GPT-2 puts a head aside.
    return processor.process(numbers, name, parsed_parameters={"tensors": {}}).weights


def _changed(tensor: Any) -> ConfigError:
    return ConfigError(
        f"{tensor.name!r} is {tensor.tensor_type.name}, and transformers changes more in it than "
        "the order of rows; use a file that has it in F16 or BF16"
    )
