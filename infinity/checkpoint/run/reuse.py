"""Whether a commit whose copy has failed still holds the state of the run, so that it can be copied
again.

The number of steps does not tell: weights may have been changed by hand since, or the step may be
one that the caller has named.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from infinity.checkpoint.run import directory as state_directory
from infinity.checkpoint.run.commit import Stored, label_of, located
from infinity.checkpoint.run.files import contents_of, write_contents
from infinity.engine.state_access import StateAccess
from infinity.errors import InfinityError, reporting


def holds_state(commit: Path, state: StateAccess, model: nn.Module, program: bytes) -> bool:
    """Whether a commit of this run has the bytes that a new one would have.

    Writes what is not linked once more, beside the commit, and removes it. Returns False for a
    commit that is damaged, or that this run has not made. For one rank. Raises StorageError.
    """
    volume = state.store.volume
    if volume is None or label_of(commit) not in [frozen.label for frozen in volume.frozen]:
        return False
    volume.sync()
    try:
        manifest = state_directory.read_manifest(commit)
    except InfinityError:
        return False
    partial = state_directory.partial_of(commit)
    with state_directory.locked(commit.parent):
        shutil.rmtree(partial, ignore_errors=True)
        with reporting("create", partial):
            partial.mkdir(state_directory.PRIVATE_DIRECTORY)
        try:
            contents = contents_of(state, may_link=True)
            stored = located(state, contents.linked)[0] if contents.linked else Stored()
            return tuple(write_contents(partial, state, model, program, contents, stored)) == (
                manifest.files
            )
        finally:
            shutil.rmtree(partial, ignore_errors=True)
