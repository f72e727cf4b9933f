"""The end of a run for the person behind it: the commands that follow, and a message."""

from __future__ import annotations

import json
import subprocess
from shlex import quote
from typing import Literal

from infinity.config import SwapConfig
from infinity.tools.training.report import Reporter, Summary

Event = Literal["end", "failure", "plateau"]

_PATIENCE_S = 30  # For a command of the user's.


def next_commands(config: SwapConfig, summary: Summary) -> list[str]:
    """Returns lines of commands that go on from what the run has left."""
    output = quote(str(config.output.directory))
    found: list[tuple[str, str]] = []
    if summary.interrupted_by and config.checkpoint is not None:
        file = config.source.name if config.source.kind == "file" else "CONFIG"
        found.append((f"infinity train {quote(file)} --resume", "go on"))
    if summary.export_directory:
        found.append((f"infinity chat {output}", "talk to it"))
        found.append((f'infinity generate {output} "..."', "let it continue a text"))
        if config.adapter is not None and config.model is not None:
            base = quote(str(config.model.path))
            found.append((f"infinity merge {base} {output} -o merged", "base and adapter as one"))
    if summary.checkpoint is not None:
        found.append((f"infinity inspect {output}", "its checkpoints"))
    width = max((len(command) for command, _ in found), default=0)
    return [
        f"{'' if number else 'next:':<6}{command:<{width}}  # {what}"
        for number, (command, what) in enumerate(found)
    ]


class Notices:
    """Runs the command of `output.notify`. A command that fails is reported and ends nothing."""

    def __init__(self, config: SwapConfig, summary: Summary, reporter: Reporter) -> None:
        self._config = config
        self._summary = summary
        self._reporter = reporter
        self._sent: set[Event] = set()

    def send(self, event: Event, text: str) -> None:
        """Runs the command, once for each event, with a JSON object on its input."""
        command = self._config.output.notify
        if command is None or event in self._sent:
            return
        self._sent.add(event)
        losses = self._summary.losses
        content = {
            "event": event,
            "text": f"{self._config.output.directory.name}: {text}",
            "output": str(self._config.output.directory),
            "steps": self._summary.resumed_at + len(self._summary.steps_s),
            "loss": losses[-1] if losses else None,
        }
        try:
            subprocess.run(
                command, shell=True, input=json.dumps(content), text=True, timeout=_PATIENCE_S,
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            self._reporter.note(f"warning: output.notify failed: {error}")
