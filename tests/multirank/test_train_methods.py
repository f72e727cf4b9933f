"""`infinity train` under torchrun by each method that has a trainer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infinity.config import JobConfig, SwapConfig
from infinity.config.schema import changed
from tests.support.exhaustive import sampled
from tests.train import test_distill as distilled
from tests.train import test_grpo as rewarded
from tests.train import test_records as learned
from tests.train import test_several_adapters as adapters
from tests.train.jobs import lines_of
from tests.train.record_jobs import adapter_job
from tests.train.test_heads import LABELS, MARGINS, TEXTS

from .processes import run_ranks
from .training import (
    embed_in_memory,
    refused,
    rewarded_in_memory,
    train,
    train_beside_a_device,
    train_each_alone,
    train_stopped,
)

denoising = pytest.importorskip("tests.train.test_diffusion", reason="pip install diffusers")
embedding = pytest.importorskip(
    "tests.train.test_embed", reason="pip install sentence-transformers"
)
base, directories, models = rewarded.base, embedding.directories, distilled.models
causal, several, table = learned.base, adapters.several, adapters.table


def _train_on(count: int, config: SwapConfig | JobConfig) -> None:
    if count == 1:
        train(0, config)
    else:
        run_ranks(count, train, config)


Left = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


def _left_in(output: Path) -> Left:
    """The lines and the weights of a run."""
    files = sorted(output.glob("*.safetensors"))
    weights = {f"{f.name} {name}": of for f in files for name, of in load_file(f).items()}
    return lines_of(output), weights


def _assert_same(alone: Left, both: Left) -> None:
    for one, two in zip(alone[0], both[0], strict=True):
        for key in ("loss", "held_out_loss", "num_tokens"):
            assert one[key] == two[key], key
    assert alone[1].keys() == both[1].keys() and alone[1]
    assert all((alone[1][name] == both[1][name]).all() for name in alone[1])


RECORDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "sft": (learned.CHAT, {}), "dpo": (learned.PREFERENCES, {}), "reward": (MARGINS, {}),
    "classify": (TEXTS, {"labels": LABELS}),
}  # fmt: skip
WAYS = [(method, is_full) for method in RECORDS for is_full in (True, False)]


@pytest.mark.parametrize(("method", "is_full"), sampled(WAYS, ("dpo", True).__eq__))
def test_two_ranks_learn_records_as_twice_the_accumulation_would(
    tmp_path: Path,
    causal: Path,
    method: str,
    is_full: bool,
) -> None:
    """A step of DPO with all weights has a second model, which ranks divide, too."""
    records, more = RECORDS[method]
    for count in (1, 2):
        place = tmp_path / str(count)
        place.mkdir()
        table = adapter_job(place, causal, records, length=128, steps=3)
        table["tiers"]["host"]["capacity"] = "96MiB"
        table["train"] |= {"method": method, "gradient_accumulation_steps": 2 // count, **more}
        table["train"]["eval_every"], table["data"]["held_out"] = 3, 0.2
        table["optimizer"] = {"lr": 1e-2, "max_grad_norm": 0}
        if is_full:
            del table["adapter"]
        _train_on(count, SwapConfig.load(table))
    _assert_same(*(_left_in(tmp_path / name / "output") for name in "12"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_file", [False, True])
def test_two_ranks_learn_from_a_teacher_as_twice_the_accumulation_would(
    tmp_path: Path, models: tuple[Path, Path], has_file: bool
) -> None:
    """The teacher is a second model, which ranks divide, too, or a file of scores."""
    for count in (1, 2):
        place = tmp_path / str(count)
        place.mkdir()
        teacher = place / "scores.jsonl" if has_file else models[1]
        job = distilled.job_of(place, models[0], teacher=str(teacher), top_k=distilled.TOP_K)
        if has_file:
            distilled.score(job, models[1])
        table = SwapConfig.load(job).to_dict()
        table["tiers"]["host"]["capacity"], table["output"]["export"] = "128MiB", True
        table["train"]["gradient_accumulation_steps"] = 2 // count
        _train_on(count, SwapConfig.load(table))
    _assert_same(*(_left_in(tmp_path / name / "output") for name in "12"))


@pytest.mark.parametrize(
    ("family", "adapter"), sampled([("flux", True), ("sd3", False)], ("flux", True).__eq__)
)
def test_two_ranks_learn_images_as_twice_the_accumulation_would(
    tmp_path: Path, family: str, adapter: bool
) -> None:
    """The latents lie in the output directory, which rank 0 claims before another one writes.
    Images of the ranks differ in size."""
    denoising.pipelines.images(tmp_path / "images", denoising.ROWS)
    denoising.pipelines.pipeline(family, tmp_path / family)
    for count in (1, 2):
        job = denoising.job_of(
            tmp_path / str(count), tmp_path, family, adapter=denoising.ADAPTER if adapter else ""
        )
        text = (job / "job.toml").read_text().replace("cache =", 'aspect = "keep"  #')
        text = text.replace("batch_size = 2", "batch_size = 1")
        accumulation = "gradient_accumulation_steps ="
        assert f"{accumulation} 2" in text
        text = text.replace(f"{accumulation} 2", f"{accumulation} {2 // count}")
        (job / "job.toml").write_text(text)
        _train_on(count, denoising.config_of(job))
    told, both = (_left_in(tmp_path / name / "output") for name in "12")
    _assert_same(told, both)
    assert len({line["num_tokens"] for line in told[0]}) > 1


@pytest.mark.parametrize("number", sampled([0, 4, 5], (0).__eq__))
def test_two_ranks_have_the_bits_of_sentence_transformers_under_ddp(
    tmp_path: Path, directories: Path, number: int
) -> None:
    """Records that do not fill a batch of both ranks are left out of a step by both, and held-out
    ones by none."""
    name, targets, loss, options, records = embedding.CASES[number]
    table = embedding.job(tmp_path, directories / name, records, loss)
    table["train"] |= {"gradient_accumulation_steps": 1, "eval_every": 2}
    if loss == embedding.RANKING:  # Records of both ranks are compared.
        options = options | {"gather_across_devices": True}
    table["train"]["embed"]["options"] = options
    table["data"]["held_out"] = 0.1
    table["optimizer"] = {"lr": 1e-2, "max_grad_norm": 0}
    table["adapter"]["targets"] = targets
    if not targets:
        del table["adapter"]
    seed, shuffle = table["data"].get("seed", 0), table["data"].get("shuffle", True)
    rest, _ = embedding.split_rows(30, held_out=0.1, seed=seed, shuffle=shuffle)
    rows = [records[row] for row in rest]
    (losses, weights), _ = run_ranks(2, embed_in_memory, table, rows)
    run_ranks(2, train, SwapConfig.load(table))
    lines = lines_of(Path(table["output"]["directory"]))
    assert [line["loss"] for line in lines] == losses and len(losses) == 4
    assert lines[1]["held_out_loss"] and lines[3]["held_out_loss"]
    found = embedding.st.SentenceTransformer(
        table["output"]["directory"], device="cpu"
    ).state_dict()
    assert found.keys() == weights.keys() and all((found[n] == weights[n]).all() for n in found)


def test_records_that_give_a_rank_no_batch_are_refused(tmp_path: Path, directories: Path) -> None:
    table = embedding.job(tmp_path, directories / "bert", embedding.PAIRS[:7])
    del table["adapter"]
    refusals = run_ranks(2, refused, SwapConfig.load(table))
    assert all("7 are left for train.batch_size=4 on each of 2 ranks" in text for text in refusals)


REWARDED = [("grpo", 0.1), ("rloo", 0.0)]


@pytest.mark.parametrize(("method", "beta"), sampled(REWARDED, REWARDED[0].__eq__))
def test_two_ranks_have_the_bits_of_trl_under_ddp(
    tmp_path: Path, base: Path, method: str, beta: float
) -> None:
    rows, _ = run_ranks(2, rewarded_in_memory, base, method, beta, tmp_path / "plain")
    job = rewarded.job_of(tmp_path, base, method=method, beta=beta)
    run_ranks(2, train, SwapConfig.load(job))
    lines = lines_of(tmp_path / "output")
    for line, row in zip(lines, rows, strict=True):
        for name in ("loss", "reward", "entropy", *(["kl"] if beta else [])):
            assert line[name] == row[name], (name, line, row)
    assert sum(line["num_tokens"] for line in lines) == rows[-1]["num_tokens"]


def test_ranks_generate_answers_of_several_lengths_in_either_exchange(
    tmp_path: Path, base: Path
) -> None:
    """A rank that has generated waits for the other one, which still gathers weights."""
    told = []
    for exchange, work in (("one_sided", train), ("collective", train_beside_a_device)):
        job = rewarded.job_of(
            tmp_path / exchange, base, max_completion_length=40, num_generations=4,
            rest=f'[distributed]\nexchange = "{exchange}"',
        )  # fmt: skip
        run_ranks(2, work, SwapConfig.load(job))
        names = ("loss", "reward", "num_tokens", "completions/mean_length")
        told.append([[line[n] for n in names] for line in lines_of(job.parent / "output")])
    assert told[0] == told[1] and len({length for *_, length in told[0]}) > 1


@pytest.mark.exhaustive
def test_a_server_samples_for_two_ranks_and_dies(tmp_path: Path, base: Path) -> None:
    """The adapter is handed over once. The run that goes on has the lines of one that was not
    interrupted."""
    lines, rest = [], "[checkpoint]\nevery = 2"
    for name, deaths in (("whole", [None]), ("again", [9, None])):
        for death in deaths:
            faults = {} if death is None else {"dies_after": death}
            with rewarded.server_of(base, **faults).running() as url:
                job = rewarded.job_of(tmp_path / name, base, rest=rest, sampler=url)
                if death is None:
                    run_ranks(2, train, SwapConfig.load(job), name == "again")
                    continue
                with pytest.raises(AssertionError, match="does not answer: "):
                    run_ranks(2, train, SwapConfig.load(job))
        assert [*(tmp_path / name / "output" / "sampler").iterdir()] == []
        lines.append(lines_of(tmp_path / name / "output"))
    for whole, again in zip(*lines, strict=True):
        for key in ("loss", "reward", "entropy", rewarded.DIFFERENCE + "max"):
            assert whole[key] == again[key], key
        assert whole[rewarded.DIFFERENCE + "max"] < 1e-5


def test_adapters_of_one_sweep_have_the_bits_of_runs_of_their_own_over_ranks_too(
    tmp_path: Path, several: dict[str, Any]
) -> None:
    """Stopped on one rank, and continued on both."""
    several["tiers"]["host"]["capacity"], several["checkpoint"] = "128MiB", {}
    configs = [
        changed(config, {"output.directory": tmp_path / f"alone-{number}"})
        for number, config in enumerate(SwapConfig.load(several).of_adapters())
    ]
    run_ranks(2, train_each_alone, configs)
    assert run_ranks(2, train_stopped, SwapConfig.load(several)) == [143, 143]
    run_ranks(2, train, SwapConfig.load(several), True)
    for config, place in zip(configs, adapters.places(several).values(), strict=True):
        lines, weights, _ = adapters.left_by(place)
        wanted_lines, wanted, _ = adapters.left_by(config.output.directory)
        assert lines == wanted_lines and len(lines) == 4
        assert all((weights[name] == wanted[name]).all() for name in wanted)
