"""Quick starts of other libraries, from their documentation, with at most three changed lines.

The lines are those of the documentation, but for the names of models and data, which are small and
local here. What a quick start leaves to defaults (steps, reports, the device) is set around it.
"""

from __future__ import annotations

import gc
import json
import runpy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForSequenceClassification, DistilBertConfig, TrainingArguments

import infinity
from infinity.tools.drop_in import DropIn

pytest.importorskip("trl", reason="pip install trl")

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_CHANGED = 3
PREPARED = "infinity.integrations.hf.prepare_trainer(trainer).train()"

# Of TRL's README: SFTTrainer and DPOTrainer.
SFT = """
from trl import SFTTrainer
from datasets import load_dataset

trainer = SFTTrainer(
    model="model",
    train_dataset=load_dataset("json", data_files="chat.jsonl", split="train"),
)
trainer.train()
"""
DPO = """
from trl import DPOTrainer
from datasets import load_dataset

dataset = load_dataset("json", data_files="pairs.jsonl", split="train")
trainer = DPOTrainer(
    model="model",
    train_dataset=dataset,
)
trainer.train()
"""
# Of the quick tour of transformers: Trainer.
TRAINER = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

model = AutoModelForSequenceClassification.from_pretrained("encoder")
tokenizer = AutoTokenizer.from_pretrained("encoder")
dataset = load_dataset("json", data_files="labels.jsonl")

def tokenize_dataset(dataset):
    return tokenizer(dataset["text"])

