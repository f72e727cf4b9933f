"""A loop of your own, by accelerate."""

from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import infinity
from infinity.integrations.hf import prepare_accelerator

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
model = infinity.from_pretrained("model", SWAP)

tokenizer = AutoTokenizer.from_pretrained("model")
with open("text.txt") as file:
    tokens = tokenizer(file.read(), return_tensors="pt").input_ids[0]
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer = prepare_accelerator(accelerator, model, infinity.AdamW(model, lr=1e-3))
loader = accelerator.prepare(DataLoader(tokens.split(64)[:-1], batch_size=4))
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
infinity.checkpoint.export_safetensors(model, "out")
