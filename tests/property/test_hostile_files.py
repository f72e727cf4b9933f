"""Whatever a file says, its reader answers, with a value or with an error of the package's tree.

One target for each parser. Every target gets texts that are changed at random, and tables in which
one value was replaced by a hostile one. The seed is fixed: a failure is found again.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.bounded import MalformedError
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader
from infinity.checkpoint.huggingface.weight_tensors import find_files
from infinity.checkpoint.run.format import (
    digest_line,
    files_of_bytes,
    parse_manifest,
    parse_table,
)
from infinity.config import SwapConfig
from infinity.config.deepspeed import translate
from infinity.config.source import read_file
from infinity.config.swap import configuration_of
from infinity.errors import InfinityError
from infinity.modules.reading.configuration import config_of_directory
from infinity.observe import chrome
from infinity.observe.step_summary import summarize
from infinity.observe.tracer import Span
from infinity.plan.hardware import load_hardware
from infinity.storage.swap_directory import examine

ROUNDS = 60
HOSTILE: list[Any] = [
    None, True, -1, 0, 1.5, 2**63, 2**200, -(2**63), 1e300, float("nan"), float("inf"), "", ".",
    "..", "../x", "/etc/passwd", "a\0b", "\x1b[2J", "\ud800", "x" * 5000, [], {}, [[]], {"": {}},
    [[[[[[[[]]]]]]]], [-1], [2**62, 2**62], ["a", "a"],
]  # fmt: skip
DEEP = "[" * 20_000 + "]" * 20_000

MANIFEST = {
    "format": "infinity checkpoint", "schema": 3, "step": 4, "created": "now", "written_by": "me",
    "files": [{"name": f"rank-0000{n}/program.pt", "nbytes": 3, "extents": [
        {"name": "all", "kind": "program", "offset_nbytes": 0, "nbytes": 3, "sha256": "0" * 64}]}
        for n in (0, 1)],
    "ranks": ["rank-00000", "rank-00001"],
}  # fmt: skip
TABLE = {"pieces": [{
    "unit": "blocks.0", "piece": "exp_avg", "kind": "moments", "runs": [["a.swap", 4096, 8192]],
    "tensors": [["w.exp_avg", "F32", [4, 6], [6, 1], 0], ["v.exp_avg", "BF16", [100], [1], 96, 10, 20]]}],
}  # fmt: skip
HEADER = {
    "__metadata__": {"format": "pt"},
    "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "v": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
LOCK = {"schema": 1, "job": "0" * 16, "pid": 5, "host": "h", "time": 1.0, "kept": ["a"]}
INDEX = {"metadata": {"total_size": 1}, "weight_map": {"w": "a.safetensors"}}
CONFIG = {
    "tiers": {"host": {"capacity": "1GiB"}, "nvme": [{"path": "swap", "weight": 1}]},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "train": {"steps": 3, "batch_size": 2},
}  # fmt: skip
MODEL = {
    "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 32,
    "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 8, "fp16": {"enabled": False}, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}},
}  # fmt: skip
SPANS = [
    Span("steps", "step 1", 0, 100),
    Span("stalls", "waits", 10, 20, {"transfers": [1], "waits_for": ["w"]}),
    Span("reads /n", "w", 5, 18, {"nbytes": 8, "issued_ns": 6}, 1),
]
HARDWARE = """
name = "m"
source = "s"
[host]
memory = "1GiB"
update_gb_per_s = 1.0
sum_gb_per_s = 1.0
[device]
tflops = 1.0
"""


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read_manifest(content: bytes, place: Path) -> None:
    parse_manifest(content, digest_line(content), path="manifest.json")


def read_rank_files(content: bytes, place: Path) -> None:
    files_of_bytes(content)


def read_linked(content: bytes, place: Path) -> None:
    parse_table(content, path="linked.json")


def read_header(content: bytes, place: Path) -> None:
    whole = struct.pack("<Q", len(content)) + content + bytes(24)
    with SafetensorsReader(_file(place / "a.safetensors", whole)) as reader:
        for name in reader.tensors:
            reader.read(name)


def read_lock(content: bytes, place: Path) -> None:
    _file(place / "infinity.lock", content)
    found = examine(str(place))
    assert found is not None
    json.dumps(found.to_dict())
    assert found.is_newer in (True, False)


def read_index(content: bytes, place: Path) -> None:
    _file(place / "model.safetensors.index.json", content)
    find_files(place)


def _read_config(content: bytes, place: Path, ending: str) -> None:
    table, source = read_file(_file(place / f"a.{ending}", content))
    SwapConfig.from_table(table, source)


def read_config(content: bytes, place: Path) -> None:
    _read_config(content, place, "json")


def read_yaml(content: bytes, place: Path) -> None:
    _read_config(content, place, "yaml")


def read_toml(content: bytes, place: Path) -> None:
    _read_config(content, place, "toml")


def read_deepspeed(content: bytes, place: Path) -> None:
    table, source = read_file(_file(place / "ds.json", content))
    configuration_of(translate(table), source)


def read_model(content: bytes, place: Path) -> None:
    config_of_directory(_file(place / "config.json", content).parent)


def read_trace(content: bytes, place: Path) -> None:
    summarize(chrome.read(_file(place / "trace.json", content)))


def read_hardware(content: bytes, place: Path) -> None:
    load_hardware(str(_file(place / "a.toml", content)))


Target = Callable[[bytes, Path], None]
TABLES: list[tuple[Target, Any]] = [
    (read_manifest, MANIFEST),
    (read_rank_files, MANIFEST["files"]),
    (read_linked, TABLE),
    (read_header, HEADER),
    (read_lock, LOCK),
    (read_index, INDEX),
    (read_config, CONFIG),
    (read_yaml, CONFIG),
    (read_deepspeed, DEEPSPEED),
    (read_model, MODEL),
    (read_trace, chrome.to_document(SPANS, [])),
]
TEXTS: list[tuple[Target, str]] = [
    *((target, json.dumps(table)) for target, table in TABLES),
    (read_hardware, HARDWARE),
    (read_toml, "[tiers.host]\ncapacity = '1GiB'\n[[tiers.nvme]]\npath = 'a'\n"),
]


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in it with every key."""
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(rows):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from places_in(child)


