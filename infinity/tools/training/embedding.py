"""Modules of sentence-transformers around the model of "embed". Written against 6.2."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from infinity.config import JobConfig
from infinity.config.extras import installed
from infinity.config.schema.train import Embed
from infinity.errors import ConfigError, refusing
from infinity.tools.training.tokenizers import Tokenizer

# Least and most texts of a record, and whether it has a score.
_TEXTS: dict[str, tuple[int, int, bool]] = {
    "TripletLoss": (3, 3, False),
    **dict.fromkeys(("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"), (2, 2, True)),
    **dict.fromkeys(("ContrastiveLoss", "OnlineContrastiveLoss"), (2, 2, True)),
}
_OF_RANKING = (2, 1 << 10, False)


def check_columns(names: list[str], options: Embed, place: str, batch_size: int) -> None:
    """Raises ConfigError for records that the loss does not take, for batches that it cannot
    compare, and for prompts of other columns."""
    texts, has_score = [name for name in names if name != "score"], "score" in names
    least, most, needs_score = _TEXTS.get(options.loss, _OF_RANKING)
    if not least <= len(texts) <= most or has_score != needs_score:
        wanted = f"{least}" if least == most else f"{least} or more"
        raise ConfigError(
            f"data.paths: {place} has the columns {', '.join(names)}; {options.loss} takes "
            f"{wanted} texts and {'a' if needs_score else 'no'} score (or label)"
        )
    compares = options.loss in ("CoSENTLoss", "AnglELoss")
    compares |= "Ranking" in options.loss and len(texts) == 2
    if compares and batch_size == 1:  # Its loss would be 0.
        raise ConfigError(
            f"train.batch_size: {options.loss} compares the records of a batch; expected 2 or "
            "more; got 1"
        )
    if strangers := options.prompts.keys() - {*texts}:
        raise ConfigError(
            f"train.embed.prompts: {', '.join(sorted(strangers))} is no column of {place}; "
            f"expected some of {', '.join(texts)}"
        )


def wrapped(model: Any, config: JobConfig, tokenizer: Tokenizer) -> Any:
    """Returns a SentenceTransformer over the model on meta, with the other modules of its
    directory, or those that sentence-transformers gives to a directory without any. Raises
    ConfigError for a directory that asks for another model, or has other weights to train."""
    from sentence_transformers import SentenceTransformer
    from torch import nn
    from transformers import PreTrainedModel

    path, base = config.model.path, model if config.adapter is None else model.get_base_model()
    if path is None or str(path) != tokenizer.name:
        raise ConfigError(
            'train.method: "embed" reads modules and tokenizer in model.path; expected a directory '
            f"of both, and no other data.tokenizer; got {path or '[model.config]'} and "
            f"{tokenizer.name}"
        )

    def load(cls: Any, *_: Any, **__: Any) -> Any:
        if not isinstance(base, cls):
            raise TypeError(f"it asks for {cls.__name__}, and a run has {type(base).__name__}")
        return base

    with (
        refusing(f"model.path: sentence-transformers cannot open {path}", Exception),
        patch.object(PreTrainedModel, "from_pretrained", classmethod(load)),
        patch.object(nn.Module, "to", lambda module, *_, **__: module),
    ):
        found: Any = SentenceTransformer(
            str(path), device="cpu", local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )  # fmt: skip
    own = {id(parameter) for parameter in base.parameters()}
    strays = [name for name, parameter in found.named_parameters() if id(parameter) not in own]
    if strays or getattr(found[0], "model", None) is not base or len(found) == 1:
        parts = ", ".join(type(part).__name__ for part in found)
        raise ConfigError(
            f"model.path: {path} has {' and '.join([parts, *strays[:1]])}; expected a transformer "
            "and, behind it, a pooling and other modules without weights of their own, which "
            "`infinity train` does not train (prepare_trainer of infinity.integrations.hf does)"
        )
    found[0].config.use_cache = False
    found[0].model = model
    return found


def loss_of(options: Embed, model: Any) -> Any:
    """Returns the loss. Raises ConfigError for options that it does not take."""
    from sentence_transformers.sentence_transformer import losses

    with refusing(f"train.embed: {options.loss}", Exception):
        return getattr(losses, options.loss)(model, **options.options)


def batches(config: JobConfig, dataset: Any, *, generator: Any, **options: Any) -> Any:
    """Returns the sampler of batches, in the order of the data or drawn from `data.seed`."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import RandomSampler, SequentialSampler

    drawn = RandomSampler(dataset, generator=generator.manual_seed(config.data.seed))
    order = drawn if config.data.shuffle else SequentialSampler(dataset)
    return DefaultBatchSampler(order, **options)


def digest_of(model: Any) -> str:
    """Returns the SHA-256 of the release and of the settings of all modules."""
    parts = [(type(part).__name__, part.get_config_dict()) for part in model]
    content = json.dumps([installed("sentence-transformers"), parts], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def token_ids(dataset: Any, tokenizer: Any, length: int) -> Any:
    """Returns records with the token ids of their texts in place of these."""
    names = [name for name in dataset.column_names if name != "score"]

    def encode(rows: Any) -> Any:
        found = {n: tokenizer(rows[n], truncation=True, max_length=length) for n in names}
        return {f"{name}_ids": of["input_ids"] for name, of in found.items()}

    return dataset.map(encode, batched=True, remove_columns=names)


def save_modules(model: Any, directory: Path) -> None:
    """Writes what `SentenceTransformer` reads beside the weights, and the tokenizer."""
    first = model[0]

    def save(place: str, **_: Any) -> None:
        first.processor.save_pretrained(place)
        first.save_config(place)

    with patch.object(first, "save", save):
        model.save_pretrained(str(directory), create_model_card=False)
