"""`infinity quantize`: a checkpoint in the published layouts of quantised models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from infinity.checkpoint.huggingface.import_weights import weight_source
from infinity.codecs import AffineGroups, FloatBlocks, Plain, TableBlocks
from infinity.errors import ConfigError, StorageError
from infinity.tools.cli import app
from infinity.tools.convert.quantize import plan_quantize
from infinity.tools.convert.rewrite import write_directory
from tests.support.forked import run_script
from tests.support.quantized import find_logical, tiny_causal_lm, write_quantized

CODECS = {"fp8": FloatBlocks, "int4": AffineGroups, "nf4": TableBlocks}


def quantise(base: Path, out: Path, to: Any) -> None:
    write_directory(plan_quantize(base, to), out)


@pytest.mark.parametrize("to", list(CODECS))
@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "qwen3-moe"])
def test_matrices_are_codes_and_all_else_is_as_before(tmp_path, name, to) -> None:
    write_quantized(tiny_causal_lm(name), tmp_path / "base", "bf16", num_shards=3)
    quantise(tmp_path / "base", tmp_path / "out", to)
    before, after = weight_source(tmp_path / "base"), weight_source(tmp_path / "out")
    assert set(before.names()) == set(after.names()) == set(find_logical(tmp_path / "out"))
    for tensor in before.names():
        codec, old = after.encoded(tensor).codec, before.read(tensor)
        is_projection = "_proj" in tensor and tensor.endswith(".weight")
        assert isinstance(codec, CODECS[to] if is_projection else Plain), tensor
        if not is_projection:
            assert torch.equal(after.read(tensor), old)
            continue
        encoding = CODECS[to]().encode(old)
        expected = torch.empty_like(old)
        encoding.codec.decode(encoding.parts, tuple(old.shape), expected)
        assert torch.equal(after.read(tensor), expected), tensor
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = config["quantization_config"]
    listed = kept.get("modules_to_not_convert") or kept.get("ignore")
    assert "lm_head" in (listed or kept["llm_int8_skip_modules"])
    assert not list(tmp_path.glob(".*"))


def test_the_layouts_are_those_of_the_shipped_writer_of_tests(tmp_path) -> None:
    """Names, dtypes and shapes of every stored tensor, but for the length of JSON."""
    from tests.support.quantized import read_headers

    model = tiny_causal_lm("llama")
    write_quantized(model, tmp_path / "base", "bf16")
    for to, layout in {"fp8": "fp8", "int4": "int4-dense", "nf4": "nf4"}.items():
        write_quantized(model, tmp_path / layout, layout)
        quantise(tmp_path / "base", tmp_path / f"{to}-out", to)

        def facts(path: Path) -> dict[str, Any]:
            return {
                name: (row[0], () if "quant_state" in name else row[1])
                for name, row in read_headers(path).items()
            }

        assert facts(tmp_path / f"{to}-out") == facts(tmp_path / layout)


def test_a_quantised_source_is_decoded_first(tmp_path, caplog) -> None:
    write_quantized(tiny_causal_lm("deepseek-v3"), tmp_path / "fp8", "fp8")
    quantise(tmp_path / "fp8", tmp_path / "int4", "int4")
    assert f"{tmp_path / 'fp8'} is quantised: its weights are rounded a second" in caplog.text
    found = find_logical(tmp_path / "int4")
    assert {type(each.codec) for each in found.values()} == {AffineGroups, Plain}
    table = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert table["quant_method"] == "compressed-tensors"


def test_packed_experts_and_directories_without_matrices_are_refused(tmp_path) -> None:
    write_quantized(tiny_causal_lm("gpt-oss"), tmp_path / "base", "bf16")
    with pytest.raises(ConfigError, match=r"experts\..*packs experts in three dimensions"):
        plan_quantize(tmp_path / "base", "int4")
    with pytest.raises(ConfigError, match="is no directory"):
        plan_quantize(tmp_path / "nowhere", "int4")


@pytest.mark.parametrize("to", ["fp8", "nf4"])
def test_transformers_reads_the_result(tmp_path, to) -> None:
    """Where the library of the format is installed."""
    if to == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    from transformers import AutoConfig
    from transformers.quantizers import AutoQuantizationConfig

    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16")
    quantise(tmp_path / "base", tmp_path / "out", to)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    parsed = AutoQuantizationConfig.from_dict(config.quantization_config)
    assert parsed.quant_method == {"fp8": "fp8", "nf4": "bitsandbytes"}[to]


def test_transformers_decodes_the_same_fp8_weights(tmp_path) -> None:
    """With full blocks, which its own decoding needs."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

    config = LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    quantise(tmp_path / "base", tmp_path / "out", "fp8")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
    )
    source = weight_source(tmp_path / "out")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, source.read(name)), name


def test_a_process_that_is_killed_leaves_no_directory_that_looks_whole(tmp_path) -> None:
    """kill -9 in the middle; then the same command again."""
    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16", num_shards=2)
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from infinity.tools.convert.rewrite import write_directory\n"
        "from infinity.tools.convert.quantize import plan_quantize\n"
        "left = 9\n"
        "def progress(**_):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if not left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_directory(plan_quantize(Path(sys.argv[1]), 'int4'), Path(sys.argv[2]), progress)\n"
    )
    out = tmp_path / "out"
    assert run_script(program, tmp_path / "base", out).returncode == -9
    assert not out.exists() and (tmp_path / ".out.partial").exists()
    quantise(tmp_path / "base", out, "int4")
    assert find_logical(out) and not (tmp_path / ".out.partial").exists()


def test_a_full_drive_is_named_before_anything_is_written(tmp_path, monkeypatch) -> None:
    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16")

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(StorageError, match="the file system has 4.0 KiB free"):
        quantise(tmp_path / "base", tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_sizes(tmp_path) -> None:
    write_quantized(tiny_causal_lm("llama"), tmp_path / "base", "bf16")
    arguments = ["quantize", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--to", "int4"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["nbytes"] < summary["source_nbytes"] / 2
    (tmp_path / "out").rename(tmp_path / "first")
    assert CliRunner().invoke(app, arguments).stderr == "", "a bar is for a terminal"
