"""`infinity plan` as a user calls it, and its prediction beside a run of the engine."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from infinity.tools.cli import app
from infinity.tools.training.chat import CHATML
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.commands import plan_in_numbers
from tests.support.exhaustive import sampled
from tests.train.jobs import lines_of

RUNNER = CliRunner()

CONFIG = """
schema = 1
tiers.host.capacity = "16MiB"
tiers.nvme = [{{path = "{swap}", read_gb_per_s = 2.0, write_gb_per_s = 2.0}}]
placement = {{parameters = "nvme", master = "nvme", moments = "nvme", gradients = "nvme"}}
precision.compute = "{dtype}"
data = {{paths = ["THIS"], sequence_length = 8}}
train = {{steps = 4, batch_size = 2, gradient_accumulation_steps = {accumulation}, threads = 1}}
output = {{directory = "{output}", export = false}}
[model.config]
model_type = "gpt2"
vocab_size = 256
n_embd = 256
n_layer = 6
n_head = 4
n_positions = 64
""".replace("THIS", __file__)  # No byte that is moved depends on the text.


# For tests that are not about updates: one simulation a forecast, not one for each way to update.
ONE_WAY = ("--set", "schedule.updates=deferred", "--set", "schedule.update_on=host")


def plan(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_shipped_model_on_a_shipped_machine() -> None:
    said = plan("--model", "llama-3-70b", "--hardware", "8xh200-4nvme")
    for word in ("where state rests", "tokens/s", "binding", "helps", "drives", "8 ranks"):
        assert word in said


def test_json_has_the_same_numbers() -> None:
    found = json.loads(plan("--params", "20B", "--hardware", "rtx4090-desktop", "--json"))
    assert found["model"]["num_params"] == pytest.approx(2e10, rel=0.05)
    assert found["step_s"] >= max(found["busy_s"].values()) * 0.97
    assert found["tokens_per_s"] == pytest.approx(
        found["batch"]["tokens_per_step"] / found["step_s"]
    )
    assert found["endurance_steps"] == pytest.approx(2400e12 / found["moved_nbytes"]["nvme_write"])
    assert [each["ratio"] for each in found["advice"]] == sorted(
        (each["ratio"] for each in found["advice"]), reverse=True
    )


def test_spare_generations_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    words = {"swap": tmp_path / "swap", "output": tmp_path / "out", "dtype": "bfloat16"}
    text = CONFIG.format(accumulation=1, **words)
    name, _, model = text.partition("[model.config]")
    section = '[checkpoint]\ndurability = "step"\nkeep = 1\nevery = 2\n'
    file.write_text(f"{name}{section}[model.config]{model}")
    hardware = "--hardware", "rtx4090-desktop", "--sequence", "32"
    found = plan_in_numbers(str(file), *hardware)
    rewritten = 12 * found["model"]["num_params"]  # Weight and residual in 16 bits, two moments.
    assert found["num_spares"] == 2, "the last step, and the checkpoint that is kept"
    assert found["spare_nbytes"] == pytest.approx(2 * rewritten, rel=0.02)
    assert "2 spare generations" in plan(str(file), *hardware)
    none = plan_in_numbers(str(file), *hardware, "--set", "checkpoint.durability=none")
    assert (none["num_spares"], none["spare_nbytes"]) == (0, 0)


def test_updates_in_the_backward_over_ranks_take_a_generation_in_stage_3_alone() -> None:
    where = ("--model", "llama-3-8b", "--hardware", "8xh200-4nvme", "--ranks", "8", *ONE_WAY)
    both = (*where, "--set", "schedule.updates=both_passes", "--set", "placement.moments=nvme")
    whole = (*both, "--set", "placement.parameters=nvme", "--set", "placement.master=nvme")
    for stage, wanted in ((3, 1), (2, 0)):
        found = plan_in_numbers(*whole, "--set", f"distributed.zero_stage={stage}")
        assert found["num_spares"] == wanted, stage


def test_a_batch_that_does_not_fit_is_no_advice() -> None:
    where = ("--model", "llama-3-8b", "--hardware", "8xh200-8nvme", *ONE_WAY)
    change = "micro-batches twice as large"
    for tokens, fits in (
        ((), True),
        (("--tokens", "250000"), False),
        (("--tokens", "2000000"), False),
    ):
        advice = json.loads(plan(*where, *tokens, "--json"))["advice"]
        assert (change in [each["change"] for each in advice]) == fits
    layers = ("--model", "llama-3-8b", "--hardware", "8xh100-8nvme", "--tokens", "8000000",
              *ONE_WAY, "--set", "schedule.micro_batch=64", "--set")  # fmt: skip
    assert "layer inputs take" in plan(*layers, "placement.activations=host")
    assert "layer inputs take" not in plan(*layers, "placement.activations=nvme")


def test_small_moments_are_advised_with_their_gain_where_drives_have_the_moments() -> None:
    where = ("--hardware", "rtx4090-1nvme", *ONE_WAY)
    full = ("--model", "llama-3-8b", *where)
    base = json.loads(plan(*full, "--json"))
    small = json.loads(plan(*full, "--set", "precision.moments=8bit", "--json"))
    (ratio,) = (each["ratio"] for each in base["advice"] if "8-bit" in each["change"])
    assert ratio == pytest.approx(small["tokens_per_s"] / base["tokens_per_s"])
    saved = 1 - small["answer"]["written_nbytes"] / base["answer"]["written_nbytes"]
    assert any(f"{saved:.0%} fewer bytes written" in each["change"] for each in base["advice"])
    assert not any("8-bit" in each["change"] for each in small["advice"])


def test_a_long_sequence_fits_a_device_with_its_mlps_in_slices(tmp_path: Path) -> None:
    """Llama 3 8B has 218 M parameters in a block, 176 M of them in the MLP, whose forward is one of
    four passes more."""
    file = tmp_path / "long.toml"
    file.write_text(
        "tiers.host.capacity = '200GB'\nschedule.micro_batch = 1\nplacement.activations = 'host'\n[adapter]\n[data]\n"
        f"paths = ['{__file__}']\nsequence_length = 262144\n[train]\nsteps = 1\nbatch_size = 1\n"
    )
    where = (str(file), "--model", "llama-3-8b", "--hardware", "1xh200-4nvme", *ONE_WAY)
    plain = plan_in_numbers(*where)
    sliced = plan_in_numbers(*where, "--set", "train.mlp_tokens=8192")
    assert plain["batch"]["tokens_per_step"] == 262_144
    assert "or set train.mlp_tokens" in plain["answer"]["text"]
    assert [plain["answer"]["fits"], sliced["answer"]["fits"]] == [False, True]
    more_s = 2 * 32 * 176.2e6 * 262_144 / 400e12
    assert sliced["step_s"] - plain["step_s"] == pytest.approx(more_s, rel=0.05)


def test_slices_are_neither_advised_nor_taken_where_all_mlps_are_routed_experts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "long.toml"
    file.write_text(
        "tiers.host.capacity = '100GB'\nschedule.micro_batch = 1\n[adapter]\n[data]\n"
        f"paths = ['{__file__}']\nsequence_length = 2097152\n[train]\nsteps = 1\nbatch_size = 1\n"
    )
    where = (str(file), "--model", "gpt-oss-120b", "--hardware", "1xh200-4nvme", *ONE_WAY)
    said = plan(*where)
    assert "the activations of one block take about" in said and "mlp_tokens" not in said
    refused = RUNNER.invoke(app, ["plan", *where, "--set", "train.mlp_tokens=8192"])
    assert refused.exit_code == 2
    assert "gpt-oss-120b has no MLP that is a module" in refused.output


def test_a_sweep_of_scores_reads_the_base_once_and_has_no_backward() -> None:
    """Of K2 on one H200 with four drives: 31.7 B parameters multiply each of 131,072 tokens, which
    takes 400 TFLOPS longer than drives of 28 GB/s read 594 GB. So computing is what 6,000 tokens/s
    lack."""
    where = ("--score", "--model", "kimi-k2-int4", "--hardware", "1xh200-4nvme")
    found = plan_in_numbers(*where, "--data-tokens", "10M")
    tokens, stored_nbytes = found["batch"]["tokens_per_step"], found["model"]["stored_nbytes"]
    assert (tokens, found["model"]["trained_params"]) == (131_072, 0)
    assert 0.5 * stored_nbytes < found["moved_nbytes"]["checkpoint_read"] <= stored_nbytes
    assert found["moved_nbytes"].keys() == {"checkpoint_read", "h2d"}
    assert stored_nbytes / 28e9 < found["busy_s"]["compute"] < found["step_s"]
    assert 5_500 < tokens / found["step_s"] < tokens / found["busy_s"]["compute"] < 6_000
    assert found["answer"]["data"]["num_steps"] == 77
    assert "A sweep of 131,072 tokens takes" in found["answer"]["text"]
    assert "updates" not in plan(*where) and "the hidden states of a sweep take" not in plan(*where)
    assert "the hidden states of a sweep take" in plan(
        *where, "--tokens", "8000000", "--sequence", "65536"
    )


def test_a_step_of_four_adapters_takes_little_longer_than_that_of_one(tmp_path: Path) -> None:
    """Of 8,192 tokens each, over K2 on one H200 with four drives, which bind."""

    def step_s(count: int) -> float:
        file = tmp_path / "adapters.toml"
        file.write_text(
            f"tiers.host.capacity = '200GB'\ntiers.nvme = [{{path = '{tmp_path}'}}]\n"
            + "".join(f"[[adapter]]\nname = 'a{number}'\nrank = 16\n" for number in range(count))
        )
        where = ("--model", "kimi-k2-int4", "--hardware", "1xh200-4nvme")
        return float(plan_in_numbers(str(file), *where, "--tokens", str(8192 * count))["step_s"])

    assert 1 < step_s(4) / step_s(1) <= 1.15


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_over_short_records_is_planned_with_their_length(
    packing: bool, tmp_path: Path
) -> None:
    turns = [[("user", "a" * n), ("assistant", "b" * n)] for n in (10, 20, 30)]
    rows = [[{"role": role, "content": text} for role, text in chat] for chat in turns]
    data, file = tmp_path / "chat.jsonl", tmp_path / "run.toml"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    text = CONFIG.format(swap=tmp_path, dtype="float32", accumulation=1, output=tmp_path / "out")
    text = text.replace(
        "sequence_length = 8", f"sequence_length = 256, packing = {packing}".lower()
    )
    file.write_text(
        text.replace(__file__, str(data)).replace("n_positions = 64", "n_positions = 256")
    )
    found = json.loads(plan(str(file), "--hardware", "rtx4090-desktop", *ONE_WAY, "--json"))
    tokenizer = ByteTokenizer().for_records()
    tokenizer.chat_template = CHATML
    lengths = [len(tokenizer.apply_chat_template(row)["input_ids"]) for row in rows]
    of_data = found["answer"]["of_data"]
    if packing:
        assert of_data is None
    else:
        assert of_data["sequence_length"] == sum(lengths) // len(lengths)
        assert of_data["step_s"] < found["step_s"]


@pytest.mark.parametrize("sampler", ["transformers", "http://localhost:1"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_what_generates_before_a_step_is_planned_apart(
    sampler: str, beta: float, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Say it. "}) + "\n")
    file = tmp_path / "run.toml"
    text = CONFIG.format(swap=tmp_path, dtype="float32", accumulation=2, output=tmp_path / "out")
    text = text.replace(__file__, str(tmp_path / "prompts.jsonl"))
    grpo = (
        'rewards = ["math:fsum"], num_generations = 2, max_completion_length = 4, '
        f'beta = {beta}, sampler = "{sampler}"'
    )
    text = text.replace("train = {", f'train = {{method = "grpo", grpo = {{{grpo}}}, ')
    text, keys = text.split("[model.config]")
    hf_config = transformers.GPT2Config(**tomllib.loads(keys))
    transformers.GPT2LMHeadModel(hf_config).save_pretrained(tmp_path)
    text += f'[model]\npath = "{tmp_path}"\n'
    is_served = sampler != "transformers"
    file.write_text(text + "[adapter]\nrank = 2\n" * is_served)
    said = plan(str(file), "--hardware", "rtx4090-desktop", *ONE_WAY)
    found = json.loads(plan(str(file), "--hardware", "rtx4090-desktop", *ONE_WAY, "--json"))
    generation, step_s = found["answer"]["generation"], found["step_s"]
    if is_served:
        assert generation["seconds"] is None and "time is not counted" in said
    else:
        assert 0 < generation["token_s"] < step_s / 2  # It neither updates nor goes back.
        assert generation["seconds"] == 4 * generation["token_s"]
        assert "generates up to 4 tokens" in said
    if is_served or beta:
        assert generation["score_s"] < step_s and "scores    what was generated" in said
    else:
        assert generation["score_s"] is None and "scores  " not in said


def test_the_list_names_what_is_shipped() -> None:
    said = plan("--list")
    assert "dgx-2" in said and "kimi-k2" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected CONFIG, --model or --params"),
        (["--params", "many", "--hardware", "dgx-2"], "such as 124M"),
        (["--model", "gpt-1t", "--params", "1T"], "leave one out"),
        (["--model", "gpt-1t", "--hardware", "laptop"], "rtx4090-desktop"),
        (["--model", "gpt-1t", "--score", "--lora", "8"], "--score trains nothing"),
        (["--model", "gpt-1t", "--score", "--ranks", "2"], "--score is for one rank"),
        (["--model", "llama-3-405b", "--hardware", "rtx4090-desktop"], "nvme tier"),
        (["--model", "kimi-k2", "--hardware", "rtx4090-desktop"], "change tiers.nvme"),
        (["--model", "kimi-k2", "--hardware", "rtx4090-desktop", "--set", "schedule.tile=0"],
         "change tiers.host.capacity"),
        (["--model", "gpt-1t", "--hardware", "dgx-2", "--set", "tiers.device.capacity=1GB",
          "--set", "schedule.tile=0"],
         "do not fit one device"),
    ],
)  # fmt: skip
def test_plan_refuses_impossible_arguments(arguments: list[str], words: str) -> None:
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    plan("--model", "gpt-10b", "--hardware", "rtx4090-desktop", *ONE_WAY, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


RUNS = [
    ("float32", 1, "float32"), ("float32", 2, "float32"), ("bfloat16", 1, "float32"),
    ("bfloat16", 2, "float32"), ("bfloat16", 1, "8bit"),
]  # fmt: skip


@pytest.mark.usefixtures("without_digests")
@pytest.mark.parametrize(
    ("dtype", "accumulation", "moments"),
    sampled(RUNS, lambda run: run in (RUNS[1], RUNS[4])),  # Each value once.
)
def test_bytes_are_those_of_a_run(
    tmp_path: Path, dtype: str, accumulation: int, moments: str
) -> None:
    """Written bytes are exact; read ones depend on what the caches happen to keep."""
    file = tmp_path / "swap.toml"
    file.write_text(
        CONFIG.format(
            swap=tmp_path / "swap", output=tmp_path / "out", dtype=dtype, accumulation=accumulation
        )
    )
    compare_with_a_run(file, f"precision.moments={moments}", rel=0.1)


def compare_with_a_run(file: Path, *changes: str, rel: float) -> None:
    options = [part for each in changes for part in ("--set", each)]
    found = plan_in_numbers(file, *options)["moved_nbytes"]
    result = RUNNER.invoke(app, ["train", str(file), *options])
    assert result.exit_code == 0, result.output
    # The last line also carries out the update it decides.
    ran = lines_of(file.parent / "out")[-2]
    assert found["nvme_write"] == ran["nvme_write_nbytes"]
    assert found["nvme_read"] == pytest.approx(ran["nvme_read_nbytes"], rel=rel)


@pytest.mark.usefixtures("without_digests")
def test_bytes_of_tiles_are_those_of_a_run(tmp_path: Path) -> None:
    """Three micro-batches, two of them at a time through blocks with tiles, where no memory keeps
    anything: what is fetched and what leaves is known but for where the passes change direction."""
    shape = """
    model_type = "llama"
    vocab_size = 256
    hidden_size = 256
    intermediate_size = 768
    num_hidden_layers = 2
    num_attention_heads = 4
    """
    head = CONFIG.format(
        swap=tmp_path / "swap", output=tmp_path / "out", dtype="bfloat16", accumulation=1
    ).partition("[model.config]")[0]
    file = tmp_path / "swap.toml"
    file.write_text(f"{head}\n[model.config]\n{shape}")
    compare_with_a_run(
        file, "tiers.host.capacity=6MiB", "train.batch_size=3", "schedule.micro_batch=1",
        "schedule.tile=128KiB", "schedule.tile_micro_batches=2", rel=0.01,
    )  # fmt: skip
