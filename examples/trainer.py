"""All weights of a causal language model, by transformers.Trainer."""

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import infinity
from infinity.integrations.hf import prepare_trainer

SWAP = {"tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap"}]}}
args = TrainingArguments("out", max_steps=8, gradient_accumulation_steps=4, learning_rate=1e-3)
model = infinity.from_pretrained("model", SWAP)

tokenizer = AutoTokenizer.from_pretrained("model")
texts = load_dataset("text", data_files="text.txt", split="train")
data = texts.map(lambda row: tokenizer(row["text"]), remove_columns="text")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = prepare_trainer(Trainer(model, args, collator, data))
trainer.train()
trainer.save_model()  # from_pretrained loads it
