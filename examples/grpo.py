"""Reinforcement learning, by TRL's GRPOTrainer: the offloaded model generates its own answers."""

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = GRPOConfig(
    "out",
    max_steps=2,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    bf16=False,
)
model = infinity.from_pretrained("model", SWAP)


def reward(completions, **_):
    return [sum(each.isalpha() for each in text) / max(len(text), 1) for text in completions]


tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="pairs.jsonl", split="train").select_columns("prompt")
trainer = prepare_trainer(
    GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)
)
trainer.train()
trainer.save_model()
