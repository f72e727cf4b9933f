"""The process in which a model was offloaded. A forked child has its objects and none of its state:
the arena is not copied, threads are gone, and the swap files belong to the parent."""

from __future__ import annotations

import os

from infinity.errors import InfinityError

_pid = os.getpid()


def _find_pid() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_find_pid)  # So that no use of a unit asks the kernel.


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = _pid

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object, and not a fork of it."""
        return _pid == self._pid

    def refuse_others(self) -> None:
        """Raises InfinityError in any other process."""
        if _pid != self._pid:
            raise InfinityError(
                f"expected process {self._pid}, which offloaded the model, got its forked child "
                f"{_pid}; use the model in the parent, give the child what it needs (a "
                "clone, a state_dict), or start it before infinity.offload"
            )
