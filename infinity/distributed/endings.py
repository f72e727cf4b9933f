"""Blocks in which a failure of one rank is one of all ranks: the others wait for what it was to do,
or have given it what is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.distributed.transport import PeerTransport
from infinity.errors import RankError


@contextmanager
def ending_all(transport: PeerTransport, where: str) -> Iterator[None]:
    """Ends all ranks if the block fails. The error goes on, so that a program that catches it does
    not keep the others waiting."""
    try:
        yield
    except RankError:
        raise  # The others know.
    except BaseException as error:
        transport.abort(f"{where}: {type(error).__name__}: {error}")
        raise
