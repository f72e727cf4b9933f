"""The process in which a model was offloaded. A forked child has its objects and none of its state:
the arena is not copied, threads are gone, and the swap files belong to the parent."""

from __future__ import annotations

import os

from infinity.errors import InfinityError


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object, and not a fork of it."""
        return os.getpid() == self._pid

    def refuse_others(self) -> None:
        """Raises InfinityError in any other process."""
        if not self.is_here:
            raise InfinityError(
                f"expected process {self._pid}, which offloaded the model, got its forked child "
                f"{os.getpid()}; use the model in the parent, give the child what it needs (a "
                "clone, a state_dict), or start it before infinity.offload"
            )
