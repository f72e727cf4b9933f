"""The native module's own checks: wrong calls raise, in this process, which goes on."""

from __future__ import annotations

from pathlib import Path

from infinity import _core  # noqa: TID251 (its own checks are what is tested)
from infinity.storage.probe import crc32c_kernels

from .hostile_calls import check


def test_no_wrong_call_of_the_native_module_is_accepted_or_ends_the_interpreter(
    tmp_path: Path,
) -> None:
    assert check(_core, tmp_path) > 400


def test_the_probe_names_the_checksum_kernels_of_the_processor() -> None:
    assert crc32c_kernels()[-1] == "table"
