"""The identity of a base: facts that distinguish its weights from others of equal names and shapes.

An adapter belongs to the weights over which it was trained. Their directory may be renamed, spread
over drives, or stored again in shards of another size. So the identity has no path, time or offset:
it is a digest of the table of stored tensors, and a digest of the first bytes of some of them. Of
all tensors whose names differ in numbers only, those of a few layers and experts are sampled, at
equal distances. A base that was trained further differs there, whichever kind of module was
trained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.bounded import MalformedError, field, integer, list_of, read_json, table_of, text_of
from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.config.hub import download_remedy, in_hub_cache
from infinity.config.paths import ADAPTER_NAMES
from infinity.errors import ConfigError, refusing
from infinity.sizes import PAGE_NBYTES

IDENTITY_NAME = "infinity_base.json"
_OF_WRITER = ("transformers_version", "_diffusers_version", "_name_or_path")  # In config.json.
_SAMPLES = 4  # Of the tensors whose names differ in numbers only.
_SAMPLE_NBYTES = PAGE_NBYTES
_MOST_SHOWN = 100  # Characters of a value of config.json.

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """`path`: where the base lay, for messages. The digests are SHA-256, in hexadecimal:
    `table_sha256` of names, dtypes and shapes, `samples_sha256` of first bytes of tensors."""

    path: str
    table_sha256: str
    samples_sha256: str


def identify(source: WeightSource) -> BaseIdentity:
    """Returns the identity of a checkpoint. Reads at most 16 KiB for each kind of tensor.

    Raises CorruptionError, StorageError.
    """
    facts = source.stored_facts()
    table = json.dumps(sorted(facts.items()))
    kinds: dict[str, list[str]] = {}
    for name in sorted(facts):
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    # Of each kind the first name, the last, and those between at equal distances.
    sampled = [
        same[index * (len(same) - 1) // (_SAMPLES - 1)]
        for same in kinds.values()
        for index in range(_SAMPLES)
    ]
    heads = source.heads(sampled, _SAMPLE_NBYTES)
    samples = hashlib.sha256()
    for name, head in sorted(heads.items()):
        samples.update(f"{name} {len(head)}\n".encode() + head)
    return BaseIdentity(os.path.abspath(source.path), _sha256(table), samples.hexdigest())


def settings_of(base: Path) -> dict[str, str]:
    """Returns the values in the configuration of a base as JSON, long ones as their SHA-256, by
    dotted keys, without what names its writer. A changed value gives other results with the same
    weights. Raises ConfigError."""
    found: dict[str, str] = {}

    def tell(table: Mapping[str, object], place: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                tell(value, f"{place}{key}.")
            elif key not in _OF_WRITER:
                text = json.dumps(value, sort_keys=True)
                found[place + key] = (
                    text if len(text) <= _MOST_SHOWN else f"SHA-256 {_sha256(text)}"
                )

    tell(read_config(base), "")
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_identity(identity: BaseIdentity, directory: Path) -> None:
    """Writes the identity beside an adapter, whose writer syncs it. No other program reads it."""
    content = json.dumps({"schema": 1, **asdict(identity)}, indent=1)
    (directory / IDENTITY_NAME).write_text(content + "\n")


def read_identity(directory: Path) -> BaseIdentity | None:
    """Returns the base of a saved adapter; None for an adapter of another program. Raises
    ConfigError for a file that is none of this package."""
    file = directory / IDENTITY_NAME
    if not file.exists():
        return None
    remedy = ". Remove the file if you know that the adapter is of this base"
    with refusing(f"{file} is no identity of a base", MalformedError, OSError, remedy=remedy):
        table = table_of(read_json(file), "it")
        integer(field(table, "schema"), "schema", least=1, most=1)
        keys = ("path", "table_sha256", "samples_sha256")
        return BaseIdentity(*(text_of(field(table, key), key) for key in keys))


def base_of(adapter: Path) -> Path:
    """Returns the directory of a saved adapter's base: where it lay when the adapter was saved, or
    what adapter_config.json names, a model in the hub's cache included. Raises ConfigError."""
    identity, config = read_identity(adapter), adapter / ADAPTER_NAMES[0]
    with refusing(f"{config} cannot be used", MalformedError, OSError):
        named = table_of(read_json(config), "it").get("base_model_name_or_path")
    for name in ([] if identity is None else [identity.path]) + [named]:
        if isinstance(name, str) and (found := in_hub_cache(Path(name))).is_dir():
            return found
    remedy = download_remedy(named) if isinstance(named, str) else ""
    raise ConfigError(
        f"{adapter} names no directory of a base that is there ({named!r}); name one (infinity "
        f"export-adapter: --base DIR), or put it there{remedy}"
    )


def check_base(adapter: Path, base: BaseIdentity, named: str | None) -> None:
    """Compares the base of a saved adapter with the base to use it with.

    `named`: `base_model_name_or_path` of an adapter of another program, which has nothing else
    about its base; another name is a warning. Raises ConfigError for another base.
    """
    saved = read_identity(adapter)
    if saved is None:
        if named and not is_name_of(named, Path(base.path)):
            _log.warning(
                "the saved adapter %s names %s as its base, and is used over %s",
                adapter, named, base.path,
            )  # fmt: skip
        return
    if base.table_sha256 != saved.table_sha256:
        difference = "other tensors (by name, dtype or shape)"
    elif base.samples_sha256 != saved.samples_sha256:
        difference = "tensors of equal names and shapes with other values"
    else:
        return
    raise ConfigError(
        f"the saved adapter {adapter} was trained over another base, {saved.path}: {base.path} has "
        f"{difference}. Give the base of the adapter; to use it over this one all the same, set "
        "adapter.any_base = true (infinity merge: --any-base)"
    )


def check_census(census: Path, score: str, base: BaseIdentity, counts: Mapping[str, int]) -> None:
    """Raises ConfigError for a census of experts that was made over another base, and for one
    without this score of each expert: `counts` are the numbers of them by module."""
    what = f"adapter.experts_census: {census} is no census"
    with refusing(what, MalformedError, OSError):
        content = table_of(read_json(census), "it")
        table = table_of(field(content, "base"), "base")
    if any(table.get(key) != getattr(base, key) for key in ("table_sha256", "samples_sha256")):
        raise ConfigError(
            f"adapter.experts_census: {census} was made over another base, {table.get('path')}; "
            f"expected one over {base.path}: infinity score {base.path} DATA -o FILE --routing FILE"
        )
    with refusing(what, MalformedError, remedy=" of this base; make it again"):
        layers = table_of(field(content, "experts"), "experts")
        for name, count in counts.items():
            scores = list_of(field(table_of(field(layers, name), name), score), score)
            if len(scores) != count:
                raise MalformedError(f"{name} has {len(scores)} {score}; expected {count}")


def is_name_of(named: str, path: Path) -> bool:
    """Returns whether a path, or a name of the hub, means a directory. The cache of the hub has the
    name in a directory called models--ORGANISATION--NAME."""
    if os.path.realpath(named) == os.path.realpath(path):
        return True
    last = named.rstrip("/").rpartition("/")[2].casefold()
    parts = (*path.absolute().parts, *path.resolve().parts)
    return any(part.rpartition("--")[2].casefold() == last for part in parts)


def sha256_of(*files: Path) -> str:
    """Returns the digest of the contents of files, one after the other. Raises OSError."""
    sha256 = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()