def forged(table: Any, drawn: random.Random) -> bytes:
    """The table with one value replaced or gone, or a table deeper than any."""
    changed = json.loads(json.dumps(table))
    container, key = drawn.choice(list(places_in(changed)))
    if drawn.random() < 0.1:
        del container[key]
    elif drawn.random() < 0.1:
        container[key] = "DEEP"
        return json.dumps(changed).replace('"DEEP"', DEEP).encode()
    else:
        container[key] = drawn.choice(HOSTILE)
    return json.dumps(changed).encode()


def garbled(text: str, drawn: random.Random) -> bytes:
    """The text cut off, with bytes changed, or with a part of it twice."""
    content = bytearray(text.encode())
    start, stop = sorted(drawn.choices(range(len(content)), k=2))
    kind = drawn.randrange(3)
    if kind == 0:
        return bytes(content[:stop])
    if kind == 1:
        return bytes(content[:stop] + content[start:stop] + content[stop:])
    for _ in range(drawn.randint(1, 4)):
        content[drawn.randrange(len(content))] = drawn.randrange(256)
    return bytes(content)


def answers(target: Target, content: bytes, place: Path) -> bool:
    """Whether it accepted the file. Fails for any error that is not of the tree."""
    try:
        target(content, place)
    except (InfinityError, MalformedError):
        return False
    except BaseException as error:
        pytest.fail(f"{target.__name__} of {content[:400]!r}: {error!r}")
    return True


@pytest.mark.parametrize(
    ("target", "table"), TABLES, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_forged_table_is_read_or_refused_by_name(
    tmp_path: Path, target: Target, table: Any
) -> None:
    drawn = random.Random(target.__name__)
    refused = [not answers(target, forged(table, drawn), tmp_path) for _ in range(ROUNDS)]
    assert any(refused) or target is read_lock


@pytest.mark.parametrize(("target", "text"), TEXTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_garbled_text_is_read_or_refused_by_name(
    tmp_path: Path, target: Target, text: str
) -> None:
    drawn = random.Random(target.__name__)
    for _ in range(ROUNDS):
        answers(target, garbled(text, drawn), tmp_path)


def test_an_intact_file_is_read(tmp_path: Path) -> None:
    """Else the tests above would find nothing behind the first check."""
    (tmp_path / "a.safetensors").touch()
    for target, text in TEXTS:
        assert answers(target, text.encode(), tmp_path), target
        (tmp_path / "a.safetensors").touch()


def test_aliases_of_yaml_do_not_expand_without_bound(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    for text in ("\n".join(rows), "a: &a [*a]", "a: &a {b: {<<: *a}}"):
        assert not answers(read_yaml, text.encode(), tmp_path)


@pytest.mark.parametrize("value", [True, 1, 2**2000, [], "x", None, 1e300])
def test_a_section_of_deepspeed_that_is_no_table_is_refused_by_name(
    tmp_path: Path, value: Any
) -> None:
    for table in (DEEPSPEED | {"optimizer": {"type": "AdamW", "params": value}},
                  DEEPSPEED | {"zero_optimization": {"stage": value}},
                  DEEPSPEED | {"scheduler": value, "train_batch_size": value}):  # fmt: skip
        answers(read_deepspeed, json.dumps(table).encode(), tmp_path)


@pytest.mark.parametrize("value", [10**9, -1, 10**30])
def test_a_number_of_layers_that_no_model_has_is_refused_by_its_key(
    tmp_path: Path, value: int
) -> None:
    content = json.dumps(MODEL | {"n_layer": value}).encode()
    with pytest.raises(InfinityError, match="n_layer: expected 1 to"):
        read_model(content, tmp_path)
