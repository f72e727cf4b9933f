"""Which files `[data]` means, and whether they hold text or records.

A file that is neither is refused by the name of its format and never trained on. The checks use the
ending of the file name, its first bytes and, while it is read, its encoding.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import PYTHON_STDLIB, DataSource
from infinity.config.paths import refuse_absent_data
from infinity.errors import ConfigError

_HEAD_NBYTES = 1 << 16
_FORMATS = {
    "JSON": "json5 geojson ipynb",
    "a table": "csv tsv psv xls xlsx ods",
    "Arrow": "arrow feather ipc",
    "ORC": "orc",
    "Avro": "avro",
    "an archive or compressed": "gz tgz bz2 tbz2 xz txz lzma zst zstd lz4 zip 7z rar tar br",
    "arrays": "npy npz h5 hdf5 mat tfrecord mds",
    "weights": "pt pth ckpt bin safetensors gguf onnx",
    "a pickle": "pkl pickle",
    "a document": "pdf doc docx odt rtf epub ppt pptx",
    "a database": "db sqlite sqlite3 mdb lmdb duckdb",
    "an image, sound or film": "png jpg jpeg gif webp bmp tiff wav mp3 flac ogg mp4 mkv avi webm",
    "a program": "exe dll so o a pyc class jar wasm",
}
# Endings of records, and the reader of `datasets` for them.
READERS = {
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson", ".ldjson", ".jl", ".json"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
# Files that `save_to_disk` writes for a dataset, and for a dictionary of datasets.
_SAVED_NAMES = ("state.json", "dataset_dict.json")
_BY_ENDING = {f".{end}": name for name, ends in _FORMATS.items() for end in ends.split()}
_BY_BEGINNING = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7-zip", b"PAR1": "Parquet", b"ARROW1": "Arrow",
    b"Obj\x01": "Avro", b"\x93NUMPY": "NumPy", b"\x89HDF": "HDF5", b"%PDF-": "PDF",
    b"SQLite format 3\0": "SQLite", b"GGUF": "GGUF", b"{\\rtf": "RTF",
}  # fmt: skip
_PROSE = frozenset((".txt", ".text", ".md", ".rst"))  # Endings that declare text.
_REMEDY = (
    "data.paths takes plain text in UTF-8, or records as JSON lines, JSON, Parquet or a directory "
    "of `datasets`. Write the text that is to be learned to .txt files"
)


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this directory."""
    return any((path / name).is_file() for name in _SAVED_NAMES)


def is_records(path: Path) -> bool:
    """Whether a file or directory holds records by its name, or JSON lines without such a name."""
    if path.is_dir():
        return is_saved_dataset(path)
    if path.suffix.lower() in READERS:
        return True
    is_named = path.suffix.lower() in _BY_ENDING or path.suffix.lower() in _PROSE
    return not is_named and path.is_file() and _are_json_lines(_head(path))


def refuse_other_formats(path: Path) -> bool:
    """Raises ConfigError that names the file and its format if it is not plain text.

    Returns True if the name declares text, but the lines are JSON objects.
    """
    found = _BY_ENDING.get(path.suffix.lower())
    head = b"" if found else _head(path)
    for beginning, name in _BY_BEGINNING.items():
        found = found or (name if head.startswith(beginning) else None)
    if found is not None:
        raise ConfigError(f"data.paths: {path} is {found}, not text; {_REMEDY}")
    return _are_json_lines(head)


def _are_json_lines(head: bytes) -> bool:
    """Whether the first line, and the second if it is complete, are JSON objects."""
    lines = [line for line in head.split(b"\n") if line.strip()]
    complete = lines[:2] if len(lines) > 2 or head.endswith(b"\n") else lines[:1]
    try:
        return bool(complete) and all(isinstance(json.loads(line), dict) for line in complete)
    except (ValueError, RecursionError):
        return False


class Utf8:
    """Checks the bytes of one file chunk by chunk. A character may span two chunks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # The offset of the first byte in `_rest`.
        self._rest = b""

    def feed(self, chunk: bytes, *, is_end: bool = False) -> None:
        """Raises ConfigError with the offset of the first byte that is no text."""
        content = self._rest + chunk
        if (at := content.find(b"\0")) >= 0:
            raise self._refusal(at, "a NUL, which no text has; is it binary, or UTF-16?")
        try:
            content.decode("utf-8")
            self._rest = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or is_end:
                raise self._refusal(error.start, f"0x{content[error.start]:02x}") from None
            self._rest = content[error.start :]
        self._offset += len(content) - len(self._rest)

    def _refusal(self, at: int, what: str) -> ConfigError:
        return ConfigError(
            f"data.paths: {self._path} is not UTF-8: at offset {self._offset + at} is {what}. "
            "Convert it, such as with iconv -f LATIN1 -t UTF-8, or leave it out"
        )


def is_utf8(path: Path) -> bool:
    """Whether a file can be read and is UTF-8."""
    try:
        Utf8(path).feed(path.read_bytes(), is_end=True)
    except (ConfigError, OSError):
        return False
    return True


def _head(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # Does not wait for a FIFO.
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"data.paths: {path} is no regular file; {_REMEDY}")
            return os.read(fd, _HEAD_NBYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from None


_log = logging.getLogger(__name__)


# Below the directory of the standard library, but not part of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of `[data]`: all of them text, or all of them records."""

    texts: list[Path]
    records: list[Path]  # Files, or directories of `datasets.save_to_disk`.


def collect_files(sources: Sequence[DataSource]) -> Sources:
    """Returns every file of every source once, sorted within each source.

    Hidden files and directories are skipped. Raises ConfigError that names a missing source, a
    source without a matching file, the first file that is neither text nor records, or one of each.
    """
    files: dict[Path, bool] = {}  # Whether it holds records.
    for source in sources:
        found = _files_of(source)
        if not found:
            raise ConfigError(
                f"data.paths: no file below {source.location} matches {source.pattern!r}"
            )
        files.update({file: is_records(file) for file in found})
    texts = [file for file, has_records in files.items() if not has_records]
    records = [file for file, has_records in files.items() if has_records]
    if texts and records:
        raise ConfigError(
            f"data.paths: {records[0]} holds records and {texts[0]} does not; expected one kind"
        )
    as_json = [file for file in texts if refuse_other_formats(file)]
    if as_json:
        _log.warning(
            "data.paths: the lines of %s (%d files in all) are JSON objects; braces, quotes and "
            "keys are learned as they stand there", as_json[0], len(as_json),
        )  # fmt: skip
    return Sources(texts, records)


def _files_of(source: DataSource) -> list[Path]:
    location = source.location
    if location.is_file():
        return [location]
    refuse_absent_data([source])
    if is_saved_dataset(location):
        return [location]
    found = _matching(location, source.pattern)
    if not found and "pattern" not in source.model_fields_set:
        found = [path for path in _matching(location, "**/*") if is_records(path)]
    excluded = _NOT_STDLIB if source.path == PYTHON_STDLIB else frozenset()
    files = []
    for path in found:
        parts = path.relative_to(location).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if not is_hidden and excluded.isdisjoint(parts) and path.is_file():
            files.append(path)
    # Files with deliberate encoding errors, for the library's own tests.
    if source.path == PYTHON_STDLIB:
        return [path for path in files if is_utf8(path)]
    return files


def _matching(location: Path, pattern: str) -> list[Path]:
    try:
        return sorted(location.glob(pattern))
    except (ValueError, NotImplementedError, OSError, RecursionError) as error:
        raise ConfigError(f"data.paths: pattern {pattern[:80]!r}: {error}") from None
