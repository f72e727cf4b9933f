"""State as a directory of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def in_one_process() -> Iterator[None]:
    """Holds a save or a load without other ranks, and raises the error that stopped it itself.

    PyTorch warns that it is alone, and wraps every error, also a KeyboardInterrupt, in one that is
    no Exception.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
