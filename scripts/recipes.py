"""Writes recipes/, what `infinity new` writes for shipped models on shipped machines, and the
tables of README.md and recipes/README.md: python scripts/recipes.py

Nothing is downloaded. A test fails when a file here is not what this program writes.
"""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path

from infinity.plan import load_hardware
from infinity.plan.model import load_shape
from infinity.plan.predict import Forecast
from infinity.simulate.log import CHECKPOINT_READ, READ
from infinity.tools.plan.catalogue import Cell, cell_of, plan_shipped, to_markdown
from infinity.tools.plan.draft import file_of
from infinity.tools.plan.report import decimal, duration

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
README = ROOT / "README.md"
START, END = "<!-- models -->\n", "<!-- models end -->"
MODELS = (
    "qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "llama-3-70b", "gpt-oss-120b",
    "qwen3-235b", "glm-4.6", "kimi-k2-int4", "deepseek-v3",
)  # fmt: skip
MACHINES = ("rtx4090-1nvme", "1xh200-4nvme", "8xh100-8nvme")
RANK = 16
HEAD = """# Recipes

Files for [`infinity train`](../docs/TRAINING.md): ten models on three machines, as `infinity new`
writes them for a LoRA adapter of rank 16. The figures are predictions of
[`infinity plan`](../docs/PLAN.md) for steps of 16 sequences of 2,048 tokens on each device, not
measurements. `infinity plan --table` has more models, and `--full` trains all weights.

```bash
hf download Qwen/Qwen3-30B-A3B                         # the model that model.path names
cp recipes/rtx4090-1nvme/qwen3-30b-a3b.toml run.toml   # next to your chat.jsonl
infinity train run.toml
```

On your own machine `infinity new` is better: it measures the machine and counts your data.
"""
COLUMNS = (
    "model",
    "tokens/s, what binds",
    "step",
    "host memory",
    "of it inputs",
    "read a step",
)


def recipe(model: str, machine: str) -> tuple[str, Forecast]:
    """Returns the text of a file, and its forecast. Paths are relative to the file."""
    with chdir("/"):  # Relative paths are resolved here; a comment stands behind the resolved one.
        wish, found, said = plan_shipped(model, load_hardware(machine), RANK)
        text = file_of(wish, found, said, f"{model}.toml")
    text = re.sub(r'^(\w+ = ")/([^"]*" +)(?=#)', r"\1\2 ", text, flags=re.MULTILINE)
    return re.sub(r'^(\w+ = ")/', r"\1", text, flags=re.MULTILINE), said


def cells_of(cell: Cell, said: Forecast) -> tuple[str, ...]:
    """Returns the row of a recipe in the table of its machine. Bytes are those of all ranks."""
    moved = said.step.moved_nbytes
    read = moved.get(CHECKPOINT_READ, 0) + moved.get(READ, 0)
    size = decimal(said.num_ranks * said.host_nbytes)
    inputs = said.num_ranks * said.saved.get("host", 0)
    return (
        f"[{cell.model}]({cell.machine}/{cell.model}.toml)", cell.text,
        duration(said.step.step_s), size, decimal(inputs),
        decimal(said.num_ranks * read) if read else "nothing",
    )  # fmt: skip


def written() -> dict[Path, str]:
    """Returns every file of this program with its content."""
    files, cells, parts = {}, [], [HEAD]
    for machine in MACHINES:
        rows: list[tuple[str, ...]] = [COLUMNS, ("---", *(5 * ("---:",)))]
        for model in MODELS:
            text, said = recipe(model, machine)
            files[RECIPES / machine / f"{model}.toml"] = text
            cells.append(cell_of(model, machine, RANK, said))
            rows.append(cells_of(cells[-1], said))
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {machine}\n\n{load_hardware(machine).name}.\n\n{table}\n")
    files[RECIPES / "README.md"] = "\n".join(parts)
    before, _, rest = README.read_text().partition(START)
    after = rest.partition(END)[2]
    table = re.sub(r"(\d) ([BT]|[GT]B)\b", r"\1&nbsp;\2", to_markdown(cells))
    for name in MODELS:
        hub = load_shape(name).hub or name
        table = table.replace(f"| {name} |", f"| {hub.rpartition('/')[2]} |")
    files[README] = f"{before}{START}\n{table}\n\n{END}{after}"
    return files


if __name__ == "__main__":
    for path, content in written().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    print(f"wrote {RECIPES} and the table of {README.name}")
