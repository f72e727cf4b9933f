"""An adapter of PEFT's in a loop of your own: the base stays in its files, read where they lie."""

from peft import LoraConfig
from transformers import AutoTokenizer

import infinity

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
model = infinity.from_pretrained("model", SWAP, adapter)

tokenizer = AutoTokenizer.from_pretrained("model")
with open("text.txt") as file:
    tokens = tokenizer(file.read(), return_tensors="pt").input_ids
optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
for batch in tokens[:, : 512 * (tokens.numel() // 512)].view(-1, 8, 64):
    infinity.forward_backward(  # The eight sequences pass each block together.
        model, lambda ids: model(ids, labels=ids).loss / 8, batch.split(1)
    )
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("out")  # The adapter alone.
