"""The model is never in memory during a merge or a quantisation."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.forked import run_script

_MIB = 1 << 20

_CHILD = """
import json, shutil, sys
from pathlib import Path
from tests.support.memory import growth_nbytes, return_large_blocks
return_large_blocks()
import peft, torch
from transformers import AutoModelForCausalLM, LlamaConfig
import infinity
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.convert.quantize import plan_quantize
from infinity.tools.training.merge import plan_merge

root = Path(sys.argv[1])
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=64, tie_word_embeddings=False,
)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5)
model.save_pretrained(root / "base", max_shard_size="100MB")
adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
adapted.save_pretrained(root / "adapter")
del model, adapted, parameter

def write(plan):
    write_directory(plan, root / "out")
    shutil.rmtree(root / "out")

def quantise():  # Of the encodings that with the most copies.
    write(plan_quantize(root / "base", "nf4"))

def merge():
    write(plan_merge(root / "base", root / "adapter"))

print(json.dumps({work.__name__: growth_nbytes(work) for work in (quantise, merge)}))
"""


def test_the_result_is_made_with_the_memory_of_one_tensor_of_many(tmp_path: Path) -> None:
    """80 MiB in matrices of at most 4 MiB; an encoding works on several copies in fp32."""
    done = run_script(_CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout.splitlines()[-1])
    assert sum(path.stat().st_size for path in tmp_path.glob("base/*.safetensors")) > 75 * _MIB
    assert max(growth.values()) < 60 * _MIB, growth
