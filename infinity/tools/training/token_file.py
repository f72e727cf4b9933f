"""Token ids in a file without a name."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from infinity.errors import StorageError

Ids = npt.NDArray[np.integer[Any]]


class TokenFile:
    """Token ids in a temporary file without a name, which disappears with the process."""

    def __init__(
        self,
        *,
        vocab_size: int,
        is_marked: bool = False,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.is_marked = is_marked
        self.dtype = np.dtype(
            np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32
        )
        if is_marked:  # A negative entry is a token that is read only.
            self.dtype = np.dtype(np.int32)
        self.num_tokens = 0
        self._sha256 = hashlib.sha256()
        self._directory = directory
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115, closed by close().
                dir=directory, prefix=".tokens-"
            )
        except OSError as error:
            raise self._failed("create", error) from None

    def append(self, ids: Ids) -> None:
        """Appends ids. Raises StorageError."""
        content = memoryview(ids.astype(self.dtype, copy=False).tobytes())
        self._sha256.update(content)
        try:
            while content:
                content = content[os.write(self._file.fileno(), content) :]
        except OSError as error:
            raise self._failed("write", error) from None
        self.num_tokens += len(ids)

    def read(self, start: int, count: int) -> Ids:
        """Returns the ids [start, start + count) as a new array of the file's dtype. Raises
        StorageError."""
        assert start >= 0 and start + count <= self.num_tokens, (
            start,
            count,
            self.num_tokens,
        )
        itemsize = self.dtype.itemsize
        try:
            content = os.pread(self._file.fileno(), count * itemsize, start * itemsize)
        except OSError as error:
            raise self._failed("read", error) from None
        if len(content) < count * itemsize:
            raise self._failed("read", OSError(errno.EIO, "the file of tokens was shortened"))
        return np.frombuffer(content, dtype=self.dtype)

    @property
    def sha256(self) -> str:
        """Returns the digest of all tokens so far, as they lie in the file."""
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _failed(self, operation: str, error: OSError) -> StorageError:
        where = os.fspath(self._directory or tempfile.gettempdir())
        return StorageError(error.errno or 0, operation=f"{operation} tokens", path=str(where))
