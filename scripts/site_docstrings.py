"""Extension of griffe, which reads docstrings for the site: parameters become a list.

In a source file a parameter is a line `name: meaning`. Markdown would join these lines to one
paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"^(\w+): ", re.MULTILINE)
_BEGIN_OF_LINE = re.compile(r"^\S.*$", re.MULTILINE)


def with_lists(docstring: str) -> str:
    """Returns the docstring whose paragraphs of parameters are Markdown lists."""
    return "\n\n".join(
        _PARAMETER.sub(r"- `\1`: ", paragraph)
        if all(map(_PARAMETER.match, _BEGIN_OF_LINE.findall(paragraph)))
        else paragraph
        for paragraph in docstring.split("\n\n")
    )


class Parameters(griffe.Extension):
    """Changes the docstrings of everything that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
