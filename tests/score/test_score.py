"""`infinity score` and `infinity.score`: the log-probabilities of a plain forward, whatever passes
together, and rows that a killed run neither loses nor doubles."""

from __future__ import annotations

import datetime
import errno
import json
import math
import runpy
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
)

import infinity
from infinity.errors import ConfigError, StorageError
from infinity.tools import logprobs
from infinity.tools.scoring import program
from infinity.tools.scoring.program import Request
from infinity.tools.scoring.sequences import read_sequences
from infinity.tools.training.tokenizers import ByteTokenizer, open_tokenizer
from tests.parity.zoo import ZOO
from tests.support.file_systems import failing
from tests.support.offloading import offloaded, swap_config

SEQUENCES = [[3, 5, 7, 11, 2], [1, 2], [9] * 17, [4, 8, 15, 16, 23, 42]]
EXAMPLES = Path(__file__).parents[2] / "examples"


def plain(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "qwen3", "phi3", "gpt_neox", "gptj", "mixtral", "qwen3_moe", "deepseek_v3",
     "lora-experts"],
)  # fmt: skip
def test_scores_have_the_bits_of_a_plain_forward(name: str, swap_directory: Path) -> None:
    expected = [plain(ZOO[name].build(0).eval(), ids) for ids in SEQUENCES]
    with offloaded(ZOO[name].build(0).train(), swap_config(swap_directory)) as model:
        _, first, *_, last = model.modules()
        last.eval()
        scores, told = [], []
        first.train = lambda mode=True: told.append(mode) or torch.nn.Module.train(first, mode)
        for found in infinity.score(model, SEQUENCES, top_k=3, sweep_tokens=20):
            scores.append(found)
            assert model.training and told[-1] and not last.training, "also between sweeps"
            model.train()
            last.eval()
    for ids, full, found in zip(SEQUENCES, expected, scores, strict=True):
        assert torch.equal(found.logprobs, full.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        top = full.topk(3)
        assert found.top_ids is not None and found.top_logprobs is not None
        assert torch.equal(found.top_ids, top.indices)
        assert torch.equal(found.top_logprobs, top.values)


def test_the_head_runs_in_slices_with_the_caps_of_the_model(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of several rows: a product of one row is computed by another kernel."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=2.0,
    )  # fmt: skip
    made = Gemma2ForCausalLM(config).eval()
    expected = [plain(made, ids) for ids in SEQUENCES]
    monkeypatch.setattr(logprobs, "MOST_LOGITS", 4 * 64)
    calls = []
    head = made.lm_head.forward
    made.lm_head.forward = lambda rows: calls.append(rows.shape) or head(rows)
    with offloaded(made, swap_config(swap_directory)) as model:
        scores = list(infinity.score(model, SEQUENCES))
    assert max(shape[1] for shape in calls if len(calls) > 4) <= 5 and len(calls) >= 8
    for ids, full, found in zip(SEQUENCES, expected, scores, strict=True):
        wanted = full.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(found.logprobs, wanted, rtol=0, atol=1e-5)


def test_sweeps_hold_whole_sequences(swap_directory: Path) -> None:
    with offloaded(ZOO["llama"].build(0), swap_config(swap_directory)) as model:
        assert list(logprobs.sweeps([4, 4, 9, 1, 20, 2], 9, model)) == [
            (0, 2), (2, 3), (3, 4), (4, 5), (5, 6)
        ]  # fmt: skip
        assert list(logprobs.sweeps([1] * 300, 9999, model)) == [(0, 256), (256, 300)]


# -- The command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = runpy.run_path(str(EXAMPLES / "make_model.py"), run_name="made")["make"]
    return Path(make(str(tmp_path_factory.mktemp("score") / "model"), width=64, layers=3))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def request_of(directory: Path, tmp_path: Path) -> Request:
    texts = [{"id": f"text-{n}", "text": "abcdefgh"[: n + 2]} for n in range(6)]
    config = tmp_path / "swap.toml"
    config.write_text('[tiers.host]\ncapacity = "32MiB"\n[tiers.device]\nkind = "cpu"\n')
    return Request(
        model=directory, data=(write(tmp_path / "data.jsonl", *texts),), config=config,
        output=tmp_path / "out.jsonl", dtype="float32", sweep_tokens=8,
    )  # fmt: skip


def killed_in_second_sweep() -> Any:
    sweeps = iter([None, KeyboardInterrupt()])

    def note(*_: int) -> None:
        if (error := next(sweeps)) is not None:
            raise error

    return note


@pytest.mark.parametrize("damage", ["\0\0", "[]", '{"sum_logprob": "x"}'])
def test_a_killed_run_goes_on_without_losing_or_doubling_a_row(
    request_of: Request, tmp_path: Path, damage: str
) -> None:
    whole = replace(request_of, output=tmp_path / "whole.jsonl")
    total = program.run(whole)
    written = tmp_path / "out.jsonl.rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        program.run(request_of, note=killed_in_second_sweep())
    assert not request_of.output.exists()
    num_rows = len(rows_of(written))
    with written.open("a") as file:
        file.write(damage + '\n{"record": 3, "tok')
    assert request_of.config
    tiers, config = request_of.config.read_text(), tmp_path / "tiles.toml"
    config.write_text(f'{tiers}[schedule]\ntile = "64KiB"\n')  # Cuts the embedding.
    with pytest.raises(ConfigError, match="made with another tiling"):
        program.run(replace(request_of, config=config))
    config.write_text(f'{tiers}[schedule]\ntile = "1MiB"\n')  # Cuts nothing, as "auto" has done.
    resumed = program.run(replace(request_of, config=config, sweep_tokens=1000))
    assert 0 < num_rows < 6 and resumed.resumed_at == num_rows
    assert request_of.output.read_text() == whole.output.read_text()
    assert resumed.perplexity == pytest.approx(total.perplexity, rel=1e-12)
    assert [row["id"] for row in rows_of(whole.output)] == [f"text-{n}" for n in range(6)]


def test_rows_are_those_of_a_plain_model_and_its_adapter(
    request_of: Request, directory: Path, tmp_path: Path
) -> None:
    """Of an answer alone, where the record has one; a Parquet file has the same rows."""
    plain_model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(plain_model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    data = write(tmp_path / "pairs.jsonl", {"prompt": "ab", "completion": "cde"})
    request = replace(request_of, adapter=tmp_path / "adapter", data=(data,), top_k=2)
    program.run(request)
    (row,) = rows_of(request.output)
    full = plain(adapted, row["tokens"])
    chosen = full.gather(1, torch.tensor(row["tokens"][1:])[:, None])[:, 0].tolist()
    assert row["logprobs"] == [None, *chosen] and row["is_answer"] == [0, 0, 1, 1, 1]
    assert row["num_scored"] == 3 and row["sum_logprob"] == sum(chosen[1:])
    assert row["perplexity"] == math.exp(-sum(chosen[1:]) / 3)
    assert row["top_tokens"][1:] == full.topk(2).indices.tolist()
    table = replace(request, output=tmp_path / "out.parquet")
    program.run(table)
    (found,) = Dataset.from_parquet(str(table.output)).to_list()
    assert found.keys() == row.keys()
    assert not {name: (value, found[name]) for name, value in row.items() if found[name] != value}


def test_a_reward_model_scores_whole_sequences_with_the_bits_of_a_plain_forward(
    request_of: Request, directory: Path, tmp_path: Path
) -> None:
    make = AutoModelForSequenceClassification.from_pretrained
    torch.manual_seed(0)
    reward: Any = make(directory, num_labels=2, dtype=torch.float32).eval()
    reward.save_pretrained(tmp_path / "reward")
    open_tokenizer(directory).for_records().save_pretrained(tmp_path / "reward")
    request = replace(request_of, model=tmp_path / "reward", config=None)
    assert "perplexity" not in str(program.run(request))
    rows = rows_of(request.output)
    assert len(rows) == 6 and rows[0].keys() == {"record", "id", "tokens", "scores"}
    for row in rows:
        with torch.no_grad():
            plain_scores = reward(torch.tensor([row["tokens"]])).logits[0].tolist()
        assert row["scores"] == plain_scores and len(plain_scores) == 2
    with pytest.raises(ConfigError, match="scores sequences, not tokens"):
        program.run(replace(request, top_k=1, output=tmp_path / "other.jsonl"))
    table = replace(request, output=tmp_path / "rewards.parquet", sweep_tokens=1000)
    program.run(table)
    assert Dataset.from_parquet(str(table.output))["scores"][:] == [row["scores"] for row in rows]


def test_hidden_states_of_chosen_layers_are_those_of_a_plain_forward(
    request_of: Request, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the head runs in slices, and the run is ended and goes on."""
    monkeypatch.setattr(logprobs, "MOST_LOGITS", 3 * 259)
    plain_model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    request = replace(request_of, layers=(0, 2, 3), top_k=2)

    def kill(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(request, note=kill)
    left = request.output.with_name(f"{request.output.name}.layers") / ".tmpAbC"
    left.touch()  # As SIGTERM leaves it while a file is written.
    assert program.run(request).resumed_at > 0 and not left.exists()
    rows = rows_of(request.output)
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor([row["tokens"]])
            states = plain_model(ids, output_hidden_states=True, use_cache=False).hidden_states
        found = load_file(request.output.parent / row["hidden_states"])
        assert found.keys() == {"layer.0", "layer.2", "layer.3"}
        for name, state in found.items():
            assert torch.equal(state, states[int(name[6:])][0])
    assert len({row["hidden_states"] for row in rows}) == 6
    with pytest.raises(ConfigError, match="layers: expected numbers from 0 to 3"):
        program.run(replace(request, layers=(4,)))


def test_conversations_and_text_files_are_scored(request_of: Request, tmp_path: Path) -> None:
    chat = replace(request_of, data=(EXAMPLES / "chat.jsonl",), output=tmp_path / "chat.jsonl")
    assert program.run(chat).num_records == len(rows_of(EXAMPLES / "chat.jsonl"))
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij")
    pieces = replace(request_of, data=(text,), output=tmp_path / "pieces.jsonl", max_length=4)
    program.run(pieces)
    found = rows_of(pieces.output)
    assert [len(row["tokens"]) for row in found] == [4, 4, 3]  # The end of the text is a token.
    assert {row["id"] for row in found} == {str(text)}
    ids = {"input_ids": [[5, 6, 7]], "labels": [[-100, 6, 7]], "id": [datetime.date(2026, 1, 2)]}
    Dataset.from_dict(ids).to_parquet(tmp_path / "ids.parquet")
    dated = replace(request_of, data=(tmp_path / "ids.parquet",), output=tmp_path / "ids.jsonl")
    program.run(dated)
    (row,) = rows_of(dated.output)
    assert (row["id"], row["is_answer"]) == ("2026-01-02", [0, 1, 1])


def test_a_file_of_several_adapters_stands_for_the_data_of_each(
    request_of: Request, directory: Path, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl", *[{"text": f"a{n}"} for n in range(2)])
    write(tmp_path / "b.jsonl", *[{"prompt": "b", "completion": f"{n}"} for n in range(2)])
    data = tmp_path / "run.toml"
    data.write_text(
        f'''[model]
path = "{directory}"
[[adapter]]
name = "x"
[[adapter]]
name = "y"
data = "b.jsonl"
[data]
paths = ["a.jsonl"]
sequence_length = 16
held_out = 0.0
shuffle = false
[train]
steps = 1
batch_size = 1
[output]
directory = "out"
'''
        + (tmp_path / "swap.toml").read_text()
    )
    assert program.run(replace(request_of, data=(data,))).num_records == 4
    assert not (tmp_path / "out").exists(), "the run is not begun"
    decode = open_tokenizer(directory).decode
    found = [decode(row["tokens"])[:2] for row in rows_of(request_of.output)]
    assert found == ["a0", "a1", "b0", "b1"]
    masks = [(row["is_answer"], row["num_scored"]) for row in rows_of(request_of.output)]
    assert masks == 2 * [([1, 1, 1], 2)] + 2 * [([0, 1, 1], 2)], "a text is learned as a whole"
    as_yaml = tmp_path / "run.yaml"
    as_yaml.write_text(json.dumps(tomllib.loads(data.read_text())))
    again = replace(request_of, data=(as_yaml,), output=tmp_path / "yaml.jsonl")
    assert program.run(again).num_records == 4, "the file of a run is no text to score"
    longer = replace(request_of, data=(data,), max_length=2, output=tmp_path / "longer.jsonl")
    with pytest.raises(ConfigError, match="record 1 has 3 tokens, more than 2"):
        program.run(longer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 10**6}, "top_k: expected 0 to 259"),
        ({"max_length": 3}, r"data\.jsonl: record 3 has 4 tokens, more than 3"),
        ({"data": (EXAMPLES / "make_model.py",)}, r"make_model\.py: record 1 has .* positions"),
        ({"max_length": 1, "data": (EXAMPLES / "make_model.py",)}, "in pieces of at least two"),
        ({"output": Path("out.csv")}, r"expected a \.jsonl or \.parquet file"),
        ({"routing": Path("o.jsonl"), "output": Path("o.jsonl")}, "exists, or is --output"),
        ({"routing": Path("nowhere/census.json")}, "directory does not exist; make it first"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_weights_are_read(
    changes: dict[str, Any], message: str, request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "from_pretrained", None)
    with pytest.raises(ConfigError, match=message):
        program.run(replace(request_of, **changes))


def test_options_are_refused_before_records_are_read(
    request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "read_sequences", None)
    for change in ({"output": Path("x.txt")}, {"dtype": "int4"}, {"routing": request_of.output}):
        with pytest.raises(ConfigError):
            program.run(replace(request_of, **change))


def test_a_record_of_one_token_has_a_row_without_log_probabilities(
    request_of: Request, tmp_path: Path
) -> None:
    data = write(tmp_path / "short.jsonl", {"input_ids": [5]}, {"input_ids": [5, 6]})
    for output in ("short.jsonl.scores.jsonl", "short.parquet"):
        run = replace(request_of, data=(data,), output=tmp_path / output, top_k=2)
        assert program.run(run).num_records == 2
    row, _ = rows_of(tmp_path / "short.jsonl.scores.jsonl")
    assert (row["logprobs"], row["mean_logprob"], row["top_tokens"]) == ([None], None, [[]])


def test_a_full_drive_is_named(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ("replace",), 1, errno.ENOSPC)
    with pytest.raises(StorageError, match=f"{request_of.output}' failed: No space left"):
        program.run(request_of)


def test_rows_of_another_run_are_left_alone(request_of: Request, tmp_path: Path) -> None:
    program.run(request_of)
    rows = request_of.output.read_text()
    with pytest.raises(ConfigError, match="is complete"):
        program.run(request_of)
    with pytest.raises(ConfigError, match="was made with another top_k"):
        program.run(replace(request_of, top_k=1))
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(ConfigError, match="holds preferences"):
        program.run(replace(request_of, data=(pairs,)))
    note = request_of.output.with_name(request_of.output.name + ".made-of.json")
    told = note.read_text()
    note.write_text(told.replace('"config.json"', '"config"'))
    with pytest.raises(ConfigError, match=r"another release, which did not note config\.json"):
        program.run(request_of)
    for damaged in ("", "[]", told[:50], "[" * 10**5):
        note.write_text(damaged)
        with pytest.raises(ConfigError, match=r"made-of\.json cannot be read: .* remove it"):
            program.run(request_of)
    note.write_text(told)
    assert request_of.output.read_text() == rows
    other = tmp_path / "other.jsonl"
    other.write_text("mine\n")
    with pytest.raises(ConfigError, match="not from `infinity score`"):
        program.run(replace(request_of, output=other))
    assert other.read_text() == "mine\n"
    request_of.output.unlink()
    assert program.run(replace(request_of, sweep_tokens=1000)).resumed_at == 0
    assert request_of.output.read_text() == rows


def test_rows_of_an_ended_run_are_neither_taken_over_nor_written_by_two(
    request_of: Request, tmp_path: Path
) -> None:
    request = replace(request_of, output=tmp_path / "out.parquet")

    def begin_another(*_: int) -> None:
        with pytest.raises(ConfigError, match=r"out\.parquet is in use by process"):
            program.run(request)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(request, note=begin_another)
    (tmp_path / "out.parquet.made-of.json").unlink()
    with pytest.raises(ConfigError, match="not from `infinity score`"):
        program.run(replace(request, dtype="bfloat16"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"data.jsonl", "swap.toml", "out.parquet.rows.jsonl"}


def test_a_file_gives_tiers_and_no_adapter_and_its_precision_is_that_of_all_rows(
    request_of: Request, directory: Path, tmp_path: Path
) -> None:
    plain_model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(plain_model, config).save_pretrained(tmp_path / "adapter")
    program.run(request_of)
    tiers = request_of.config.read_text() if request_of.config else ""
    files = {name: tmp_path / f"{name}.toml" for name in ("float32", "bfloat16")}
    for name, path in files.items():
        path.write_text(f'{tiers}[precision]\ncompute = "{name}"\n[adapter]\nresume = "adapter"\n')
    request = replace(request_of, output=tmp_path / "b.jsonl", dtype=None, config=files["float32"])
    with pytest.raises(KeyboardInterrupt):
        program.run(request, note=killed_in_second_sweep())
    with pytest.raises(ConfigError, match="made with another dtype"):
        program.run(replace(request, config=files["bfloat16"]))
    assert program.run(request).resumed_at > 0
    assert request.output.read_text() == request_of.output.read_text()


def test_a_row_holds_no_number_that_json_lacks(request_of: Request, tmp_path: Path) -> None:
    sequence = program.ScoredSequence(0, None, [1, 2])
    scores = [logprobs.TokenScores(logprobs=torch.tensor([v])) for v in (-800.0, math.nan)]
    rows = program.ScoreRows(request_of, {"routing": None})
    with rows.open():
        rows.write([program.row_of(sequence, score) for score in scores])
        rows.end()
    overflowed, unknown = rows_of(request_of.output)
    assert overflowed["perplexity"] is None and overflowed["mean_logprob"] == -800
    assert unknown["logprobs"] == [None, None] and unknown["sum_logprob"] is None


def test_pieces_of_a_text_file_lack_the_begin_of_a_text_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "text.txt").write_text("ab")
    monkeypatch.setattr(ByteTokenizer, "begin", lambda _, text: [1, *text.encode()])
    (found,) = read_sequences([tmp_path / "text.txt"], tmp_path, 256, None)
    assert bytes(found.ids) == b"ab" and "begins a text with a token of its own" in caplog.text


def test_a_model_without_a_tokenizer_reads_bytes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    (found,) = read_sequences([file], tmp_path, 256, None)
    assert bytes(found.ids) == b"<|im_start|>user\nab<|im_end|>\n" and "is bytes" in caplog.text
