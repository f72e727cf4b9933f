"""The loss curve of a notebook under transformers' and TRL's Trainers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from infinity.observe.loss_curve import LossCurve


class LossCurveCallback(TrainerCallback):
    """Draws the logged losses in place: `trainer.add_callback(LossCurveCallback())`.

    `logging_steps` says how often. `curve` has the losses, also after an interrupt.
    """

    def __init__(self) -> None:
        self.curve = LossCurve()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts a curve for the steps of this call of `train`."""
        self.curve = LossCurve(state.max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Adds the loss that was logged, if one was."""
        if logs is not None and "loss" in logs:
            self.curve.add(logs["loss"], state.global_step)
