"""Recognises files that are not text, so that another format is named and never trained on.

The checks use the ending of the file name, its first bytes and, while it is read, its encoding.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

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
