"""Records of token ids, with the masks that tell what is learned."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from infinity.errors import ConfigError

MASKS = ("labels", "assistant_masks", "completion_mask", "seq_lengths")
_NOT_LEARNED = -100
_MOST = 2**31  # Ids of more bits have no place in an index of an embedding.


def tokens_of(record: dict[str, Any], at: str, vocab_size: int | None) -> dict[str, Any]:
    """Returns `input_ids` and its masks, checked: lists of one length, with ids that have an
    embedding. `at` names the record. Raises ConfigError."""
    most = vocab_size or _MOST
    ids = _integers(record.get("input_ids"), f"{at}: input_ids")
    if not ids:
        raise ConfigError(f"{at}: input_ids: expected token ids; got an empty list")
    if not 0 <= min(ids) <= max(ids) < most:
        bad = next(token for token in ids if not 0 <= token < most)
        raise ConfigError(f"{at}: input_ids: token {bad} is outside the vocabulary of {most}")
    found = {"input_ids": ids}
    for name in (*MASKS, "attention_mask"):
        if record.get(name) is None:
            continue
        values = _integers(record[name], f"{at}: {name}")
        if name == "seq_lengths":
            if sum(values) != len(ids) or min(values) < 1:
                raise ConfigError(f"{at}: {name}: expected lengths whose sum is {len(ids)}")
        elif len(values) != len(ids):
            raise ConfigError(
                f"{at}: {name}: expected {len(ids)} values, one for each token; got {len(values)}"
            )
        elif name == "labels":
            strange = [v for v in values if v != _NOT_LEARNED and not 0 <= v < most]
            if strange:
                raise ConfigError(
                    f"{at}: labels: {strange[0]} is neither {_NOT_LEARNED}, which is not learned, "
                    f"nor a token of the vocabulary of {most}"
                )
        elif not set(values) <= {0, 1}:
            raise ConfigError(f"{at}: {name}: expected 0 and 1 only")
        if name != "attention_mask":
            found[name] = values
        elif 0 in values:
            raise ConfigError(
                f"{at}: attention_mask: it leaves tokens out; expected input_ids without padding"
            )
    _refuse_contradiction(found, at)
    return found


def _refuse_contradiction(record: dict[str, Any], at: str) -> None:
    """TRL follows `labels`, and no mask beside them."""
    masks = [record[name] for name in ("assistant_masks", "completion_mask") if name in record]
    if "labels" not in record or not masks:
        return
    for label, *bits in zip(record["labels"], *masks, strict=True):
        if (label != _NOT_LEARNED) != all(bits):
            raise ConfigError(f"{at}: labels and the mask contradict each other; expected one")


def _integers(value: Any, at: str) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{at}: expected a list of integers; got {value!r:.80}")
    if not all(map(isinstance, value, repeat(int))):
        bad = next(item for item in value if not isinstance(item, int))
        raise ConfigError(f"{at}: expected integers; got {bad!r:.80}")
    return [int(item) for item in value]
