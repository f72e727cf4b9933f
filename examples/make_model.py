"""Makes a small model with a tokenizer, and a text, for the programs in this folder.

    cd examples
    python make_model.py        # writes the directory "model", and "text.txt"
    python sft.py               # or another program

The model is a Llama with random weights; a token is a byte. In the programs, put your own model's
directory in the place of "model".
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(directory: str = "model", width: int = 128, layers: int = 4) -> Path:
    """Writes the directory and returns its path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    words.save_pretrained(directory)
    return Path(directory)


def write_text(path: str = "text.txt") -> Path:
    """Writes some text to learn and returns its path."""
    lines = [f"The square of {number} is {number**2}.\n" for number in range(80)]
    Path(path).write_text("".join(lines))
    return Path(path)


if __name__ == "__main__":
    print(f"wrote {make()} and {write_text()}")
