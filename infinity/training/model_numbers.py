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


def check_numbers(table: dict[str, Any], where: str) -> None:
    """Raises ConfigError that names the key of an impossible count or size. `where` is put before
    the key."""
    for key, value in _leaves(table, ""):
        name = key.rpartition(".")[2]
        most = _MOST_MODULES if _COUNT.fullmatch(name) else _MOST_LENGTH
        if most == _MOST_LENGTH and not _SIZE.fullmatch(name):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # None, lists and words have their own meaning, which transformers checks.
        least = 1 if name in ("num_hidden_layers", "n_layer", "n_layers") else 0
        if not least <= value <= most:
            shown = value if abs(value) < 10**40 else "a number of more than 40 digits"
            raise ConfigError(
                f"{where}{key}: expected {least} to {most}, got {shown}; correct it, or get "
                "the model's configuration again"
            )


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
