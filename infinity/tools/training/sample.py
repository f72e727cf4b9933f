"""A text that the model writes after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infinity.config import Sample
from infinity.errors import ConfigError
from infinity.tools.training.tokenizers import Tokenizer


def encode_prompt(
    sample: Sample, tokenizer: Tokenizer, *, vocab_size: int, max_positions: int | None
) -> list[int]:
    """Returns the ids of the prompt. Raises ConfigError if the model has too few positions or no
    embedding for it."""
    ids = tokenizer.encode(sample.prompt)
    if not ids:
        raise ConfigError("train.sample.prompt gives no token")
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"train.sample.prompt: token {max(ids)} ({tokenizer.token(max(ids))}) is outside the "
            f"model's vocabulary of {vocab_size}"
        )
    if max_positions is not None and len(ids) + sample.new_tokens > max_positions:
        raise ConfigError(
            f"train.sample: a prompt of {len(ids)} tokens and new_tokens={sample.new_tokens} "
            f"exceed the model's {max_positions} positions"
        )
    return ids


def generate(
    model: Any,
    prompt_ids: list[int],
    sample: Sample,
    *,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Returns the prompt and its continuation by transformers' own `generate`, in eval mode."""
    from transformers import StoppingCriteriaList

    def stop(input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), should_stop(), device=input_ids.device)

    device = next(model.parameters()).device
    input_ids = torch.tensor([prompt_ids], device=device)
    options: dict[str, Any] = {"do_sample": sample.temperature > 0}
    if options["do_sample"]:
        options |= {"temperature": sample.temperature, "top_k": sample.top_k or 0}
    pad_id = model.generation_config.pad_token_id
    was_training = model.training
    model.eval()
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=sample.new_tokens,
                use_cache=True,
                pad_token_id=0 if pad_id is None else pad_id,
                stopping_criteria=StoppingCriteriaList([stop]),
                **options,
            )
    finally:
        model.train(was_training)
    ids: list[int] = output[0].tolist()
    return ids
