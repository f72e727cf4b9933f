"""A question of gpu.py: what do micro-batches cost under transformers.Trainer?

Tokens per second of steps of one micro-batch, and of eight (`gradient_accumulation_steps`), of an
offloaded model under `prepare_trainer`: once one micro-batch after the other, once layer by layer,
which moves each block once for all of them. The counterpart is the same Trainer with the model in
the device's memory. The losses stand beside: both orders have the same, and the model in memory
starts from other weights.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import print_table, progress, say
from gpu_common import Sizes, free_memory, in_memory, offloaded, on_host, synchronize
from rich.console import Console

import infinity

_COUNTED = 3  # Steps, after one that is not counted.
_LR = 1e-5


def trainer(
    sizes: Sizes, words: Any, scratch: Path, there: torch.device, document: Any, console: Console
) -> Any:
    many = sizes.accumulated
    ours = (("one by one", 1, False), ("one by one", many, False), ("by layers", many, True))
    config = on_host(sizes.resting_host)
    rows = []
    for way, count, layer_major in ours:
        model = offloaded(sizes, sizes.resting_layers, True, dict(config), there).train()
        engine = infinity.engine_of(model)
        row = _train(model, count, layer_major, sizes, scratch, there)
        row["counters"] = engine.counters.snapshot()
        rows.append({"model": "offloaded", "way": way} | row)
        engine.close()
        del model, engine
        free_memory(there)
    for count in (1, many):
        plain = in_memory(sizes.resting_layers, sizes, there)[0]
        row = _train(plain, count, None, sizes, scratch, there)
        rows.append({"model": "in memory", "way": "one by one"} | row)
        del plain
        free_memory(there)
    _show(rows, sizes, console)
    return rows


def _train(
    model: Any, count: int, layer_major: bool | None, sizes: Sizes, scratch: Path, there: Any
) -> dict[str, Any]:
    """`layer_major`: None leaves the trainer as transformers made it."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from infinity.integrations.hf import prepare_trainer

    times_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused: Any, **more: Any) -> None:
            synchronize(there)
            self.begun_s = time.perf_counter()

        def on_step_end(self, *unused: Any, **more: Any) -> None:
            synchronize(there)
            times_s.append(time.perf_counter() - self.begun_s)

    batch = max(sizes.micro_batch_tokens // sizes.sequence, 1)
    arguments = TrainingArguments(
        output_dir=str(scratch / "trainer"), max_steps=1 + _COUNTED, learning_rate=_LR,
        per_device_train_batch_size=batch, gradient_accumulation_steps=count, max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        use_cpu=there.type != "cuda",
    )  # fmt: skip
    data = Tokens(batch * count * (1 + _COUNTED), sizes.sequence)
    made = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()])
    made.remove_callback(PrinterCallback)
    if layer_major is not None:
        made = prepare_trainer(made, layer_major=layer_major)
    say(f"Trainer, {count} micro-batches, layer_major={layer_major}")
    with progress("Trainer", lambda: f"{len(times_s)} of {1 + _COUNTED} steps"):
        made.train()
    step_s = statistics.median(times_s[1:])
    return {
        "accumulation": count, "steps_s": times_s, "step_s": step_s,
        "tokens_per_s": batch * sizes.sequence * count / step_s,
        "losses": [line["loss"] for line in made.state.log_history if "loss" in line],
    }  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """Random sequences, the same in every run."""

    def __init__(self, count: int, sequence: int) -> None:
        source = torch.Generator().manual_seed(7)
        self._ids = torch.randint(2048, (count, sequence), generator=source)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def _show(rows: Any, sizes: Sizes, console: Console) -> None:
    def share(row: Any, model: str, accumulation: int) -> str:
        (other,) = (
            each for each in rows
            if each["model"] == model and each["accumulation"] == accumulation
            and (model == "in memory" or accumulation == 1)
        )  # fmt: skip
        return f"{row['tokens_per_s'] / other['tokens_per_s']:.2f}"

    columns = {
        "model": "{model}", "micro-batches": "{accumulation}", "way": "{way}",
        "step s": "{step_s:.3f}", "tokens/s": "{tokens_per_s:,.0f}",
        "of in memory": lambda row: share(row, "in memory", row["accumulation"]),
        "of one micro-batch": lambda row: share(row, row["model"], 1),
        "GB in, out a step": _moved,
        "losses": lambda row: " ".join(f"{loss:.3f}" for loss in row["losses"]),
    }  # fmt: skip
    title = (
        f"transformers.Trainer, {sizes.micro_batch_tokens:,} tokens a micro-batch, "
        f"{sizes.resting_layers} layers"
    )
    print_table(title, columns, rows, console)


def _moved(row: dict[str, Any]) -> str:
    """The bytes that crossed the link, of all steps alike."""
    if "counters" not in row:
        return "-"
    names, steps = ("device_in_nbytes", "device_out_nbytes"), len(row["steps_s"])
    return ", ".join(f"{row['counters'].get(name, 0) / steps / 1e9:.3g}" for name in names)
