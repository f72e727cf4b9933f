"""Ids and labels of the marked entries that `infinity.training.chat` writes."""

from __future__ import annotations

import torch

IGNORED = -100  # The label that torch's cross entropy leaves out.


def split_marks(marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids, labels) of marked entries (rows, length), cut behind the last learned one."""
    is_learned = marks >= 0
    length = int(is_learned.any(dim=0).nonzero().max()) + 1
    marks, is_learned = marks[:, :length], is_learned[:, :length]
    ids = torch.where(is_learned, marks, ~marks)
    return ids, torch.where(is_learned, marks, IGNORED)


def count_learned(marks: torch.Tensor) -> int:
    """Returns the number of tokens that a model predicts: learned ones, but for the first of a
    row."""
    return int((marks[:, 1:] >= 0).sum())
