"""Writes a saved adapter in the layout that a server reads, with its sheet: what `infinity
export-adapter` does.

PEFT packs the factors of all experts of a layer into two matrices, under the names of the model in
transformers. Servers read the names of the checkpoint, and most of them one pair of factors for
each expert. The merge knows which part of which stored tensor a factor changes; a server gets that
part under the tensor's name. What a server would drop, or read as something else, is refused by the
name of the module.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from infinity.bounded import read_json, table_of
from infinity.checkpoint.durable import new_directory, sync_file
from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError, UnsupportedError, listed, reporting
from infinity.modules.reading.configuration import is_router
from infinity.tools.convert.gguf import gguf_package
from infinity.tools.convert.rewrite import check_target
from infinity.tools.serving.sheet import NUM_PROMPTS, PROMPT_TOKENS, SHEET_NAME, Locate, make_sheet
from infinity.tools.training.adapter import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from infinity.tools.training.base_identity import IDENTITY_NAME
from infinity.tools.training.data_files import read_utf8, texts_in
from infinity.tools.training.job_data import open_data, refuse_stranger
from infinity.tools.training.merge import Change, factors_of, read_changes, variant_of
from infinity.tools.training.output import config_of_run, receipts_of_run
from infinity.tools.training.own_experts import names_in
from infinity.tools.training.settle import settle, tokenizer_of
from infinity.tools.training.tokenizers import Tokenizer, open_tokenizer

Server = Literal["peft", "vllm", "sglang", "gguf"]
GGUF_NAME = "adapter.gguf"
_SHIPPED = "prompts.txt"
_COPIED = (CONFIG_NAME, WEIGHTS_NAME, "README.md", "tokenizer*", "special_tokens_map.json",
           "chat_template*")  # fmt: skip
_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The modules that the LoRA loader of one release reads, as its source says.

    known: the last names of modules that it loads; empty means every linear layer
    needs: what else it needs in a module that has a projection, or it fails or drops that one
    packed: types of models whose experts it reads as PEFT packs them
    reads_rslora: whether it reads `use_rslora`; otherwise the scale is alpha / rank
    """

    release: str
    source: str
    known: frozenset[str] = frozenset()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()
    reads_rslora: bool = False


