"""`infinity train` with method = "distill": the losses of a plain PyTorch loop, from a file of scores
and from a second model; what does not fit is refused before weights are read."""

from __future__ import annotations

import json
import runpy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from infinity.config import SwapConfig
from infinity.config.schema.train import Distill
from infinity.errors import CapacityError, ConfigError
from infinity.tools import logprobs
from infinity.tools.scoring import program as scoring
from infinity.tools.training import program, teacher
from infinity.tools.training.teacher import Teacher
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.commands import run_command
from tests.train.jobs import lines_of, write_job

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY, LENGTH, STEPS, TOP_K = 256, 32, 3, 8
JOB = """
[tiers]
host = {{capacity = "48MiB"}}
device = {{kind = "cpu"}}
[model]
path = "{student}"
[data]
paths = ["text.txt"]
max_bytes = 1024
sequence_length = 32
shuffle = false
held_out = 0.2
[output]
directory = "output"
export = false
[optimizer]
lr = 1e-2
weight_decay = 0.0
max_grad_norm = "off"
[train]
method = "distill"
steps = 3
batch_size = 2
gradient_accumulation_steps = 2
eval_every = 3
threads = 1
[train.distill]
{distill}
"""


def save(path: Path, width: int, seed: int, vocabulary: int = VOCABULARY) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student and teacher."""
    home = tmp_path_factory.mktemp("distill")
    return save(home / "student", 16, 0), save(home / "teacher", 32, 1)


def job_of(directory: Path, student: Path, **distill: Any) -> Path:
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in distill.items())
    write_job(directory, JOB.format(student=student, distill=options))
    return directory / "job.toml"


def train(job: Path) -> list[float]:
    program.train(SwapConfig.load(job))
    return [line["loss"] for line in lines_of(job.parent / "output")]


def score(job: Path, teacher: Path, **options: Any) -> None:
    """Writes what the teacher says of the job's sequences to the file that the job names."""
    made = SwapConfig.load(job).train
    assert made is not None and made.distill is not None
    request = scoring.Request(
        model=teacher, data=(job,), output=made.distill.teacher, dtype="float32",
        **({"top_k": TOP_K} | options),
    )  # fmt: skip
    scoring.run(request)


def plain(
    job: Path, models: tuple[Path, Path], forward: float, reverse: float, heat: float
) -> list[float]:
    """The losses of a loop without TRL or an engine: each learned place has the k likeliest tokens
    of the teacher, and all others as one."""
    student, teacher = (LlamaForCausalLM.from_pretrained(path) for path in models)
    text = torch.tensor(list((job.parent / "text.txt").read_bytes()[:1024])).view(-1, 1, LENGTH)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0, fused=True)

    def rest(of: torch.Tensor) -> torch.Tensor:
        most = of.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([of, (-most.expm1()).log()], -1)

    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for batch in range(2):
            first = 4 * step + 2 * batch
            ids = text[first : first + 2, 0]
            with torch.no_grad():
                said = [teacher(one[None]).logits[0, :-1].div(heat).log_softmax(-1) for one in ids]
            top = torch.cat(said)[:, :VOCABULARY].topk(TOP_K, -1)
            hidden = student.model(ids).last_hidden_state[:, :-1].reshape(-1, 16)
            found = linear(hidden, student.lm_head.weight).div(heat).log_softmax(-1)
            p, q = rest(top.values), rest(found.gather(-1, top.indices))
            each = torch.zeros(len(p))
            if forward:
                each = each + forward * (p.exp() * (p - q)).sum(-1)
            if reverse:
                each = each + reverse * (q.exp() * (q - p)).sum(-1)
            loss = each.sum() / (4 * (LENGTH - 1))
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


