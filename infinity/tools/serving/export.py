"""Writes a saved adapter in the layout that a server reads, with its sheet: what `infinity
export-adapter` does.

The layouts are those of `integrations/server_layouts`, and the GGUF of llama.cpp.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from infinity.checkpoint.durable import new_directory, sync_file
from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError, UnsupportedError, reporting
from infinity.integrations.server_layouts import (
    CONFIG_NAME,
    EXPERT,
    LOADERS,
    WEIGHTS_NAME,
    Change,
    Factors,
    Loader,
    plan_layout,
)
from infinity.tools.convert.gguf import gguf_package
from infinity.tools.convert.rewrite import check_target
from infinity.tools.serving.sheet import NUM_PROMPTS, PROMPT_TOKENS, SHEET_NAME, Locate, make_sheet
from infinity.tools.training.base_identity import IDENTITY_NAME
from infinity.tools.training.data_files import read_utf8, texts_in
from infinity.tools.training.job_data import open_data, refuse_stranger
from infinity.tools.training.merge import read_changes
from infinity.tools.training.output import config_of_run, receipts_of_run
from infinity.tools.training.own_experts import names_in
from infinity.tools.training.settle import settle, tokenizer_of
from infinity.tools.training.tokenizers import open_tokenizer

Server = Literal["peft", "vllm", "sglang", "gguf"]
GGUF_NAME = "adapter.gguf"
_SHIPPED = "prompts.txt"
_COPIED = (CONFIG_NAME, WEIGHTS_NAME, "README.md", "tokenizer*", "special_tokens_map.json",
           "chat_template*")  # fmt: skip
_LOADERS = {
    **LOADERS,
    "gguf": Loader(
        release="llama.cpp b11434",
        source="src/llama-adapter, convert_lora_to_gguf.py, conversion/{llama,qwen,gemma}.py",
    ),
}
# The architecture in GGUF by the type of model. llama.cpp's converter changes no layout of these
# but the order of the rows of q_proj and k_proj, where True stands.
_ARCHITECTURES = {
    "llama": ("llama", True), "mistral": ("llama", True), "mixtral": ("llama", True),
    "qwen2": ("qwen2", False), "qwen2_moe": ("qwen2moe", False),
    "qwen3": ("qwen3", False), "qwen3_moe": ("qwen3moe", False),
    "gemma": ("gemma", False), "gemma2": ("gemma2", False), "gemma3_text": ("gemma3", False),
}  # fmt: skip


def write_passport(
    adapter: Path, base: Path, out: Path, server: Server, *, any_base: bool = False,
    prompts: Path | None = None, locate: Locate | None = "layers", config: Path | None = None,
    progress: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:  # fmt: skip
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
        said["for"] = _LOADERS[server].release
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
    """Returns the function that writes a saved adapter into a directory, for a server.

    adapted, changes: of the adapter, as `read_changes` gives them

    Raises UnsupportedError as `plan_layout`.
    """
    if server == "peft":
        files = sorted({file for pattern in _COPIED for file in adapter.glob(pattern)})
        return lambda out: [shutil.copyfile(file, out / file.name) for file in files]
    lay_out = None
    if server == "gguf":
        lay_out = partial(_plan_gguf, adapted.get_base_model().config)
    return plan_layout(_LOADERS[server], adapter, adapted, changes, lay_out)


# -- llama.cpp -------------------------------------------------------------------------------------


def _plan_gguf(
    config: Any,
    _saved: dict[str, Any],
    factors_of: dict[str, Factors],
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
    found: dict[str, list[Factors]] = {}
    for name, factors in factors_of.items():
        target = names.get_name(EXPERT.sub("", name))
        if target is None:
            refused.setdefault("gguf has no name for it", []).append(name)
            continue
        if is_turned and name.endswith((".q_proj", ".k_proj")):
            is_query = name.endswith(".q_proj")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            # llama.cpp rotates the two halves of each head interleaved.
            b = factors.b.reshape(heads, 2, -1, factors.b.shape[-1]).transpose(1, 2)
            factors = Factors(factors.a, b.reshape(factors.b.shape))
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
            with ExitStack() as stack:
                learned = open_data(settled, tokenizer, stack, vocab_size=vocab_size).train
                read = [learned[index] for index in range(min(NUM_PROMPTS, len(learned)))]
            rows = [
                list(map(int, row["input_ids"])) if "input_ids" in row
                else tokenizer.encode("\n".join(texts_in(row, but="role")))
                for row in read
            ]  # fmt: skip
            source = "the training data" + f" and {source}" * (len(rows) < NUM_PROMPTS)
    rows += [tokenizer.encode(line) for line in text.splitlines() if line.strip()]
    prompts = [row[:PROMPT_TOKENS] for row in rows if len(row) > 1][:NUM_PROMPTS]
    if not prompts:
        raise ConfigError(f"{source}: no prompt has two tokens; expected one text a line")
    refuse_stranger(max(map(max, prompts)), tokenizer, vocab_size, source)
    return prompts, source
