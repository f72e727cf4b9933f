"""Asks a server for the log-probabilities of a sheet, and names the fault that explains them.

A served adapter is compared with every state that the sheet knows: the adapter, the base, and each
group of modules with each fault. A scale is fitted: the log-probabilities of a group at the scales
0, 1/2, 1 and 2 give a cubic for each token. The nearest state is the answer if it explains what
differs from the adapter, and if no other state is about as near; otherwise the answer says that
none fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError
from infinity.integrations.sampler import Server
from infinity.tools.serving.sheet import ALL, DOUBLED, HALVED, MISSING, LogProbs, Sheet

# A state explains a deviation if at most this part of it (root mean square) is left, and if every
# other state leaves this many times as much.
_LEFT, _MARGIN = 0.3, 1.5
_SCALES, _SAME_SCALE = (0.0, 0.5, 1.0, 2.0), 0.1
_NOISE = 0.1  # Of the adapter's effect, where the base has not been asked.
_SHOWN = 5

Numbers = npt.NDArray[np.float64]
Served = list[list[float | None]]  # As LogProbs; None where a server says nothing of a token.
Outcome = Literal["served", "ignored", "faulty", "unexplained", "unclear"]


# -- Asking ----------------------------------------------------------------------------------------


def ask(
    server: Server,
    sheet: Sheet,
    model: str | None,
    progress: Callable[..., None] = lambda **_: None,
) -> Served:
    """Returns the served log-probabilities of the sheet's prompts. `model` may be None where the
    server has one. `progress` takes `completed`, the prompts so far. Raises ConfigError."""
    model = model or server.only_model("name one with --model")
    found = []
    for number, prompt in enumerate(sheet.prompts):
        progress(completed=number)
        found.append(server.log_probs(model, prompt))
    return found


# -- Judging ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """A state of the adapter that the sheet knows. `distance` is the root mean square, in nats, of
    what it leaves of the served log-probabilities; `scale` that of a group, where it was fitted."""

    group: str
    fault: str
    distance: float
    scale: float | None = None

    @property
    def is_scale(self) -> bool:
        """Whether the group has the adapter's factors, at a scale."""
        return self.scale is not None or self.fault == MISSING

    def __str__(self) -> str:
        return f"{self.group}: {self.fault}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of an adapter on a server.

    effect: root mean square of what the adapter changes in the base's log-probabilities, in nats
    deviation: of what is served against the adapter
    noise: what counts as equal
    nearest: the known states, nearest first
    hidden: groups whose absence would change less than the noise, so that nothing is said of them
    """

    outcome: Outcome
    sentence: str
    effect: float
    deviation: float
    noise: float
    num_tokens: int
    nearest: list[State] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


def judge(sheet: Sheet, served: Served, base: Served | None = None) -> Verdict:
    """Compares served log-probabilities with the sheet.

    base: those that the server gives for the base alone: their distance from the sheet's is the
        noise between the two computations. Without it a tenth of the adapter's effect is noise
    """
    values, of = _compared(served)
    effect = _rms(of(sheet.adapter) - of(sheet.base))
    deviation, noise = _rms(values - of(sheet.adapter)), _NOISE * effect
    if base is not None:
        alone, of_alone = _compared(base)
        noise = 3 * _rms(alone - of_alone(sheet.base))
    states = _states(sheet, served)
    hidden = [
        fault.group
        for fault in sheet.faults
        if fault.fault == MISSING
        and _rms(_flat(fault.log_probs) - _flat(sheet.adapter[: len(fault.log_probs)])) <= noise
    ]
    outcome, sentence = _outcome(states, effect, deviation, noise)
    return Verdict(
        outcome, sentence, effect, deviation, noise, values.size, states[:_SHOWN], hidden
    )


def _outcome(
    states: list[State], effect: float, deviation: float, noise: float
) -> tuple[Outcome, str]:
    nearest = states[0]
    trained = next(state for state in states if state.fault == "as trained")
    if noise > _LEFT * effect or not effect:
        return "unclear", (
            f"the adapter changes these prompts by {effect:.3g} nats, and the base alone is served "
            f"{noise / 3:.3g} nats from the one that it was trained over: serve that base, in its "
            "dtype and with its config.json, or use prompts like those that it was trained on"
        )
    if deviation <= noise:
        return (
            "served",
            f"the adapter is served as trained, to {deviation:.2g} of {effect:.3g} nats",
        )
    rivals = [
        state
        for state in states[1:]
        if state.distance < _MARGIN * max(nearest.distance, noise / 3)
        and not (state.group == nearest.group and nearest.is_scale and state.is_scale)
    ]
    if nearest is trained:
        return "unexplained", (
            "the first prompts, which tell faults apart, are served as trained, and all prompts "
            f"together deviate by {deviation:.3g} nats: later ones are treated in another way"
        )
    if nearest.distance > _LEFT * trained.distance:
        return "unexplained", (
            f"what is served is neither the adapter nor any state that the sheet knows; the "
            f"nearest ({nearest}) leaves {nearest.distance:.3g} of {trained.distance:.3g} nats"
        )
    if rivals:
        names = "; ".join(map(str, [nearest, *rivals[: _SHOWN - 1]]))
        return "unexplained", f"these fit about equally well: {names}"
    if nearest.group == ALL and nearest.fault == MISSING:
        return "ignored", "the adapter is ignored: what is served is the base"
    return "faulty", str(nearest)


def _states(sheet: Sheet, served: Served) -> list[State]:
    """Returns all states by their distance. All are compared on the prompts of the faults."""
    count = len(sheet.faults[0].log_probs) if sheet.faults else len(sheet.prompts)
    few, of = _compared(served[:count])
    adapter = of(sheet.adapter)
    states = [State(ALL, "as trained", _rms(few - adapter))]
    known = {(fault.group, fault.fault): of(fault.log_probs) for fault in sheet.faults}
    known[ALL, MISSING] = of(sheet.base)
    for (group, fault), values in known.items():
        if fault == DOUBLED:
            at = np.stack([known[group, MISSING], known[group, HALVED], adapter, values])
            scale, distance = _fitted(few, at)
            if abs(scale - 1) > _SAME_SCALE and abs(scale) > _SAME_SCALE:
                states.append(State(group, f"scaled by {scale:.2g}", distance, scale))
        elif fault != HALVED:
            states.append(State(group, fault, _rms(few - values)))
    return sorted(states, key=lambda state: state.distance)


def _fitted(served: Numbers, known: Numbers) -> tuple[float, float]:
    """Returns the scale at which the cubics through the numbers at `_SCALES` are nearest to what is
    served, and the distance."""
    cubics = np.linalg.solve(np.vander(_SCALES, increasing=True), known)

    def left(scale: float) -> float:
        return _rms(served - scale ** np.arange(len(_SCALES)) @ cubics)

    best = min(np.linspace(-1.0, 4.0, 501).tolist(), key=left)
    return best, left(best)


def _compared(served: Served) -> tuple[Numbers, Callable[[LogProbs], Numbers]]:
    """Returns the log-probabilities that a server gave, and the function to the sheet's numbers for
    the same tokens: of the first prompts of the sheet, those of which the server gave one."""
    flat = [value for row in served for value in row]
    is_kept = np.array([value is not None for value in flat])
    if not is_kept.any():
        raise ConfigError("the server gave no log-probability of any token of the sheet")
    values: Numbers = np.array([value for value in flat if value is not None])
    return values, lambda log_probs: _flat(log_probs[: len(served)])[is_kept]


def _rms(values: Numbers) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _flat(log_probs: LogProbs) -> Numbers:
    return np.array([value for row in log_probs for value in row])