dataset = dataset.map(tokenize_dataset, batched=True)
data_collator = DataCollatorWithPadding(tokenizer=tokenizer)
training_args = TrainingArguments(
    output_dir="out",
    learning_rate=2e-5,
    per_device_train_batch_size=8,
    num_train_epochs=2,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    processing_class=tokenizer,
    data_collator=data_collator,
)
trainer.train()
"""
# Of DeepSpeed's page in the documentation of transformers: the same with one argument.
DEEPSPEED = TRAINER.replace("    num_train_epochs=2,", '    deepspeed="zero3.json",')
# Of accelerate's quick tour: a loop, with the model and the data that it leaves out.
ACCELERATE = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
training_dataloader = DataLoader(torch.arange(256).view(8, 32), batch_size=4)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
losses = []
for batch in [*training_dataloader] * 2:
    optimizer.zero_grad()
    loss = model(batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
"""
# Of the documentation of sentence-transformers: training overview.
EMBEDDING = """
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer("encoder")
train_dataset = load_dataset("json", data_files="anchors.jsonl", split="train")
loss = MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(
    model=model,
    train_dataset=train_dataset,
    loss=loss,
)
trainer.train()
"""
# In the order of diffusers' scripts for LoRA, such as train_dreambooth_lora_flux.py: the encoder is
# in memory, and what is trained is prepared.
DIFFUSERS = """
import torch
from accelerate import Accelerator
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from transformers import CLIPTextModel

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
text_encoder = CLIPTextModel.from_pretrained("flux", subfolder="text_encoder")
transformer = FluxTransformer2DModel.from_pretrained("flux", subfolder="transformer")
transformer.requires_grad_(False)
text_encoder.requires_grad_(False)
transformer.to(accelerator.device, dtype=torch.float32)
transformer.enable_gradient_checkpointing()
layers = ["attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"]
transformer.add_adapter(LoraConfig(r=4, init_lora_weights="gaussian", target_modules=layers))
lora_parameters = list(filter(lambda p: p.requires_grad, transformer.parameters()))
optimizer = torch.optim.AdamW([{"params": lora_parameters, "lr": 1e-2}], fused=True)
latents = torch.utils.data.DataLoader(torch.randn(4, 2, 8, 8), batch_size=2)
lr_scheduler = get_scheduler("constant_with_warmup", optimizer=optimizer, num_warmup_steps=1)
transformer, optimizer, latents, lr_scheduler = accelerator.prepare(
    transformer, optimizer, latents, lr_scheduler
)
losses = []
with torch.no_grad():
    prompt, pooled = text_encoder(torch.arange(8).view(2, 4), return_dict=False)
for model_input in [*latents] * 2:
    with accelerator.accumulate(transformer):
        noise, sigmas = torch.randn_like(model_input), torch.rand(2, 1, 1, 1)
        model_pred = transformer(
            hidden_states=FluxPipeline._pack_latents(
                (1.0 - sigmas) * model_input + sigmas * noise, 2, 2, 8, 8
            ),
            timestep=sigmas.flatten(),
            guidance=torch.ones(2),
            pooled_projections=pooled,
            encoder_hidden_states=prompt,
            txt_ids=torch.zeros(4, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
            return_dict=False,
        )[0]
        target = FluxPipeline._pack_latents(noise - model_input, 2, 2, 8, 8)
        loss = torch.mean((model_pred - target) ** 2)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(lora_parameters, 0.01)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
model = accelerator.unwrap_model(transformer).to(torch.float32)
FluxPipeline.save_lora_weights("lora", get_peft_model_state_dict(model))
"""
# (the quick start, its changed lines, whether `infinity run` runs it). An import that is added is
# the first changed line.
QUICK_STARTS: dict[str, tuple[str, dict[str, str], bool]] = {
    "sft": (SFT, {
        "from trl import SFTTrainer": "import infinity.integrations.hf; from trl import SFTTrainer",
        '    model="model",': '    model=infinity.from_pretrained("model"),',
        "trainer.train()": PREPARED,
    }, False),
    "trainer": (TRAINER, {
        "from datasets import load_dataset":
            "import infinity.integrations.hf; from datasets import load_dataset",
        'model = AutoModelForSequenceClassification.from_pretrained("encoder")': "model = "
            'infinity.from_pretrained("encoder", model_class=AutoModelForSequenceClassification)',
        "trainer.train()": PREPARED,
    }, False),
    "embedding": (EMBEDDING, {
        "from datasets import load_dataset":
            "import infinity.integrations.hf; from datasets import load_dataset",
        "trainer.train()": PREPARED.replace("(trainer)", "(trainer, {})"),
    }, False),
    "accelerate": (ACCELERATE, {
        "import torch": "import torch; import infinity.integrations.hf",
        "accelerator = Accelerator()":
            "accelerator = infinity.integrations.hf.prepare_accelerator(Accelerator())",
        'model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)':
            'model = infinity.from_pretrained("model", dtype=torch.float32)',
    }, False),
    "diffusers": (DIFFUSERS, {
        "import torch": "import torch; import infinity.integrations.hf",
        "accelerator = Accelerator(gradient_accumulation_steps=2)": "accelerator = infinity."
            "integrations.hf.prepare_accelerator(Accelerator(gradient_accumulation_steps=2))",
        "lora_parameters = list(filter(lambda p: p.requires_grad, transformer.parameters()))":
            "infinity.offload(transformer, {}); "
            "lora_parameters = list(filter(lambda p: p.requires_grad, transformer.parameters()))",
    }, False),
    "sft as it is": (SFT, {}, True),
    "dpo as it is": (DPO, {}, True),
    "trainer as it is": (TRAINER, {}, True),
    "embedding as it is": (EMBEDDING, {}, True),
    "deepspeed as it is": (DEEPSPEED, {}, True),
    "accelerate as it is": (ACCELERATE, {}, True),
    "diffusers as it is": (DIFFUSERS, {}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quick")
    runpy.run_path(str(EXAMPLES / "make_model.py"))["make"](str(directory / "model"), 32, 2)
    tokenizer = directory / "model" / "tokenizer.json"
    torch.manual_seed(2)
    encoder = DistilBertConfig(
        dim=32, hidden_dim=48, n_layers=2, n_heads=2, vocab_size=512, max_position_embeddings=64,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(encoder).save_pretrained(directory / "encoder")
    config = json.loads((tokenizer.parent / "tokenizer_config.json").read_text())
    config["pad_token"] = config["eos_token"]
    (directory / "encoder" / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json",):
        shutil.copy(tokenizer.parent / name, directory / "encoder" / name)
    for name in ("chat.jsonl", "pairs.jsonl"):
        shutil.copy(EXAMPLES / name, directory / name)
    numbers = range(16)
    rows: dict[str, list[dict[str, Any]]] = {
        "labels": [{"text": f"number {i}", "label": i % 2} for i in numbers],
        "anchors": [{"anchor": f"number {i}", "positive": f"{i}"} for i in numbers],
    }
    for name, records in rows.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{name}.jsonl").write_text(text)
    zero = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    (directory / "zero3.json").write_text(json.dumps(zero))
    return directory


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in QUICK_STARTS if "diffusers" not in name])
def test_a_quick_start_runs_with_at_most_three_changed_lines(
    name: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it trains: the model's loss is another one in the end."""
    program, changes, is_run = QUICK_STARTS[name]
    if "sentence_transformers" in program:
        pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    lines = program.strip().splitlines()
    assert len(changes) <= MOST_CHANGED and changes.keys() <= {*lines}
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    plain: Any = TrainingArguments.__post_init__

    def post_init(args: Any) -> None:
        args.use_cpu, args.max_steps, args.report_to = True, 2, "none"
        args.logging_steps, args.learning_rate, args.save_strategy = 1, 1e-2, "no"
        plain(args)

    monkeypatch.setattr(TrainingArguments, "__post_init__", post_init)
    file = tmp_path / "program.py"
    file.write_text("\n".join(changes.get(line, line) for line in lines) + "\n")
    with DropIn().installed() if is_run else nullcontext():
        ran = runpy.run_path(str(file), run_name="__main__")
    model = ran["model"] if "model" in ran else ran["trainer"].model
    engine = infinity.engine_of(model)
    if "losses" in ran:
        assert ran["losses"][2] < ran["losses"][0]
    else:
        logged = [row["loss"] for row in ran["trainer"].state.log_history if "loss" in row]
        assert len(logged) == 2 and all(map(torch.isfinite, torch.tensor(logged)))
    assert engine.counters.snapshot()["update_s"] > 0
    engine.close()


def as_in_a_process_of_its_own() -> None:
    """Ends what other tests have left: accelerate's state is the process's, and a suspended
    `fork_rng` that is collected in the middle of a loop puts the random numbers back."""
    gc.collect()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:.*optimizer.step")
@pytest.mark.parametrize("way", ["", " as it is"])
@pytest.mark.parametrize("name", ["accelerate", "diffusers"])
def test_a_loop_of_accelerate_has_the_bits_of_the_loop_in_memory(
    name: str, way: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "diffusers":
        pytest.importorskip("diffusers", reason="pip install diffusers")
        from tests.support.models import pipelines

        pipelines.flux(workplace / "flux")
    program, changes, is_run = QUICK_STARTS[name + way]
    lines = program.splitlines()
    assert len(changes) <= MOST_CHANGED and changes.keys() <= {*lines}
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    file = workplace / "loop.py"
    file.write_text(program)
    as_in_a_process_of_its_own()
    plain = runpy.run_path(str(file))
    file.write_text("\n".join(changes.get(line, line) for line in lines))
    as_in_a_process_of_its_own()
    with DropIn().installed() if is_run else nullcontext():
        mine = runpy.run_path(str(file))
    assert mine["losses"] == plain["losses"] and len(set(plain["losses"])) == 4
    engine = infinity.engine_of(mine["model"])
    for name, parameter in plain["model"].named_parameters():
        assert torch.equal(engine.read_parameter(name), parameter), name
    engine.close()
