"""Objects that are closed."""

from __future__ import annotations

from typing import Self


class Closing:
    """An object that the end of a `with` block closes."""

    def close(self) -> None:
        """Ends the use of the object. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