LOADERS = {
    "vllm": Loader(
        release="vLLM 0.33.0",
        source="vllm/lora: lora_model, model_manager, lora_weights, peft_helper; commit 4ba787ec9",
        # Of experts only: `PackedLoRALayerWeights.pack_moe`.
        needs={
            "experts.gate_proj": ("up_proj", "down_proj"), "experts.down_proj": ("gate_proj",),
            "experts.w1": ("w2", "w3"), "experts.w2": ("w1",),
        },
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
    "gguf": Loader(
        release="llama.cpp b11434",
        source="src/llama-adapter, convert_lora_to_gguf.py, conversion/{llama,qwen,gemma}.py",
    ),
}  # fmt: skip
# The architecture in GGUF by the type of model. llama.cpp's converter changes no layout of these
# but the order of the rows of q_proj and k_proj, where True stands.
_ARCHITECTURES = {
    "llama": ("llama", True), "mistral": ("llama", True), "mixtral": ("llama", True),
    "qwen2": ("qwen2", False), "qwen2_moe": ("qwen2moe", False),
    "qwen3": ("qwen3", False), "qwen3_moe": ("qwen3moe", False),
    "gemma": ("gemma", False), "gemma2": ("gemma2", False), "gemma3_text": ("gemma3", False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Factors:
    """A, (rank, in), and B, (out, rank), of a stored matrix; or those of all experts of a packed
    tensor, as PEFT packs them."""

    a: torch.Tensor
    b: torch.Tensor
    is_packed: bool = False


def write_passport(
    adapter: Path,
    base: Path,
    out: Path,
    server: Server,
    *,
    any_base: bool = False,
    prompts: Path | None = None,
    locate: Locate | None = "layers",
    config: Path | None = None,
    progress: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """Writes `out`, whole or not at all, and returns what it is in words and numbers.

    locate: what the sheet tells apart; None leaves the sheet out
    config: a file with the tiers in which the sheet is computed; by default those of the run whose
        output directory `adapter` is

    Raises ConfigError for an adapter of another base, an `out` that is there already, and prompts
    that cannot be read; UnsupportedError for what the server does not load; StorageError.
    """
    if names_in(adapter):
        raise UnsupportedError(
            f"{adapter} has experts that are trained in full, which servers do not load with an "
            f"adapter; merge them: infinity merge {base} {adapter} -o DIR"
        )
    check_target(out, 2 * (adapter / WEIGHTS_NAME).stat().st_size)
    run = config_of_run(adapter)
    tiers = SwapConfig.load(config) if config is not None else run
    source, adapted, changes, _ = read_changes(base, adapter, any_base=any_base, is_merged=False)
    write = plan_export(adapter, adapted, changes, server)
    said: dict[str, Any] = {"directory": str(out), "for": "PEFT"}
    if server != "peft":
        said["for"] = LOADERS[server].release
    rows: list[list[int]] = []
    receipts = receipts_of_run(adapter) if run is not None else []
    if locate is not None:
        vocab_size = adapted.get_base_model().config.get_text_config().vocab_size
        rows, said["data"] = _read_prompts(prompts, run, base, vocab_size)
    with new_directory(out.absolute()) as partial:
        with reporting("write", out):
            write(partial)
            if (adapter / IDENTITY_NAME).is_file():
                shutil.copyfile(adapter / IDENTITY_NAME, partial / IDENTITY_NAME)
        if locate is not None:
            data = {"data": str(receipts[-1]["tokens_sha256"])} if receipts else {}
            sheet = make_sheet(
                adapter, source, adapted, rows, data=data, config=tiers, locate=locate,
                progress=progress,
            )  # fmt: skip
            said |= {"prompts": len(rows), "faults": len(sheet.faults)}
            said["sheet"] = str(out / SHEET_NAME)
            with reporting("write", out):
                sheet.write(partial / SHEET_NAME)
        with reporting("write", out):
            for file in partial.iterdir():
                sync_file(file)
    return said


def plan_export(
    adapter: Path, adapted: Any, changes: dict[str, list[Change]], server: Server
) -> Callable[[Path], object]:
    """Refuses what a server does not read, and returns the function that writes the rest into a
    directory.

    adapted, changes: of the saved adapter, as `read_changes` gives them; the function reads the
        adapter's parameters, so call it before the model is offloaded

    Raises UnsupportedError, which names the modules.
    """
    if server == "peft":
        files = sorted({file for pattern in _COPIED for file in adapter.glob(pattern)})
        return lambda out: [shutil.copyfile(file, out / file.name) for file in files]
    loader = LOADERS[server]
    config = table_of(read_json(adapter / CONFIG_NAME), CONFIG_NAME)
    refused: dict[str, list[str]] = {}
    factors = {}
    for stored, parts in changes.items():
        name = stored.removesuffix(".weight")
        why = _why_not(name, parts, config, loader, adapted)
        if why is None:
            factors[name] = _factors(parts[0])
        else:
            refused.setdefault(why, []).append(name)
    for name in factors:
        parent, _, last = name.rpartition(".")
        needed = loader.needs.get(last, ())
        if _EXPERT.search(name):
            needed = loader.needs.get(f"experts.{last}", needed)
        lacking = [other for other in needed if f"{parent}.{other}" not in factors]
        if lacking:
            refused.setdefault(f"it needs {listed(lacking)} with it", []).append(name)
    # The alpha whose quotient by the rank is the scale.
    alpha = float(
        config["lora_alpha"] * (math.sqrt(config["r"]) if config.get("use_rslora") else 1)
    )
    if server == "gguf":
        write = _plan_gguf(adapted.get_base_model().config, factors, alpha, loader, refused)
    else:
        write = _plan_safetensors(config, factors, alpha, loader, refused)
    if refused:
        reasons = "; ".join(f"{listed(names)}: {why}" for why, names in refused.items())
        raise UnsupportedError(
            f"{loader.release} does not load this adapter as it was trained ({reasons}). "
            "`infinity merge` writes weights that every server loads"
        )
    return write


# -- What a server does not read -------------------------------------------------------------------


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
    if layer.r["default"] != config["r"] or layer.lora_alpha["default"] != config["lora_alpha"]:
        return "rank_pattern or alpha_pattern gives it another rank or scale"
    model_type = adapted.get_base_model().config.model_type
    if isinstance(layer, ParamWrapper) and not isinstance(placed.box[0], int):
        is_read = model_type in loader.packed and parts[0].is_full
        return None if is_read else f"experts are packed in the files of a {model_type}"
    if isinstance(layer, ParamWrapper) and model_type in loader.packed:
        return f"experts of a {model_type} are read packed, and the files have them one by one"
    if loader.known and last not in loader.known:
        return "it has no place there"
    is_turned = isinstance(layer, ParamWrapper) and not layer._did_swap_in_out_features  # noqa: SLF001
    return None if placed.axes == ((1, 0) if is_turned else (0, 1)) else "it is stored transposed"


def _factors(change: Change) -> _Factors:
    first, *box = change.placed.box
    if isinstance(first, int):
        a, b = factors_of(change.layer, first)
        is_turned = not change.layer._did_swap_in_out_features  # noqa: SLF001  (in, out)
        rows, columns = reversed(box) if is_turned else box
        return _Factors(a[:, columns], b[rows])
    a, b = factors_of(change.layer)
    if len(box) > 1:
        return _Factors(a, b, is_packed=True)
    return _Factors(a, b) if change.is_full else _Factors(a[:, box[0]], b[first])


# -- vLLM and SGLang -------------------------------------------------------------------------------


def _plan_safetensors(
    saved: dict[str, Any],
    found: dict[str, _Factors],
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


# -- llama.cpp -------------------------------------------------------------------------------------


def _plan_gguf(
    config: Any,
    saved: dict[str, _Factors],
    alpha: float,
    loader: Loader,
    refused: dict[str, list[str]],
) -> Callable[[Path], None]:
    """The layout of convert_lora_to_gguf.py: the experts of a layer stacked, names of gguf."""
    gguf = gguf_package()
    if config.model_type not in _ARCHITECTURES:
        raise UnsupportedError(
            f"an adapter of a {config.model_type} is not written as GGUF, because {loader.release} "
            f"stores its weights in another layout; expected {', '.join(_ARCHITECTURES)}. Use "
            "llama.cpp's convert_lora_to_gguf.py, or `infinity merge`"
        )
    architecture, is_turned = _ARCHITECTURES[config.model_type]
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    found: dict[str, list[_Factors]] = {}
    for name, factors in saved.items():
        target = names.get_name(_EXPERT.sub("", name))
        if target is None:
            refused.setdefault("gguf has no name for it", []).append(name)
            continue
        if is_turned and name.endswith((".q_proj", ".k_proj")):
            is_query = name.endswith(".q_proj")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            # llama.cpp rotates the two halves of each head interleaved.
            b = factors.b.reshape(heads, 2, -1, factors.b.shape[-1]).transpose(1, 2)
            factors = _Factors(factors.a, b.reshape(factors.b.shape))
        found.setdefault(target, []).append(factors)

    def write(out: Path) -> None:
        writer = gguf.GGUFWriter(out / GGUF_NAME, architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        for target, experts in found.items():
            for suffix, sides in (("a", [e.a for e in experts]), ("b", [e.b for e in experts])):
                side = torch.stack(sides) if len(sides) > 1 else sides[0]
                writer.add_tensor(f"{target}.weight.lora_{suffix}", side.float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


# -- Prompts ---------------------------------------------------------------------------------------


def _read_prompts(
    file: Path | None, run: JobConfig | None, base: Path, vocab_size: int
) -> tuple[list[list[int]], str]:
    """Returns the token ids of at most 64 prompts, each of 2 to 64 tokens, and where they are from.

    Raises ConfigError for a file without a prompt, and for tokens that the model does not have.
    """
    settled = settle(run) if run is not None else None
    which = settled.data.tokenizer if settled else tokenizer_of(base).value
    tokenizer = open_tokenizer(which)
    rows: list[list[int]] = []
    if file is not None:
        text, source = b"".join(read_utf8(file)).decode(), str(file)
    else:
        shipped = resources.files("infinity.tools.serving") / _SHIPPED
        text, source = shipped.read_text(encoding="utf-8"), "shipped sentences"
        if settled is not None:
            rows = _rows_of(settled, tokenizer, vocab_size)
            source = "the training data" + f" and {source}" * (len(rows) < NUM_PROMPTS)
    rows += [tokenizer.encode(line) for line in text.splitlines() if line.strip()]
    prompts = [row[:PROMPT_TOKENS] for row in rows if len(row) > 1][:NUM_PROMPTS]
    if not prompts:
        raise ConfigError(f"{source}: no prompt has two tokens; expected one text a line")
    refuse_stranger(max(map(max, prompts)), tokenizer, vocab_size, source)
    return prompts, source


def _rows_of(run: JobConfig, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    with ExitStack() as stack:
        data = open_data(run, tokenizer, stack, vocab_size=vocab_size)
        rows = [data.train[index] for index in range(min(NUM_PROMPTS, len(data.train)))]
    return [
        list(map(int, row["input_ids"])) if "input_ids" in row
        else tokenizer.encode("\n".join(texts_in(row, but="role")))
        for row in rows
    ]  # fmt: skip
