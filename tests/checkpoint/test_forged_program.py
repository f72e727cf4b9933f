"""`program.pt` from a stranger: it runs nothing, takes no memory, and is refused by name."""

from __future__ import annotations

import collections
import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint.run.load import check_kinds, load_plain, pack_program, parse_program
from infinity.errors import ConfigError, CorruptionError
from tests.support.bits import assert_same
from tests.support.forked import run_script

GOOD: dict[str, Any] = {
    "optimizer": None, "scheduler": None, "random": None,
    "extra": {
        "weights": torch.ones(8), "table": collections.OrderedDict(a=1), "set": {1, 2},
        "kind": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"),
        "bytes": b"\x00\xff", "empty": torch.empty(0), "wide": torch.ones(2, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.ones(3)), "text": "é" * 100, "nothing": None,
        "view": torch.arange(6.0)[::2], "narrow": torch.ones(2, dtype=torch.float8_e4m3fn),
    },
}  # fmt: skip


def packed(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def with_extra(value: Any) -> bytes:
    return packed(GOOD | {"extra": {"x": value}})


def rewritten(change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed(GOOD))) as source,
        zipfile.ZipFile(target, "w", method) as changed,
    ):
        for info in source.infolist():
            changed.writestr(info.filename, change(info.filename, source.read(info)))
    return target.getvalue()


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def nested(count: int, width: int) -> Any:
    value: Any = [0]
    for _ in range(count):
        value = [value] * width
    return value


def twice() -> bytes:
    """An archive with two pickles; torch reads names without regard to case."""
    content = io.BytesIO(packed(GOOD))
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr("archive/DATA.pkl", pickle.dumps(GOOD, 2))
    return content.getvalue()


FORGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a tensor that expands": (
        lambda: rewritten(lambda name, part: bytes(1 << 28) if name.endswith("data/0") else part),
        "larger than the file",
    ),
    "a pickle that expands": (
        lambda: rewritten(lambda name, part: b"\x80\x02" + b"N0" * (1 << 25) + b"N."),
        "larger than the file",
    ),
    "compressed": (lambda: rewritten(lambda name, part: part), "is compressed"),
    "many operations": (
        lambda: rewritten(lambda name, part: b"\x80\x02" + b"N0" * (1 << 22) + b"N.", 0),
        "more than 4000000 operations",
    ),
    "many lists": (
        lambda: rewritten(lambda name, part: b"\x80\x02" + b"]" * (1 << 23) + b".", 0),
        "more than 4000000 operations",
    ),
    "memory by a constructor": (lambda: with_extra(Calls(bytearray, 1 << 33)), "bytearray"),
    "code": (lambda: with_extra(Calls(os.mkdir, "pwned")), r"posix\.mkdir', which is no value"),
    "code of builtins": (lambda: with_extra(Calls(eval, "1/0")), "eval"),
    "a module that is imported": (lambda: with_extra(Calls(torch.hub.load, "x")), "hub"),
    "an old pickle with code": (
        lambda: packed(GOOD | {"extra": Calls(os.mkdir, "pwned")}, _use_new_zipfile_serialization=False),
        "not a zip file",
    ),
    "a bare pickle with code": (lambda: pickle.dumps(Calls(os.mkdir, "pwned")), "not a zip file"),
    "two pickles": (twice, "twice"),
    "an expanded tensor": (lambda: with_extra(torch.zeros(1).expand(1 << 40)), "larger than the"),
    "a tensor without values": (lambda: with_extra(torch.empty(9, device="meta")), "meta_tensor"),
    "lists of lists": (lambda: with_extra(nested(60, 2)), "larger than the file"),
    "deep lists": (lambda: with_extra(nested(100, 1)), "nested too deeply"),
    "no table": (lambda: packed([1, 2]), "expected a table 'extra'"),
    "no extra": (lambda: packed({"optimizer": None}), "expected a table 'extra'"),
    "no generators": (lambda: packed({"extra": {}, "optimizer": None}), "'random'"),
    "an optimizer of text": (lambda: packed(GOOD | {"optimizer": "adam"}), "'optimizer'"),
    "nothing": (lambda: b"", "not a zip file"),
    "half": (lambda: packed(GOOD)[:700], "not a zip file"),
}  # fmt: skip


def test_what_is_saved_is_what_is_read() -> None:
    found = parse_program(pack_program(GOOD), Path("program.pt"))
    assert found["extra"].keys() == GOOD["extra"].keys()
    for name, value in GOOD["extra"].items():
        if isinstance(value, torch.Tensor):
            assert_same(
                {name: found["extra"][name].detach().float()}, {name: value.detach().float()}
            )
        else:
            assert found["extra"][name] == value


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_small_state_is_refused_by_name_and_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = FORGED[kind]
    content = make()
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptionError, match=rf"some/program\.pt.*{said}"):
        parse_program(content, Path("some/program.pt"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 128 << 10 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [bytearray(3), torch.empty(2, device="meta"), torch.eye(2).to_sparse(), nested(70, 1)],
)
def test_what_could_not_be_read_again_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(ConfigError, match="nothing that needs code to be read"):
        pack_program(GOOD | {"extra": {"x": value}})


def test_every_changed_byte_is_refused_or_harmless() -> None:
    """A byte of the archive changes: a CorruptionError, or a small state, and no other error."""
    content = packed(GOOD)
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0x55
        try:
            parse_program(bytes(changed), Path("program.pt"))
        except CorruptionError:
            continue


def test_a_bomb_is_refused_in_little_memory() -> None:
    """In a process that may take 64 MiB more than it has."""
    script = """
import io, resource, sys, zipfile
from pathlib import Path
from infinity.checkpoint.run.load import parse_program
from infinity.errors import CorruptionError
import torch
buffer = io.BytesIO()
with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in ("archive/data.pkl", "archive/data/0", "archive/version"):
        archive.writestr(name, bytes(1 << 27))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    parse_program(buffer.getvalue(), Path("program.pt"))
except CorruptionError as error:
    print("refused", error)
"""
    done = run_script(script)
    assert done.returncode == 0 and "refused" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("1", 1.0), (True, 1), (None, 0.1), ([1, "2"], [1, 2]), ({"a": []}, {"a": 3}), (3, "x"),
        ({"a": {"b": "c"}}, {"a": {"b": 1}}), ([], {}), (torch.ones(2), "x"), ("1", torch.ones(2)),
    ],
)  # fmt: skip
def test_settings_of_another_kind_are_malformed(saved: Any, own: Any) -> None:
    with pytest.raises(ValueError, match=r"settings.* is a .*, expected a "):
        check_kinds(saved, own, "settings")


def test_settings_of_the_same_kind_pass() -> None:
    check_kinds({"lr": 1, "new": "x"}, {"lr": 0.5, "gone": 3}, "settings")
    check_kinds([0.5, (0.9, 1)], (1, [0.9, torch.tensor(0.9)]), "settings")
    assert load_plain(packed({"lr": torch.ones(())}))["lr"] == 1
