"""Texts of a trained model: a base and an adapter, or all weights, read from their files.

The weights are frozen, so that they need no other space than the files; a budget of host memory
keeps as much of them as it can. Each token reads what it does not keep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.config import SwapConfig
from infinity.config.paths import is_adapter
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import positions_of
from infinity.tools.pretrained import from_pretrained, with_saved_adapter
from infinity.tools.training.base_identity import base_of
from infinity.tools.training.model import generate
from infinity.tools.training.settle import tokenizer_of
from infinity.tools.training.tokenizers import Tokenizer, open_tokenizer

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class TextWriter:
    """A frozen, offloaded model with its tokenizer. `close` releases the memory."""

    model: Any
    tokenizer: Tokenizer

    @property
    def positions(self) -> int | None:
        """The most tokens of a text, prompt included; None where the model names no number."""
        return positions_of(self.model.config)

    def write(
        self, ids: list[int], *, num_tokens: int, temperature: float, say: Callable[[str], None]
    ) -> list[int]:
        """Continues `ids` by at most `num_tokens` tokens, gives `say` each new piece of text, and
        returns the new ids, without the token that ends a text. `temperature` 0 takes the likeliest
        token. Raises ConfigError where `ids` fill the positions of the model, at which it stops.
        """
        from transformers.generation.streamers import BaseStreamer

        left = num_tokens if self.positions is None else self.positions - len(ids)
        if left < 1:
            raise ConfigError(
                f"expected fewer tokens than the model's {self.positions} positions, got "
                f"{len(ids)}; shorten the text"
            )
        ends = self.model.generation_config.eos_token_id
        ends = {*ends} if isinstance(ends, list) else {ends}
        writer, said = self, [0]
        new: list[int] = []

        class Said(BaseStreamer):
            """Decodes all new tokens again: a character may need several of them."""

            is_first = True

            def put(self, value: torch.Tensor) -> None:
                if self.is_first:  # The prompt.
                    self.is_first = False
                    return
                new.extend(one for one in value.reshape(-1).tolist() if one not in ends)
                text = writer.tokenizer.decode(new)
                if not text.endswith("\ufffd"):
                    say(text[said[0] :])
                    said[0] = len(text)

            def end(self) -> None:
                say(writer.tokenizer.decode(new)[said[0] :])

        most = min(num_tokens, left)
        generate(self.model, ids, num_tokens=most, temperature=temperature, streamer=Said())
        if len(new) == left < num_tokens:
            _log.warning("the text ends here: it fills the model's %d positions", self.positions)
        return new

    def prompt_of(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the tokens of a conversation, to which the model is to answer. Raises ConfigError
        for a tokenizer without a chat template."""
        tokenizer: Any = self.tokenizer.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("the model has no chat template; use `infinity generate`")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def close(self) -> None:
        """Releases the memory."""
        infinity.close(self.model)


def open_writer(directory: Path, config: Any = None) -> TextWriter:
    """Returns the model of a run's output, of an adapter or of a directory of weights.

    `config`: tiers and budgets, what `infinity.offload` takes. Raises ConfigError for a directory
    that is neither, and for an adapter whose base is gone.
    """
    adapter = directory if is_adapter(directory) else None
    base = base_of(directory) if adapter else directory
    settings = with_saved_adapter(SwapConfig.load(config), adapter)
    model = from_pretrained(base, settings, is_frozen=True)
    place = tokenizer_of(directory)
    if place.value == "bytes":
        place = tokenizer_of(base)
    return TextWriter(model.eval(), open_tokenizer(place.value))
