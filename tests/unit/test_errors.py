"""Errors name a remedy, also those of the kernel that nobody caught."""

from __future__ import annotations

import errno

import pytest

from infinity.errors import StorageError, storage_error


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_an_error_of_the_kernel_names_the_path_and_a_remedy(code: int) -> None:
    named = storage_error(OSError(code, "whatever", "/a/b"))
    assert isinstance(named, StorageError) and named.errno == code
    assert "'/a/b'" in str(named) and ";" in str(named)


def test_an_error_about_no_file_is_not_renamed() -> None:
    assert storage_error(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
