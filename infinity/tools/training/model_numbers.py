"""Finds impossible numbers in a model's configuration before anything is built from them.

transformers builds one module after the other, and lists with one entry per layer, for any number
in the file. A number that is negative, or larger than that of any model, is therefore refused here.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from infinity.errors import ConfigError

# Counts of modules that are built one by one, under every name used by architectures.
_COUNT = re.compile(
    r"(\w+_)?(n|num)_(\w+_)?(layers?|blocks?|heads?|experts?|kv)"
    r"|(\w+_)?(layers|heads|experts)|depth"
)
# Lengths of a side of a weight.
_SIZE = re.compile(
    r"(\w+_)?(vocab|hidden|intermediate|ffn|inner)_(size|dim)|d_model|d_ff|n_embd|n_inner|d_kv"
    r"|ffn_hidden_size|(encoder|decoder)_ffn_dim|head_dim|n_positions|max_position_embeddings"
)
_MOST_MODULES = 65_536
_MOST_LENGTH = 2**40
MOST_TOKENS = 2**31  # Their ids are 32-bit integers to tokenizers and kernels.
# A weight has a side of each of these lengths.
_SIDES = ("vocab_size", "hidden_size", "d_model", "n_embd")


def check_numbers(table: dict[str, Any], where: str) -> None:
    """Raises ConfigError that names the key of an impossible count, size or token id. `where` is
    put before the key."""
    for key, value in _leaves(table, ""):
        name = key.rpartition(".")[2]
        if name.endswith("_token_id"):
            _check_ids(value, f"{where}{key}")
            continue
        most = _MOST_MODULES if _COUNT.fullmatch(name) else _MOST_LENGTH
        if most == _MOST_LENGTH and not _SIZE.fullmatch(name):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # None, lists and words have their own meaning, which transformers checks.
        most = MOST_TOKENS - 1 if name.endswith("vocab_size") else most
        least = 1 if name in ("num_hidden_layers", "n_layer", "n_layers", "vocab_size") else 0
        if not least <= value <= most:
            raise _impossible(f"{where}{key}", f"{least} to {most}", value)


def check_sides(table: dict[str, Any], longest: int, where: str) -> None:
    """Raises ConfigError that names a length of the configuration that no stored weight has.

    longest: the longest side of all stored weights
    """
    for key, value in _leaves(table, ""):  # Other parts, such as vision, may not be stored.
        is_side = key.removeprefix("text_config.") in _SIDES
        if is_side and isinstance(value, int) and value > longest:
            raise _impossible(
                f"{where}{key}", f"at most {longest}, the longest side of the stored weights", value
            )


def _check_ids(value: Any, what: str) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not -MOST_TOKENS < token < MOST_TOKENS:
            raise _impossible(what, f"an id below {MOST_TOKENS}, or a list of these", token)


def _impossible(what: str, expected: str, value: Any) -> ConfigError:
    is_long = isinstance(value, (int, float)) and abs(value) >= 10**40
    shown = "a number of more than 40 digits" if is_long else repr(value)[:80]
    return ConfigError(
        f"{what}: expected {expected}, got {shown}; correct it, or get the model's configuration "
        "again"
    )


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
