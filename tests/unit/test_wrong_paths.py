"""A command refuses a path that leads nowhere before it imports torch, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import imported_by

_COMMANDS = {
    "train swap.toml": "model.path: /nowhere/base is no directory",
    "train swap.toml --set model.path={tmp}": "data.paths: /nowhere/text does not exist",
    "train swap.toml --set model.path={tmp} --set data.paths.0={tmp} --resume-from /nowhere":
        "/nowhere is no checkpoint",
    "train swap.toml --set model.path={tmp} --set data.paths.0={tmp} --set adapter.resume=/no":
        "the saved adapter /no has no adapter_config.json",
    "train swap.toml --set model.path={tmp}/ad": "/ad is an adapter, and no model: give its base b",
    "new {tmp}/ad": "/ad is an adapter, and no model: give its base b, and this directory as",
    "plan nowhere.toml": "nowhere.toml: cannot be read",
    "plan swap.toml": "model.path: /nowhere/base is no directory",
    "plan --model /nowhere/base": "'/nowhere/base' is neither a .toml file nor one of",
    "plan --params 1B --hardware nowhere": "hardware: 'nowhere' is neither",
    "new /nowhere/base": "/nowhere/base/config.json: No such file",
    "new {tmp} --data /nowhere": "--data /nowhere: there is no such file",
    "new {tmp} --sweep rank=2,4 --lora 8": "expected --lora, or the ranks of --sweep; got both",
    "new {tmp} --sweep lr=1e-3,0.001": "--sweep 'lr=1e-3,0.001': expected each value once",
    "generate /nowhere ''": "TEXT: expected the beginning of a text",
    "inspect swap.toml": "swap.toml is no directory",
    "watch swap.toml": "swap.toml has no lines of metrics",
    "inspect /nowhere": "/nowhere is no directory",
    "export /nowhere out": "/nowhere is no checkpoint",
    "merge /nowhere {tmp} -o out": "/nowhere is no directory",
    "merge {tmp} /nowhere -o out": "the saved adapter /nowhere has no adapter_config.json",
    "quantize /nowhere --to nf4 -o out": "/nowhere is no directory",
    "spread /nowhere --over {tmp}": "/nowhere is no directory",
    "doctor nowhere.toml": "nowhere.toml: cannot be read",
    "bench nowhere.toml": "nowhere.toml: cannot be read",
    "tune nowhere.toml": "nowhere.toml: cannot be read",
}  # fmt: skip
_FILE = """
[model]
path = "/nowhere/base"
[data]
paths = ["/nowhere/text"]
sequence_length = 8
[train]
steps = 1
batch_size = 1
[tiers.host]
capacity = "1GiB"
[output]
directory = "out"
"""


def test_commands_refuse_wrong_paths_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ad").mkdir()
    (tmp_path / "ad" / "adapter_config.json").write_text('{"base_model_name_or_path": "b"}')
    (tmp_path / "swap.toml").write_text(_FILE)
    lines = [line.format(tmp=tmp_path) for line in _COMMANDS]
    found, printed = imported_by(
        "import os, shlex, sys\n"
        "from typer.testing import CliRunner\n"
        "from infinity.tools.cli import app\n"
        f"os.chdir({str(tmp_path)!r})\n"
        f"for line in {lines!r}:\n"
        "    done = CliRunner().invoke(app, shlex.split(line))\n"
        "    heavy = [n for n in ('torch', 'transformers') if n in sys.modules]\n"
        "    print(done.exit_code, heavy, ' '.join(done.output.split()))\n",
        ("torch", "transformers"),
    )
    for line, said, result in zip(lines, _COMMANDS.values(), printed.splitlines(), strict=True):
        assert result.startswith("2 [] error: ") and said in result, f"infinity {line}: {result}"
    assert not found
