"""Every file of a directory that is converted or exported is synced before the directory counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint import export_safetensors
from infinity.checkpoint.durable import make_directory
from infinity.errors import StorageError
from infinity.tools.convert.quantize import plan_quantize
from infinity.tools.convert.rewrite import write_directory
from tests.support.quantized import tiny_causal_lm, write_quantized

from .power_cut import Named, Recorder, Renamed, Synced

TEXTS = {"tokenizer.json": "{}", "LICENSE": "mine", "modeling_x.py": "pass"}


class Tokenizer:
    """Writes a file beside the weights, and one in a directory of its own, as transformers does."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "templates").mkdir(exist_ok=True)
        for name in ("tokenizer.json", "templates/tool.jinja"):
            (directory / name).write_text("{}")


def synced(recorder: Recorder, before: str) -> list[str]:
    """What was synced before the last flush of this name."""
    flushes = [event.what for event in recorder.events if isinstance(event, Synced)]
    last = len(flushes) - 1 - flushes[::-1].index(before)
    return flushes[:last]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    (tmp_path / "root").mkdir()
    return Recorder(tmp_path / "root")


def test_files_that_are_copied_are_synced_before_the_rename(
    recorder: Recorder, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", recorder.root / "out"
    write_quantized(tiny_causal_lm("llama"), base, "bf16", num_shards=2)
    for name, text in TEXTS.items():
        (base / name).write_text(text)
    with recorder.recording():
        write_directory(plan_quantize(base, "int4"), out)
    assert {path.name for path in out.iterdir()} >= TEXTS.keys()
    found = synced(recorder, "a partial directory")
    assert {path.name for path in out.iterdir()} <= set(found)
    (renamed,) = [e for e in recorder.events if isinstance(e, Renamed) and e.new == "out"]
    at = recorder.events.index(renamed)
    assert {event.what for event in recorder.events[:at] if isinstance(event, Synced)} >= set(found)


def test_the_texts_of_an_export_are_synced_before_the_weights_get_their_names(
    recorder: Recorder,
) -> None:
    out = recorder.root / "out"
    out.mkdir()
    (out / "mine.txt").write_text("of the user")
    model: Any = tiny_causal_lm("llama")
    with recorder.recording():
        export_safetensors(model, out, tokenizer=Tokenizer(), max_shard_nbytes=1 << 18)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) > 1
    first = next(index for index, e in enumerate(recorder.events) if isinstance(e, Renamed))
    before = [event.what for event in recorder.events[:first] if isinstance(event, Synced)]
    assert {path.name for path in files} - {"mine.txt"} <= set(before)
    assert "mine.txt" not in before, "the file of the user is left alone"
    assert before[-1] == before[before.index("above them")] == "above them"
    assert before.count("above them") == 3, "where they were written, the tokenizer's, and theirs"
    moved = [index for index, event in enumerate(recorder.events) if isinstance(event, Named)]
    synced = [index for index, event in enumerate(recorder.events) if isinstance(event, Synced)]
    last = max(index for index in synced if index < first)
    texts = {path.name for path in files if "safetensors" not in path.name} - {"mine.txt"}
    assert texts <= {recorder.events[index].name for index in moved if index < last}  # type: ignore[union-attr]


def test_what_stands_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "astray").symlink_to("nowhere/there")
    (tmp_path / "file").touch()
    said = f"{tmp_path}/astray is a link to nowhere/there, which is not there; expected a directory"
    for name in ("astray", "astray/in"):
        with pytest.raises(StorageError, match=said):
            make_directory(tmp_path / name)
    with pytest.raises(StorageError, match=f"{tmp_path}/file is a file; expected a directory"):
        make_directory(tmp_path / "file" / "in")
