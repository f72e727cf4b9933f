"""Preferences, by TRL's DPOTrainer: an adapter, whose first values are the reference."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = DPOConfig("out", max_steps=4, learning_rate=1e-3, gradient_accumulation_steps=2, bf16=False)
adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
model = infinity.from_pretrained("model", SWAP, adapter)

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="pairs.jsonl", split="train")  # prompt, chosen, rejected
trainer = prepare_trainer(
    DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
)
trainer.train()
trainer.save_model()  # The adapter, in PEFT's format.
