"""TRL's GRPO and RLOO, whose windows run layer-major and whose completions may come from a server:
equal to the bit to the plain trainers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.integrations.hf import prepare_trainer

from .test_trl import (
    CountsReads,
    common,
    datasets,
    history,
    in_memory,
    make_model,
    swap,
    texts,
    tokenizer,
    trl,
)


def score(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(model: Any, directory: Path, kind: str = "GRPO", **options: Any) -> Any:
    own = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, "max_steps": 4}
    reference = options.pop("reference", None)
    args = getattr(trl, f"{kind}Config")(**common(directory, **(own | options)))
    beta, args.beta = args.beta, 0.0 if reference is not None else args.beta
    made = getattr(trl, f"{kind}Trainer")(
        model=model, args=args, reward_funcs=score, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(24, 0)}),
    )  # fmt: skip
    if reference is not None:  # TRL makes it from a directory.
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(reference, temperature=made.temperature)
        made.ref_model, made.beta = reference, beta
    return made


RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("lora", "nvme", {}),
    ("full", "nvme", {"num_iterations": 2, "max_steps": 5}),
    ("lora", "host", {"beta": 0.1, "num_iterations": 2}),
    ("full", "host", {"beta": 0.1, "steps_per_generation": 4, "gradient_checkpointing": False}),
    ("lora", "nvme", {"beta": 0.1, "steps_per_generation": 4, "entropy_coef": 0.1}),
    ("lora", "host", {"gradient_accumulation_steps": 1, "steps_per_generation": 3, "beta": 0.1}),
    ("lora", "host", {"use_adaptive_entropy": True, "entropy_target": 9.0}),
    ("lora", "nvme", {"kind": "RLOO", "beta": 0.1}),
    ("full", "host", {"kind": "RLOO", "num_iterations": 2}),
]


@pytest.mark.parametrize(("kind", "place", "options"), RUNS)
def test_a_layer_major_run_is_that_of_the_plain_trainer(
    kind: str, place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms, rewards, divergences and entropies of every step; every weight at the end."""

    def make(*, plain: bool, frozen: bool = False) -> Any:
        model = make_model(lora=kind == "lora" and not frozen, dropout=0.0)
        config = in_memory() if place == "host" or frozen else swap(tmp_path / "swap")
        return model if plain else infinity.offload(model, config)

    order = True if place == "nvme" else None  # The default looks at a first, plain window.
    has_kl = "beta" in options
    has_reference = kind == "full" and has_kl
    trainers = []
    for plain in (True, False):
        model = make(plain=plain)
        reference = make(plain=plain, frozen=True) if has_reference else None
        trainer = make_trainer(model, tmp_path / str(plain), reference=reference, **options)
        if not plain:
            prepare_trainer(trainer, layer_major=order)
        trainer.train()
        trainers.append(trainer)
    plain_rows, rows = map(history, trainers)
    assert rows == plain_rows
    assert sum("grad_norm" in row for row in rows) == trainer.args.max_steps
    assert any("reward" in row for row in rows) and ("kl" in rows[0]) == has_kl
    assert trainer.is_asked_for
    engine = infinity.engine_of(model)
    found = dict(trainer.model.named_parameters())
    found |= {name: engine.read_parameter(name) for name in engine.parameter_names()}
    for name, parameter in trainers[0].model.named_parameters():
        assert torch.equal(found[name], parameter), name
    for each in filter(None, (model, reference)):
        infinity.engine_of(each).close()


def test_a_step_reads_the_base_twice_and_once_more_to_score_what_was_generated(
    tmp_path: Path, trusted_tests: None
) -> None:
    """As counted by the engine: policy and reference of all parts pass each block together. A
    completion of one token reads the base once, too."""
    sizes: dict[str, Any] = {"lora": True, "dropout": 0.0, "width": 128, "layers": 6}
    base = sum(p.numel() * 4 for n, p in make_model(**sizes).named_parameters() if ".layers." in n)
    read = {}
    for order in (None, False):
        config = swap(tmp_path / "swap")
        config["tiers"]["host"]["capacity"] = "1500KiB"
        config |= {"placement": {"parameters": ["nvme"]}, "schedule": {"prefetch": False}}
        model = infinity.offload(make_model(**sizes), config)
        trainer = make_trainer(
            model, tmp_path / "out", beta=0.1, gradient_accumulation_steps=4, num_iterations=2,
            max_completion_length=1, gradient_checkpointing=False,
        )  # fmt: skip
        counts: list[float] = [0.0]
        with infinity.engine_of(model) as engine:
            trainer.add_callback(CountsReads(engine, counts))
            prepare_trainer(trainer, layer_major=order).train()
        read[order] = [(after - before) / base for before, after in itertools.pairwise(counts)]
    generating, other = read[None][-2:]
    assert 1.9 <= other <= 2.1 and 3.8 <= generating <= 4.2, read
    generating, other = read[False][-2:]
    assert other >= 4 * 1.9 and generating >= 4 * (2 + 1.9), read