@pytest.mark.parametrize(
    ("forward", "reverse", "heat", "suffix"),
    [(1.0, 0.0, 1.0, ".jsonl"), (0.5, 0.25, 1.0, ".parquet"), (1.0, 0.5, 2.0, "")],
)
def test_losses_have_the_bits_of_a_plain_loop(
    forward: float, reverse: float, heat: float, suffix: str, models: tuple[Path, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """From a file, and from a second model in the same run at a temperature, which has more
    tokens than the tokenizer, and than the student."""
    if not suffix:
        models = models[0], save(tmp_path / "padded", 32, 1, VOCABULARY + 64)
    teacher = str(tmp_path / f"scores{suffix}") if suffix else str(models[1])
    job = job_of(
        tmp_path, models[0], teacher=teacher, forward_kl=forward, reverse_kl=reverse,
        temperature=heat, top_k=TOP_K,
    )  # fmt: skip
    if suffix:
        score(job, models[1])
    assert train(job) == plain(job, models, forward, reverse, heat)
    read_nbytes = [line["nvme_read_nbytes"] for line in lines_of(tmp_path / "output")]
    assert (read_nbytes[0] > 0) == (not suffix), "the files of a teacher beside the student"


def test_an_adapter_goes_on_from_a_checkpoint_with_the_same_losses_and_no_other_loss(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    job = job_of(tmp_path, models[0], teacher=str(models[1]), top_k=TOP_K, reverse_kl=0.5)
    text = job.read_text().replace("[data]", "[adapter]\nrank = 2\n[data]")
    job.write_text(text + "[checkpoint]\nevery = 2\n")
    whole = train(job)
    for reverse, error in (
        (0.5, None),
        (0.25, r"train\.distill\.reverse_kl is 0\.25 and was 0\.5"),
    ):
        job.write_text(job.read_text().replace("reverse_kl = 0.5", f"reverse_kl = {reverse}"))
        newest = max((tmp_path / "output" / "checkpoints").iterdir())
        shutil.rmtree(newest)
        with nullcontext() if error is None else pytest.raises(ConfigError, match=error):
            program.train(SwapConfig.load(job), resume=True)
    assert [line["loss"] for line in lines_of(tmp_path / "output")] == whole and len(whole) == STEPS


def test_slices_of_the_head_have_the_loss_and_the_gradients_of_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(10, 4), torch.randn(16, 4), torch.randn(16)
    top = torch.randn(2, 5, 16).log_softmax(-1).topk(3, -1)
    said = teacher.Likeliest(top.indices, top.values)
    options = Distill.model_validate({"teacher": "x", "reverse_kl": 0.5})
    labels = torch.zeros(2, 6, dtype=torch.int64)

    def run() -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        with teacher.taught(said, labels, options):
            values, *_ = teacher._DivergenceRows.apply(
                *inputs, labels[:, 1:].flatten(), 1.0, 0, 3.0, 0.5, ()
            )
        values.sum().backward()
        return [values, *(t.grad for t in inputs)]

    whole = run()
    monkeypatch.setattr(logprobs, "MOST_LOGITS", 4 * 16)
    for found, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(teacher._slices(10, 16)) == 3 and whole[0].abs().min() > 0


@pytest.mark.parametrize(
    ("distill", "options", "message"),
    [
        ({"top_k": 300}, None, "top_k: expected 0 to 256"),
        ({"forward_kl": 0.0}, None, "reverse_kl: expected more than 0, because forward_kl is 0"),
        ({"teacher": "scores.jsonl", "temperature": 2.0}, {}, "temperature"),
        ({"teacher": "scores.jsonl"}, None, "cannot be read"),
        ({"teacher": "scores.jsonl"}, {"top_k": 0}, "infinity score --top-k N"),
        ({"teacher": "text.txt"}, None, "cannot be read"),
        ({"teacher": "output"}, None, "output.directory and train.distill.teacher are the same"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_weights_are_read(
    distill: dict[str, Any], options: dict[str, Any] | None, message: str,
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = job_of(tmp_path, models[0], **({"teacher": str(models[1])} | distill))
    if options is not None:
        score(job, models[1], **options)
    monkeypatch.setattr(program.infinity, "offload", None)
    with pytest.raises(ConfigError, match=message):
        train(job)


def test_a_run_and_its_plan_refuse_the_half_of_a_budget_that_the_teacher_leaves(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    job = job_of(tmp_path, models[0], teacher=str(models[1]))
    job.write_text(job.read_text().replace("48MiB", "400KiB"))
    words = ("plan", job, "--hardware", "rtx4090-desktop")
    with pytest.raises(CapacityError, match="the file needs twice that"):
        train(job)
    assert "the file needs twice that" in run_command(*words).stderr
    alone, *_ = job.read_text().replace('"distill"', '"sft"').partition("[train.distill]")
    job.write_text(alone)
    assert run_command(*words).exit_code == 0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"top_tokens": [[], [3], [4]], "top_logprobs": [[], [-1.0], [-1.0]]}, "another --top-k"),
        ({"top_tokens": [[], [-5, 3], [1, 2]]}, "a token below 0"),
        ({"top_logprobs": [[], [-1.0, None], [-1.0, -2.0]]}, "no finite number up to 0"),
        ({"top_logprobs": [[], [-1.0, -2.0], [0.5, -2.0]]}, "no finite number up to 0"),
        ({"top_logprobs": [[], [-1.0, -2.0], [-0.1, -0.5]]}, "more than 1 at a place"),
        ({"top_logprobs": [[], [-1.0, -2.0], [-1.0, -2.5]]}, "says other things of an earlier one"),
    ],
)
def test_a_record_that_no_teacher_says_is_refused(
    second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row: dict[str, Any] = {"tokens": [1, 2, 3], "top_tokens": [[], [3, 4], [4, 5]]}
    row["top_logprobs"] = [[], [-1.0, -2.0], [-1.0, -2.0]]
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | second)}\n")
    with pytest.raises(ConfigError, match=f"record 2 .*{message}"):
        Teacher(Distill(teacher=tmp_path / "t.jsonl"), VOCABULARY, ByteTokenizer())


def test_a_teacher_with_another_tokenizer_is_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    make = runpy.run_path(str(EXAMPLES / "make_model.py"), run_name="made")["make"]
    teacher = make(str(tmp_path / "other"), width=16, layers=1)
    job = job_of(tmp_path, models[0], teacher=str(teacher))
    with pytest.raises(ConfigError, match="has another tokenizer than bytes"):
        train(job)
    job = job_of(tmp_path, models[0], teacher="scores.jsonl")
    with pytest.raises(ConfigError, match="has another tokenizer than bytes"):
        score(job, Path(teacher))


def test_a_file_of_other_data_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    job = job_of(tmp_path, models[0], teacher="scores.jsonl")
    score(job, models[1])
    job.write_text(job.read_text().replace("sequence_length = 32", "sequence_length = 16"))
    with pytest.raises(ConfigError, match="says nothing of sequence 1 of the data, which has 16"):
        train(job)
