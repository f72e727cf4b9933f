"""A reward model, by TRL's RewardTrainer: the base with a new head."""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = RewardConfig(
    "out", max_steps=4, learning_rate=1e-3, gradient_accumulation_steps=2, bf16=False
)
kind = AutoModelForSequenceClassification  # Its head is drawn, and named in the log.
model = infinity.from_pretrained("model", SWAP, model_class=kind, num_labels=1)

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="pairs.jsonl", split="train")
trainer = prepare_trainer(
    RewardTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
)
trainer.train()
trainer.save_model()
