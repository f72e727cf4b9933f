"""The public names of `infinity.checkpoint` exist, and their docstrings list their errors."""

from __future__ import annotations

import inspect

import pytest

from infinity import checkpoint


def test_the_table_of_modules_has_every_public_name() -> None:
    assert sorted(checkpoint._MODULE_OF) == sorted(checkpoint.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = checkpoint.absent


@pytest.mark.parametrize("name", checkpoint.__all__)
def test_the_docstring_of_a_public_name_lists_its_errors(name: str) -> None:
    value = getattr(checkpoint, name)
    texts = [value.__doc__ or ""]
    if inspect.isclass(value):
        texts += [method.__doc__ or "" for _, method in inspect.getmembers(value)]
    assert any("Raises" in text for text in texts), name
