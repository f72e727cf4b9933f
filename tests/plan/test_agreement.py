"""What `new` calls possible, `train` loads and takes a step on; what it refuses, `train` refuses with
the same words: every model type of transformers that generates text."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from trl.trainer.utils import add_fused_lm_head
from typer.testing import CliRunner

from infinity.config import JobConfig
from infinity.config.source import read_file
from infinity.errors import InfinityError
from infinity.integrations.hf import name_parts
from infinity.modules.reading.configuration import auto_class
from infinity.tools.cli import app
from infinity.tools.training import program
from infinity.tools.training.model import OTHER_LOGITS
from tests.support.every_type import model_types, tiny_config
from tests.support.exhaustive import sampled

# Blocks called "layer"; towers with layers of their own; parameters outside modules; buffers in
# files; experts; a recurrent one; those that need images, or that PEFT does not adapt.
OFTEN = (
    "bert",
    "doge",
    "idefics2",
    "llava_next",
    "minimax",
    "qwen3_moe",
    "rwkv",
    "idefics",
    "mamba",
)
# `train` fails later, inside TRL: the reason, which `new` does not know.
LATER = {
    "deepseek_v4": "windows of 128 positions do not shrink by the rules of tiny_config",
    "qwen3_omni_moe_thinker": "its class asks for ids that its configuration has in files alone",
    "flint": "TRL takes router losses, and the layers that tiny_config leaves are dense",
}
# Both refuse, each for the first of several reasons, or with an error of transformers.
OTHER_WORDS = ("blt", "pi0")
MACHINE = """
name = "a small machine"
source = "made up"
host = { memory = "16GB", update_gb_per_s = 10, sum_gb_per_s = 10 }
device = { tflops = 0.1 }
nvme = { capacity = "1TB", read_gb_per_s = 2.0, write_gb_per_s = 1.0 }
"""


def saved(model_type: str, directory: Path) -> None:
    """A tiny random model; skips a type without a class, and one whose sizes do not shrink by these
    rules: transformers cannot build it, or its own forward fails."""
    try:
        config = tiny_config(model_type)
        torch.manual_seed(0)
        model = auto_class(config, "").from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > 32e6:
            pytest.skip("not tiny by these rules")
        model.save_pretrained(directory)
        ids = torch.ones(1, 32, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False)
    except Exception as error:
        asks = isinstance(error, TypeError | ValueError) and directory.is_dir()  # For images.
        if not asks:
            pytest.skip(f"not tiny by these rules: {error}")


def asked(directory: Path, options: tuple[str, ...]) -> tuple[Path, str]:
    """The file that `new` writes, and its words where it refuses. Then the file says the same."""
    (directory / "machine.toml").write_text(MACHINE)
    (directory / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(99)))
    file = directory / "run.toml"
    words = ["new", directory / "base", "--data", directory / "text.txt", "--sequence", 32,
             "--batch", 2, "--hardware", directory / "machine.toml", "-o", file, *options]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exit_code == 0:
        return file, ""
    assert result.exit_code == 2, result.exception
    adapter = "" if options else "adapter.rank = 2\n"
    file.write_text(
        f'model.path = "{directory}/base"\noutput.directory = "{directory}/out"\n{adapter}'
        f'data = {{paths = ["{directory}/text.txt"], sequence_length = 32}}\n'
        "train = {steps = 1, batch_size = 2}\n"
    )
    return file, " ".join(result.output.split())


def one_step(file: Path) -> None:
    table: dict[str, Any] = read_file(file)[0]
    table["train"] = {key: table["train"][key] for key in ("batch_size",)} | {"steps": 1}
    table["data"]["held_out"] = 0.0
    table.pop("checkpoint", None)
    console = Console(file=io.StringIO(), width=200)
    assert program.train(JobConfig.load(table), console=console)[1] == 0


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *sampled(((kind, ()) for kind in model_types()), lambda case: case[0] in OFTEN),
        *sampled(((kind, ("--full",)) for kind in model_types()), lambda case: False),
    ],
)
def test_new_and_train_agree(model_type: str, options: tuple[str, ...], tmp_path: Path) -> None:
    saved(model_type, tmp_path / "base")
    file, refusal = asked(tmp_path, options)
    if not refusal and model_type in LATER:
        pytest.xfail(LATER[model_type])
    if refusal:
        with pytest.raises(Exception if model_type in OTHER_WORDS else InfinityError) as caught:
            one_step(file)
        said = " ".join(str(caught.value).split())
        assert said in refusal or model_type in OTHER_WORDS, (said, refusal)
    else:
        one_step(file)


# TRL scales their logits by the factor of their text model, and transformers forgets to.
SCALED = ("aya_vision", "cohere2_vision")


@pytest.mark.parametrize("model_type", sampled(model_types(), ("bert", "qwen3_moe").__contains__))
def test_a_model_that_is_not_refused_has_in_trl_the_loss_of_its_logits(
    model_type: str, tmp_path: Path
) -> None:
    saved(model_type, tmp_path / "base")
    config = tiny_config(model_type)
    model = auto_class(config, "").from_config(config).float().eval()
    name_parts(model)
    add_fused_lm_head(model)
    ids, is_equal = torch.randint(3, 50, (2, 24)), False
    with torch.no_grad():
        try:
            model.get_output_embeddings().weight.mul_(40)  # So that caps show.
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        except Exception as error:
            pytest.skip(f"no model of tokens alone: {error}")
        with contextlib.suppress(RuntimeError, AttributeError):  # Shapes that no head has.
            found = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
            expected = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            is_equal = bool(torch.isclose(found, expected, rtol=1e-4))
    assert (is_equal or model_type in SCALED) == (model_type not in OTHER_LOGITS)
