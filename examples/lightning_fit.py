"""Lightning's Trainer."""

import lightning
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import infinity

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}


class Task(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(batch, labels=batch).loss

    def configure_optimizers(self):
        return infinity.AdamW(self.model, lr=1e-3, max_grad_norm=1.0)


model = infinity.from_pretrained("model", SWAP)
with open("text.txt") as file:
    tokens = AutoTokenizer.from_pretrained("model")(file.read(), return_tensors="pt").input_ids[0]
trainer = lightning.Trainer(max_steps=8, devices=1, enable_checkpointing=False, logger=False)
trainer.fit(Task(model), DataLoader(tokens.split(64)[:-1], batch_size=4))
infinity.checkpoint.export_safetensors(model, "out")
