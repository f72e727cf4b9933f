"""`infinity new`: a file that fits the machine, and that trains as it is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from infinity.codecs.detect import scheme_of
from infinity.config import SwapConfig
from infinity.config.hub import download_remedy
from infinity.errors import ConfigError
from infinity.modules.reading import configuration
from infinity.observe import Counters
from infinity.plan.directory import read_directory
from infinity.plan.files import shapes_remedy
from infinity.plan.frozen_base import stored_nbytes, stored_of_shape
from infinity.plan.model import load_model, load_shape
from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.host import HostPool
from infinity.tools.cli import app
from infinity.tools.plan.data_facts import DataFacts, read_data, train_keys
from infinity.tools.plan.draft import Wish, draft
from infinity.tools.plan.measure import measure_device
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.forked import COMMAND, run_script

PAIRS = str(Path(__file__).parents[2] / "examples" / "pairs.jsonl")
RUNNER = CliRunner()
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 12, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4_GROUP = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "group_size": 32,
        "symmetric": True,
        "strategy": "group",
        "type": "int",
    },
}
KIMI = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": INT4_GROUP},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
# One that computes on the host, as the machine of a test does.
MACHINE = """
name = "a small machine"
source = "made up"
host = {{memory = "{memory}", update_gb_per_s = 10, sum_gb_per_s = 10}}
device = {{tflops = 0.1}}
nvme = {{capacity = "1TB", read_gb_per_s = 2.0, write_gb_per_s = 1.0}}
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE.format(memory="16GB"))
    return file


def config_only(directory: Path, table: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(table))
    return directory


def run(*arguments: object) -> Any:
    return RUNNER.invoke(app, ["new", *map(str, arguments)])


def wish(**changes: Any) -> Wish:
    settings: dict[str, Any] = {
        "model": Path("/m"), "max_positions": 4096, "rank": 16, "experts": False, "data": None,
        "data_paths": (Path("/d/chat.jsonl"),), "swap": (Path("/s"),), "output": Path("/o"),
    }  # fmt: skip
    return Wish(**settings | changes)


