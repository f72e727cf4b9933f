"""Instruction tuning on conversations, by TRL's SFTTrainer."""

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = SFTConfig(
    "out",
    max_steps=8,
    learning_rate=1e-3,
    gradient_accumulation_steps=4,  # The four pass each block together.
    assistant_only_loss=True,
    bf16=False,  # The precision is the model's.
)
model = infinity.from_pretrained("model", SWAP)

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="chat.jsonl", split="train")
trainer = prepare_trainer(SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer))
trainer.train()
trainer.save_model()
