"""Makes the checkpoint of examples/lora-moe.toml: a random mixture of experts, in INT4.

    python examples/make_moe.py        # writes examples/run/moe, 74 MB
    infinity train examples/lora-moe.toml

The architecture is Qwen3-MoE's; a token is a byte. The layout is that of Kimi-K2-Thinking. What the
base answers to the file's prompt is printed: the text before training.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import infinity
from infinity.config import SwapConfig
from infinity.sizes import format_nbytes
from infinity.tools.convert.quantize import plan_quantize
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.training.model import generate
from infinity.tools.training.tokenizers import ByteTokenizer

RECIPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.04,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def main() -> None:
    own = Path(__file__).parent
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Makes the model of examples/lora-moe.toml.")
    parser.add_argument("--output", "-o", type=Path, default=own / "run" / "moe", metavar="OUT")
    parser.add_argument("--config", type=Path, default=own / "lora-moe.toml", metavar="FILE")
    parser.add_argument("--layers", type=int, default=RECIPE["num_hidden_layers"])
    parser.add_argument("--experts", type=int, default=RECIPE["num_experts"])
    arguments = parser.parse_args()
    if not arguments.output.exists():
        make({"num_hidden_layers": arguments.layers, "num_experts": arguments.experts}, arguments)
    show(arguments.output, SwapConfig.load(arguments.config))


def make(changes: dict[str, int], arguments: argparse.Namespace) -> None:
    """Draws the model, saves it in bfloat16, and quantises the directory."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**RECIPE, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    (arguments.config.parent / "run").mkdir(exist_ok=True)  # What the file's paths begin with.
    scratch = Path(tempfile.mkdtemp(dir=arguments.output.parent))
    try:
        model.save_pretrained(scratch / "bf16")
        plan = plan_quantize(scratch / "bf16", "int4")
        write_directory(plan, arguments.output)
    finally:
        shutil.rmtree(scratch)
    print(
        f"wrote {arguments.output}: {model.num_parameters() / 1e6:.0f} million parameters, "
        f"{format_nbytes(plan.nbytes)} in INT4"
    )


def show(path: Path, config: SwapConfig) -> None:
    """Prints what the base writes after the prompt, read in place from its files."""
    sample = config.train.sample if config.train else None
    if sample is None:
        return
    with infinity.init_empty_weights(config):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.bfloat16
        )
    model.requires_grad_(False)
    infinity.offload(model, config, weights=path)
    try:
        tokens = ByteTokenizer()
        torch.manual_seed(0)
        ids = generate(
            model, tokens.encode(sample.prompt), num_tokens=sample.new_tokens,
            temperature=sample.temperature, top_k=sample.top_k or 0,
        )  # fmt: skip
        print(f"before training:\n{tokens.decode(ids)}")
    finally:
        infinity.engine_of(model).close()


if __name__ == "__main__":
    main()