def chats(count: int, longest: int) -> DataFacts:
    return DataFacts("conversations", count, count * longest // 2, longest, True)


EVERYWHERE = ("self_attn.q_proj", "mlp.gate_proj", "mlp.shared_experts.up_proj",
              "mlp.experts.3.down_proj")  # fmt: skip
ORDERED = {**INT4_GROUP["weights"], "symmetric": False, "actorder": "group"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def formats_in(quantization: dict[str, Any], layer: int = 7) -> dict[str, str]:
    by_module = scheme_of(quantization, "m").by_module()
    found = {name: by_module([f"model.layers.{layer}.{name}"]) for name in EVERYWHERE}
    return {name: form for name, form in found.items() if form}


@pytest.mark.parametrize(
    ("quantization", "name", "modules"),
    [
        (FP8, "fp8-128x128", EVERYWHERE),
        (KIMI, "int4-g32", EVERYWHERE[3:]),
        ({**KIMI, "config_groups": {"a": {"targets": ["Linear"], "weights": ORDERED}}},
         "int4-g32-zeros-order", EVERYWHERE[3:]),
        ({"quant_method": "mxfp4"}, "mxfp4", EVERYWHERE[3:]),
        *(
            (
                {"quant_method": method, "bits": bits, "group_size": group},
                f"{method}-int{bits}-g{group}",
                EVERYWHERE,
            )
            for method, bits, group in (("gptq", 4, 128), ("gptq", 8, -1), ("awq", 4, 64))
        ),
        (NF4, "nf4-single", EVERYWHERE),
        ({**NF4, "bnb_4bit_use_double_quant": True}, "nf4", EVERYWHERE),
    ],
)  # fmt: skip
def test_the_format_of_a_checkpoint_is_known_before_it_is_downloaded(
    quantization: dict[str, Any], name: str, modules: tuple[str, ...]
) -> None:
    assert formats_in(quantization) == dict.fromkeys(modules, name)
    assert stored_nbytes(name, 128, 256) > 128 * 128


def test_parts_with_other_bits_and_without_codes_are_counted_so() -> None:
    attention, dense, shared, experts = EVERYWHERE
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    dynamic = {"-:.*self_attn.*": {}, "+:.*experts.*": {"bits": 8, "group_size": 64}}
    assert formats_in({**gptq, "dynamic": dynamic}) == {
        dense: "gptq-int4-g128", shared: "gptq-int8-g64", experts: "gptq-int8-g64"
    }  # fmt: skip
    rounded = {"quant_method": "auto-round", "bits": 2, "group_size": 128, "extra_config": {
        ".*self_attn.*": {"bits": 4}, ".*experts.*": {"bits": 16},
    }}  # fmt: skip
    assert formats_in(rounded) == {attention: "gptq-int4-g128", dense: "gptq-int2-g128"}
    # AutoRound lists each router, by a name that begins those of the dense layers; and one layer.
    rounded["extra_config"] = {"model.layers.7.mlp.gate": {"bits": 16},
                               "model.layers.7.self_attn.q_proj": {"bits": None}}  # fmt: skip
    assert set(formats_in(rounded)) == {dense, shared, experts}
    assert set(formats_in(rounded, layer=8)) == set(EVERYWHERE)


def test_writers_that_name_modules_or_groups_of_them_are_counted_so() -> None:
    attention, dense, shared, experts = EVERYWHERE
    layers = {
        f"model.layers.7.{module}": {"quant_algo": algorithm}
        for module, algorithm in ((attention, "FP8"), (experts, "NVFP4"))
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    fp8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
    groups = {
        "a": {"targets": ["Linear"], "format": "float-quantized", "weights": fp8},
        "b": {**INT4_GROUP, "targets": ["re:.*experts.*"], "format": "pack-quantized"},
    }
    quark = {"weight": {"dtype": "fp4", "scale_format": "e8m0"}}
    int4 = {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 128}}
    rows, four = "fp8-1x0-bf16", "int4-g32"
    for table, formats in [
        ({"quant_method": "modelopt", **mixed}, {attention: "fp8-0x0", experts: "nvfp4"}),
        ({"quant_method": "compressed-tensors", "config_groups": groups},
         {attention: rows, dense: rows, shared: four, experts: four}),
        ({"quant_method": "quark", "global_quant_config": quark, "exclude": ["*self_attn*"]},
         {dense: "mxfp4", shared: "mxfp4", experts: "mxfp4"}),
        ({"quant_method": "quark", "global_quant_config": quark,
          "layer_quant_config": {"*.experts.*": int4}},
         {**dict.fromkeys(EVERYWHERE, "mxfp4"), experts: "quark-int4-g128"}),
        ({"bits": 4, "group_size": 64, f"model.layers.7.{dense}": {"bits": 8},
          "model.layers.7.self_attn": False},
         {dense: "mlx-int8-g64", shared: "mlx-int4-g64", experts: "mlx-int4-g64"}),
    ]:  # fmt: skip
        assert formats_in(table) == formats
    assert formats_in({"quant_method": "modelopt", **mixed}, layer=8) == {}


def test_a_quantisation_without_a_codec_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gptq"):
        scheme_of({"quant_method": "gptq"}, "m")


def test_a_directory_with_config_json_alone_has_the_bytes_of_its_format(tmp_path: Path) -> None:
    shape = load_shape("deepseek-v3")
    table = {"model_type": "deepseek_v3", "tie_word_embeddings": False, "quantization_config": FP8}
    found = read_directory(config_only(tmp_path / "v3", table))
    assert found.stored.nbytes == stored_of_shape(shape).nbytes
    assert found.stored.is_quantised and found.files == () and found.shape.max_positions is not None
    assert "not downloaded" in found.stored.formats
    left_out = {**FP8, "modules_to_not_convert": ["model.layers.1.mlp"]}
    table["quantization_config"] = left_out
    other = read_directory(config_only(tmp_path / "other", table)).stored
    parts = found.stored.parts.items()
    assert [key for key, part in parts if part != other.parts[key]] == [(1, False)]
    for writer, said in (("4.57.1", "(attention, experts), rest"), ("5.2.0", "(attention), rest")):
        table = {"model_type": "qwen3_moe", "transformers_version": writer}
        packed = config_only(tmp_path / writer, table | {"quantization_config": NF4})
        assert said in read_directory(packed).stored.formats


def test_sequences_are_as_long_as_the_data_and_steps_are_one_pass() -> None:
    found = draft(wish(data=chats(1000, 700)), None, spills=False).config
    assert found.data is not None and found.train is not None
    assert found.data.sequence_length == 768
    assert found.data.held_out == 0.01
    per_step = found.train.batch_size * found.train.gradient_accumulation_steps
    assert found.train.steps == -(-990 // per_step)
    assert found.train.batch_size * found.data.sequence_length <= 4096
    cut = draft(wish(data=chats(1000, 9000)), None, spills=False)
    assert cut.config.data is not None and cut.config.data.sequence_length == 4096
    assert "are cut" in cut.notes["data.sequence_length"]


def test_little_data_make_small_steps_and_none_is_held_out() -> None:
    found = draft(wish(data=chats(8, 100), passes=3), None, spills=False).config
    assert found.train is not None and found.data is not None
    assert (found.train.steps, found.train.batch_size) == (24, 1)
    assert found.data.held_out == 0 and not found.train.eval_every


def test_each_rank_has_its_part_of_a_step() -> None:
    found = draft(wish(data=chats(100_000, 1000), num_ranks=8), None, spills=False)
    train = found.config.train
    assert train is not None
    of_a_rank = train.batch_size * train.gradient_accumulation_steps
    assert of_a_rank == 16 and found.steps == -(-99_000 // (8 * of_a_rank))
    assert (
        "of each of 8 ranks; a step has 128 sequences"
        in (found.notes["train.gradient_accumulation_steps"])
    )
    few = draft(wish(data=chats(200, 1000), num_ranks=8), None, spills=False)
    assert few.config.train is not None
    assert few.config.train.batch_size * few.config.train.gradient_accumulation_steps == 1
    asked = draft(wish(sequences=32, num_ranks=8), None, spills=False).config.train
    assert asked is not None and asked.batch_size * asked.gradient_accumulation_steps == 4


def test_a_file_for_ranks_says_how_to_start_them(tmp_path: Path, machine: Path) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3 | {"num_hidden_layers": 4})
    file = tmp_path / "a run.toml"
    options = ("--hardware", machine, "--ranks", 2, "-o", file)
    result = run(directory, "--batch", 3, *options)
    assert result.exit_code == 2 and "a multiple of --ranks 2" in result.stderr
    result = run(directory, *options)
    assert result.exit_code == 0, result.output
    command = f"torchrun --nproc-per-node 2 -m infinity train {shlex.quote(str(file))}"
    assert f"next: {command}" in result.output
    assert "#   torchrun --nproc-per-node 2 -m infinity train 'a run.toml' " in file.read_text()
    assert "#   infinity plan 'a run.toml' --ranks 2 " in file.read_text()
    other = tmp_path / "by plan.toml"
    written = ("plan", "--model", str(directory), "--hardware", str(machine), "--lora", "16")
    RUNNER.invoke(app, [*written, "--ranks", "2", "--write", str(other)], catch_exceptions=False)
    assert "torchrun --nproc-per-node 2" in other.read_text()
    planned = RUNNER.invoke(app, ["plan", str(file), "--ranks", "2", "--hardware", str(machine)])
    assert planned.exit_code == 0, planned.output
    more = run(directory, "--hardware", "1xh200-4nvme", "--ranks", 2, "-o", tmp_path / "b.toml")
    assert more.exit_code == 2 and "--hardware names a machine" in more.stderr
    all_devices = run(directory, "--hardware", "8xh200-8nvme", "-o", tmp_path / "c.toml")
    assert "next: torchrun --nproc-per-node 8 -m infinity train" in all_devices.output


def test_columns_that_are_not_learned_count_for_nothing(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a" * 50}, {"role": "assistant", "content": "b" * 50}]
    counts = []
    for name, more in (("plain", {}), ("more", {"prompt": "a" * 5000, "source": "x" * 5000})):
        file = tmp_path / f"{name}.jsonl"
        file.write_text((json.dumps({"messages": turns} | more) + "\n") * 3)
        counts.append(read_data([file], ByteTokenizer()))
    assert counts[0] == counts[1] and counts[0].num_records == 3
    assert not counts[0].is_exact, "what a template writes around a message is guessed"


def test_data_that_train_would_refuse_are_refused(tmp_path: Path) -> None:
    labels = ["good", 1], [0, 2], ["good", "good"], [0, None], [0.5, 1.5]
    contents = (
        ("empty.txt", "", "has no token"), ("list.json", "[]", "has no records"),
        ("empty.jsonl", "", "is empty"), ("blank.jsonl", "\n \n", "has no records"),
        ("asked.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "has no token to learn"),
        ("second.jsonl", '{"text": "a"}\n{"text": []}', "record 2: text"),
        *((f"{i}.jsonl", labelled(pair), "cannot be told apart") for i, pair in enumerate(labels)),
        ("stray.jsonl", labelled(["a", None]), "'a' in record 1 .*, none in record 2 of stray"),
    )  # fmt: skip
    for name, text, said in contents:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name}.* {said}"):
            read_data([tmp_path / name], ByteTokenizer())


def labelled(labels: list[Any]) -> str:
    return "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels)


def test_records_decide_the_method(tmp_path: Path) -> None:
    answers = {"prompt": "a" * 9, "chosen": "b" * 90, "rejected": "c" * 70}
    pair = {"anchor": "a" * 80, "positive": "b" * 9}
    head = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    model = config_only(tmp_path / "head", head | {"id2label": {"0": "yes", "1": "no", "2": "x"}})
    classify, ranking = {"method": "classify"}, "MultipleNegativesRankingLoss"
    for text, base, keys, num_tokens in (
        (labelled(["no", "yes", "no"]), None, classify | {"labels": ["no", "yes"]}, 49),
        (labelled(["no", "yes"]), model, classify | {"labels": ["yes", "no", "x"]}, 49),
        (labelled(["a", "b"]), model, classify | {"labels": ["a", "b"]}, 49),
        (labelled([1, 0]), None, classify | {"labels": ["0", "1"]}, 49),
        (labelled([2, 0]), model, classify | {"labels": ["yes", "no", "x"]}, 49),
        (labelled([None]), None, {}, 49),
        (json.dumps(answers), None, {"method": "dpo"}, 99 + 48),
        (json.dumps(pair), None, {"method": "embed", "embed": {"loss": ranking}}, 80 + 24),
        (json.dumps({"input_ids": [7] * 200}), None, {}, 200),
    ):
        (file := tmp_path / "data.jsonl").write_text(text)
        assert train_keys([file], base) == keys
        found = read_data([file], ByteTokenizer(), train=keys)
        assert (found.train, found.longest) == (keys, num_tokens)


@pytest.mark.parametrize(("file", "content", "said"), [
    ("generation_config.json", "[1]", "generation_config.json cannot be used"),
    ("tokenizer.json", "{", "data.tokenizer: .* cannot be loaded"),
    ("chat_template.jinja", "{{ no( }}", "record 1: the chat template refuses this conversation"),
    ("tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
     "has no token for padding or the end of a text"),
    ("chat.jsonl", json.dumps({"text": "a"}), "data.paths: token 97 .* vocabulary of 64"),
])  # fmt: skip
def test_files_that_train_would_refuse_are_refused(
    file: str, content: str, said: str, machine: Path, tmp_path: Path
) -> None:
    model = config_only(tmp_path / "model", QWEN3 | {"vocab_size": 64})
    ByteTokenizer().for_records().save_pretrained(model)
    place = tmp_path if file == "chat.jsonl" else model
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (place / file).write_text(content)
    data = ["--data", tmp_path / "chat.jsonl"] * file.startswith("chat")
    refused = run(model, *data, "--hardware", machine, "-o", tmp_path / "new.toml")
    assert refused.exit_code == 2 and re.search(said, " ".join(refused.output.split()))
    if file == "tokenizer_config.json":  # Plain text is not filled.
        (tmp_path / "a.txt").write_text("\n" * 4000)
        data = ["--data", tmp_path / "a.txt"]
        written = run(model, *data, "--hardware", machine, "-o", tmp_path / "new.toml")
        assert written.exit_code == 0, written.output


def test_state_spills_only_where_memory_is_short(tmp_path: Path) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    hardware = tmp_path / "large.toml"
    hardware.write_text(MACHINE.format(memory="512GB"))
    assert (
        run(directory, "--full", "--hardware", hardware, "-o", tmp_path / "a.toml").exit_code == 0
    )
    large = SwapConfig.load(tmp_path / "a.toml")
    assert not large.tiers.nvme and large.placement.moments == ("host",)
    hardware.write_text(MACHINE.format(memory="32GB"))
    result = run(directory, "--full", "--hardware", hardware, "--swap", tmp_path / "drive",
                 "-o", tmp_path / "b.toml")  # fmt: skip
    assert result.exit_code == 0, result.output
    small = SwapConfig.load(tmp_path / "b.toml")
    assert [tier.path for tier in small.tiers.nvme] == [tmp_path / "drive"]
    assert small.placement.moments == ("host", "nvme") and small.adapter is None
    assert "bind" in result.output


def test_long_sequences_get_a_smaller_window_and_then_slices(tmp_path: Path) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3 | {"max_position_embeddings": 1 << 20})
    files = []
    for length in (16_384, 45_000, 90_000):
        files.append(tmp_path / f"{length}.toml")
        written = run(
            directory, "--hardware", "rtx4090-1nvme", "--sequence", length, "-o", files[-1]
        )
        assert written.exit_code == 0, written.output
    plain, small, sliced = map(SwapConfig.load, files)
    assert [c.train and c.train.mlp_tokens for c in (plain, small, sliced)] == [None, None, 8192]
    assert plain.tiers.device != small.tiers.device == sliced.tiers.device
    refused = run(directory, "--hardware", "rtx4090-1nvme", "--sequence", 1 << 20, "-o", "-")
    assert "the activations of one block take about" in refused.output


def test_what_does_not_fit_is_refused_with_the_key_and_nothing_is_written(
    tmp_path: Path, machine: Path
) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    machine.write_text(machine.read_text().replace("1TB", "1GB"))
    file = tmp_path / "run.toml"
    result = run(directory, "--full", "--hardware", machine, "-o", file)
    assert result.exit_code == 2 and "change tiers.nvme" in result.stderr
    assert not file.exists()


def test_an_existing_file_is_never_overwritten(tmp_path: Path, machine: Path) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    file = tmp_path / "run.toml"
    file.write_text("mine")
    result = run(directory, "--hardware", machine, "-o", file)
    assert result.exit_code == 2 and "already exists" in result.stderr
    assert file.read_text() == "mine"


def test_a_name_of_the_hub_gets_the_download_command() -> None:
    result = run("Qwen/Qwen3-0.6B")
    assert result.exit_code == 2
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in result.stderr
    planned = RUNNER.invoke(app, ["plan", "--model", "Qwen/Qwen3-0.6B"])
    assert "hf download Qwen/Qwen3-0.6B" in planned.stderr


@pytest.mark.parametrize("command", [["plan"], ["plan", "--model"], ["new"]], ids=" ".join)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Meta-Llama/llama-3.1-405b", "llama-3-405b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
    ],
)
def test_a_name_of_the_hub_whose_shapes_are_shipped_gets_the_option_that_plans_them(
    command: list[str], name: str, shapes: str
) -> None:
    result = RUNNER.invoke(app, [*command, name])
    assert result.exit_code == 2
    assert f"`infinity plan --model {shapes}` plans the shapes of" in result.stderr
    assert f"hf download {name} --local-dir" in result.stderr


def test_shapes_of_another_model_of_the_hub_are_not_offered() -> None:
    for name in ("Qwen/Qwen3-8Bx", "Qwen/Qwen3-0.6B", "deepseek-ai/DeepSeek-V3.1", "x/Qwen3-8B"):
        assert shapes_remedy(name) == download_remedy(name) != ""


def test_a_directory_in_the_place_of_a_file_is_said_to_be_a_model(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 2
    assert f"infinity plan --model {tmp_path}" in result.stderr


def test_a_mistyped_directory_is_no_name_of_the_hub(tmp_path: Path) -> None:
    assert download_remedy(tmp_path / "modle") == ""
    assert download_remedy("modle") == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--full", "--lora", "8"), "Leave one out"),
        (("--experts",), "no routed experts"),
        (("-o", "run.yaml"), "ends in .toml"),
        (("-o", "/nowhere/run.toml"), "make it first"),
        (("--data", "/nowhere.jsonl"), "no such file"),
        (("--sequence", "50000"), "40960 positions"),
        (("--sweep", "depth=3"), "once for each of lr, rank, alpha, dropout, seed"),
        (("--sweep", "rank=8", "--sweep", "rank=9"), "once for each of"),
        (("--sweep", "rank=8,many"), "expected numbers"),
        (("--sweep", "rank=8", "--full"), "for adapters without experts"),
        (("--sweep", "rank=8", "--data", PAIRS), "--sweep: several adapters train by 'sft' alone"),
        (("--batch", "4", "--hardware", "8xh200-4nvme"), "of 8 (--ranks: one for each device of"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run(config_only(tmp_path / "qwen3", QWEN3), *arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_json_and_standard_output_have_the_same_configuration(
    tmp_path: Path, machine: Path
) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    printed = run(directory, "--hardware", machine, "-o", "-")
    file = tmp_path / "printed.toml"
    file.write_text(printed.stdout)
    found = json.loads(run(directory, "--hardware", machine, "-o", "-", "--json").stdout)
    assert found["answer"]["fits"] and found["file"] is None
    assert SwapConfig.load(file) == SwapConfig.load(found["config"])
    quiet = run(directory, "--hardware", machine, "-o", tmp_path / "quiet.toml", "--quiet")
    assert quiet.exit_code == 0 and quiet.output == ""


def test_the_plan_and_the_check_of_the_run_read_the_configuration_once_each(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = config_only(tmp_path / "qwen3", QWEN3), []
    (tmp_path / "text.txt").write_text("some text\n" * 99)
    plain = configuration.published_config

    def counted(path: Path, **options: Any) -> Any:
        asked.append(path)
        return plain(path, **options)

    monkeypatch.setattr(configuration, "published_config", counted)
    run(directory, "--hardware", machine, "--data", tmp_path / "text.txt", "-o", "-")
    assert asked == [directory, directory]


def test_a_sweep_is_an_adapter_for_each_combination(tmp_path: Path, machine: Path) -> None:
    """Planned with the parameters and batches of all; each entry is read as it is written."""
    directory, options = config_only(tmp_path / "qwen3", QWEN3), ("--hardware", machine, "-o")
    plain, file = run(directory, *options, "-", "--json"), tmp_path / "swept.toml"
    sweep = ("--sweep", "lr=1e-4,3e-4", "--sweep", "rank=8,32")
    assert run(directory, *options, file, *sweep).exit_code == 0
    assert file.read_text().count("[[adapter]]") == 4
    found = SwapConfig.load(file).of_adapters()
    assert [(c.adapter and c.adapter.name, c.optimizer.lr) for c in found] == [
        ("lr1e-4-rank8", 1e-4), ("lr1e-4-rank32", 1e-4), ("lr3e-4-rank8", 3e-4),
        ("lr3e-4-rank32", 3e-4),
    ]  # fmt: skip
    assert [c.adapter and (c.adapter.rank, c.adapter.alpha) for c in found[:2]] == [
        (8, 16.0), (32, 64.0),
    ]  # fmt: skip
    swept = run(directory, *options, "-", *sweep, "--json")
    seconds = [json.loads(said.stdout)["answer"]["step_s"] for said in (plain, swept)]
    assert seconds[1] > 2 * seconds[0]


def moe(directory: Path, *, is_quantised: bool) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    from infinity.tools.convert.quantize import plan_quantize
    from infinity.tools.convert.rewrite import write_directory

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, intermediate_size=64, moe_intermediate_size=64,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain = directory.with_name(f"{directory.name}-bf16") if is_quantised else directory
    model.save_pretrained(plain)
    if is_quantised:
        write_directory(plan_quantize(plain, "int4"), directory)
    return directory


@pytest.mark.parametrize(
    ("is_quantised", "options"),
    [
        pytest.param(True, (), marks=pytest.mark.exhaustive, id="adapter over INT4"),
        pytest.param(True, ("--experts",), id="adapter of experts over INT4"),
        pytest.param(False, ("--full",), id="all weights"),
    ],
)
def test_the_file_trains_as_it_is(
    tmp_path: Path, machine: Path, is_quantised: bool, options: tuple[str, ...]
) -> None:
    directory, data = moe(tmp_path / "moe", is_quantised=is_quantised), tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "What is a unit?"},
             {"role": "assistant", "content": "Parameters that move together."}]  # fmt: skip
    data.write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    file = tmp_path / "run.toml"
    result = run(directory, "--data", data, "--hardware", machine, "-o", file, *options)
    assert result.exit_code == 0, result.output
    assert "4 conversations" in result.output and "4 steps" in result.output
    assert RUNNER.invoke(app, ["config", "check", str(file)]).exit_code == 0
    trained = run_script(COMMAND, "train", file, "--json")  # It owns its streams.
    assert trained.returncode == 0, trained.stderr
    name = "model.safetensors" if "--full" in options else "adapter_model.safetensors"
    assert (tmp_path / "run-output" / name).is_file()


def test_the_rates_of_a_device_with_its_own_memory_are_measured() -> None:
    model = load_model("gpt-10b", torch.bfloat16)
    counters, device = Counters(), SimulatedDevice(delay_s=1e-5)
    with Arena(256 * MIB, huge_pages=False) as arena:
        host = HostPool(arena, counters)
        device.open(host, counters)
        try:
            found = measure_device(device, host, model, 2e12, 1 << 30)
        finally:
            device.close()
    assert (found.tflops, found.memory) == (2.0, 1 << 30)
    assert found.h2d_gb_per_s and found.d2h_gb_per_s and found.update_gb_per_s


def test_a_plan_of_a_file_counts_one_pass_for_all_micro_batches_of_an_adapter(
    tmp_path: Path,
) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    file = tmp_path / "run.toml"
    assert run(directory, "--hardware", "rtx4090-1nvme", "-o", file).exit_code == 0
    options = ("--hardware", "rtx4090-1nvme", "--json", "--set")
    planned = [
        json.loads(
            RUNNER.invoke(
                app, ["plan", str(file), *options, f"train.gradient_accumulation_steps={count}"]
            ).stdout
        )["batch"]
        for count in (2, 8)
    ]
    assert [batch["num_micro_batches"] for batch in planned] == [1, 1]
    assert planned[1]["tokens_per_step"] == 4 * planned[0]["tokens_per_step"]


def test_weights_that_are_there_are_read_by_their_headers(tmp_path: Path) -> None:
    directory = config_only(tmp_path / "qwen3", QWEN3)
    save_file({"model.embed_tokens.weight": torch.zeros(4)}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the model expects \(151936, 4096\)"):
        read_directory(directory)


@pytest.mark.parametrize(
    ("memory", "ratio", "is_wide"),
    [("64GB", 8, True), ("64GB", 1.2, False), ("8GB", 8, False)],
    ids=["much faster", "little faster", "not in memory"],
)
def test_a_processor_that_is_slow_in_the_dtype_of_the_model_computes_in_fp32(
    tmp_path: Path, memory: str, ratio: float, is_wide: bool
) -> None:
    """Without a unit for bf16 a processor takes ten times as long in it."""
    directory = config_only(tmp_path / "model", QWEN3)
    hardware = tmp_path / "slow.toml"
    rates = f"tflops = 0.1, float32_tflops = {0.1 * ratio}"
    hardware.write_text(MACHINE.format(memory=memory).replace("tflops = 0.1", rates))
    said = json.loads(run(directory, "--hardware", hardware, "-o", "-", "--json").stdout)
    assert said["config"].get("precision") == ({"compute": "float32"} if is_wide else None)
    assert said["hardware"]["device"]["tflops"] == pytest.approx(0.1 * ratio if is_wide else 0.1)
    text = run(directory, "--hardware", hardware, "-o", "-").stdout
    assert ("# 8 times as fast on this processor" in text) is is_wide
