"""Preferences, by TRL's DPOTrainer: an adapter, whose base alone is the reference."""

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = DPOConfig("out", max_steps=4, learning_rate=1e-3, gradient_accumulation_steps=2, bf16=False)
torch.manual_seed(0)  # The adapter is drawn alike by all processes.
with infinity.init_empty_weights(SWAP):
    config = AutoConfig.from_pretrained("model")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
infinity.offload(model, SWAP, weights="model")

tokenizer = AutoTokenizer.from_pretrained("model")
data = load_dataset("json", data_files="pairs.jsonl", split="train")  # prompt, chosen, rejected
trainer = prepare_trainer(
    DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
)
trainer.train()
trainer.save_model()  # The adapter, in PEFT's format.
