"""What a run leaves behind: the weights, a text that the model writes, the summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint import export_safetensors
from infinity.config import Sample, SwapConfig
from infinity.errors import InfinityError
from infinity.tools.training.adapter import save_adapter
from infinity.tools.training.job import Job
from infinity.tools.training.output import MARKER_NAME, SUMMARY_NAME
from infinity.tools.training.process import Interrupt
from infinity.tools.training.report import Reporter, Summary, write_summary

BEST_NAME = "best"  # The directory of the lowest held-out loss, in output.directory.


class Products:
    """Writes the output directory of a run. One rank writes."""

    def __init__(self, config: SwapConfig, job: Job, reporter: Reporter, summary: Summary) -> None:
        self._config = config
        self._job = job
        self._reporter = reporter
        self._summary = summary
        self._is_output_lost = False  # A warning was printed.

    def mark(self) -> Path | None:
        """Marks the output directory as that of a run. Returns the path of its metrics."""
        output = self._job.output
        if output is None:
            return None
        if output.is_unmarked:
            self._reporter.note(f"{MARKER_NAME} is missing in {output.path}; added")
        output.mark()
        return self._config.output.metrics_path

    def restore(self) -> None:
        """Makes the output directory again if it was removed."""
        if self._job.output is None:
            return
        try:
            if self._job.output.restore():
                self._reporter.note(f"{self._job.output.path} was removed; it was made again")
        except InfinityError as error:
            if not self._is_output_lost:
                self._reporter.note(f"warning: {error}; the run goes on")
            self._is_output_lost = True

    def export(self, what: str) -> None:
        """Writes the weights."""
        output = self._config.output.directory
        self._write_weights(output)
        self._summary.export_directory = str(output)
        self._reporter.note(f"wrote {what} to {output}")

    def keep_best(self) -> None:
        """Writes the weights of the lowest held-out loss so far."""
        self._write_weights(self._config.output.directory / BEST_NAME)

    def _write_weights(self, directory: Path) -> None:
        tokenizer = getattr(self._job.tokenizer, "tokenizer", None)
        with self._summary.phase("export_s"):
            if self._config.adapter is not None:
                save_adapter(self._job.model, directory, tokenizer=tokenizer)
            else:
                export_safetensors(
                    self._job.model,
                    directory,
                    max_shard_nbytes=self._config.output.max_shard_size,
                    tokenizer=tokenizer,
                )

    def sample(self, interrupt: Interrupt) -> None:
        """Lets the model write the text of `[train.sample]`."""
        assert self._config.train is not None
        sample = self._config.train.sample
        if sample is None or interrupt.received is not None:
            return
        with self._summary.phase("sample_s"):
            ids = generate(
                self._job.model,
                self._job.prompt_ids,
                sample,
                seed=self._config.train.seed,
                should_stop=lambda: interrupt.received is not None,
            )
        self._summary.sample = self._job.tokenizer.decode(ids)
        self._reporter.note(f"sample:\n{self._summary.sample}")

    def write_summary(self) -> None:
        """Writes summary.json; a failure is reported and does not end the run."""
        path = self._config.output.directory / SUMMARY_NAME
        self._summary.lost = self._reporter.lost()
        try:
            write_summary(path, self._summary)
        except OSError as error:
            self._summary.lost.append(f"{path}: {error.strerror or error}")
            self._reporter.note(f"warning: {path} cannot be written: {error.strerror or error}")


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

    def stop(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
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
