"""The files of `[data]`: whether they hold text or records, and their content.

A file that is neither is refused by the name of its format and never trained on. The checks use the
ending of the file name, its first bytes and, while it is read, its encoding.

Rows of JSON are what `json` reads, with numbers that remember their text: no reader of tables
infers a date from a text, or gives a row the keys of another. Arrow writes a key that a row does
not have as null. So nulls in the structs of Parquet and of `datasets` are left out; inside columns
of JSON (`datasets.Json`) they stay.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from infinity.bounded import MalformedError, open_regular, unique_keys
from infinity.config import PYTHON_STDLIB, DataSource
from infinity.config.paths import refuse_absent_data
from infinity.errors import ConfigError, refusing
from infinity.sizes import MIB

_log = logging.getLogger(__name__)

_HEAD_NBYTES = 1 << 16
_READ_NBYTES = MIB
_LONGEST_LINE_NBYTES = 1 << 28
_NUM_ROWS = 256  # At a time, or fewer that are large.
_ROWS_NBYTES = 64 * MIB
_BOM = b"\xef\xbb\xbf"
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


def read_utf8(path: Path, limit_nbytes: int | None = None) -> Iterator[bytes]:
    """Yields the bytes of a file, or its first `limit_nbytes`, in chunks, without a byte order
    mark. Raises ConfigError for a file that cannot be read, and with the offset of the first byte
    that is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with _reading(path, OSError), path.open("rb") as file:
            offset = len(_BOM) if file.read(len(_BOM)) == _BOM else file.seek(0)
            while limit_nbytes is None or offset < limit_nbytes:  # The limit may cut a character.
                left = _READ_NBYTES if limit_nbytes is None else limit_nbytes - offset
                chunk = file.read(min(_READ_NBYTES, left))
                if (at := chunk.find(b"\0")) >= 0:
                    what = "a NUL, which no text has: it is binary, or UTF-16"
                    raise _not_utf8(path, offset + at, what)
                offset += len(chunk)
                decoder.decode(chunk, final=not chunk)
                if not chunk:
                    return
                yield chunk
    except UnicodeDecodeError as error:
        at, byte = offset - len(error.object) + error.start, error.object[error.start]
        raise _not_utf8(path, at, f"0x{byte:02x}") from None


def _reading(path: Path, *kinds: type[Exception]) -> AbstractContextManager[None]:
    return refusing(f"data.paths: {path} cannot be read", *kinds)


def _not_utf8(path: Path, offset: int, what: str) -> ConfigError:
    return ConfigError(
        f"data.paths: {path} is not UTF-8: at offset {offset} is {what}. "
        "Convert it, such as with iconv -f LATIN1 -t UTF-8, or leave it out"
    )


def _head(path: Path) -> bytes:
    with _reading(path, OSError, MalformedError), open(open_regular(path), "rb") as file:
        return file.read(_HEAD_NBYTES)


# Below the directory of the standard library, but not part of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def collect_files(sources: Sequence[DataSource]) -> tuple[list[Path], list[Path]]:
    """Returns every file of every source once, sorted within each source: (files of text, files or
    directories of records), of which one is empty.

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
    return texts, records


def _files_of(source: DataSource) -> list[Path]:
    location = source.location
    if location.is_file():
        return [location]
    refuse_absent_data([source])
    if is_saved_dataset(location):
        return [location]
    found = _matching(location, source.pattern)
    if not found and not source.has_pattern:
        found = [path for path in _matching(location, "**/*") if is_records(path)]
    excluded = _NOT_STDLIB if source.path == PYTHON_STDLIB else frozenset()
    files = []
    for path in found:
        parts = path.relative_to(location).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if not is_hidden and excluded.isdisjoint(parts) and path.is_file():
            files.append(path)
    if source.path != PYTHON_STDLIB:
        return files
    readable = []
    for path in files:  # Some have deliberate encoding errors, for the library's own tests.
        with suppress(ConfigError):
            deque(read_utf8(path), maxlen=0)
            readable.append(path)
    return readable


def _matching(location: Path, pattern: str) -> list[Path]:
    kinds = (ValueError, NotImplementedError, OSError, RecursionError)
    with refusing(f"data.paths: pattern {pattern[:80]!r}", *kinds):
        return sorted(location.glob(pattern))


def stamp_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns what tells the content of a file, or of those in a directory, from another: names,
    bytes and times."""
    files = sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
    return tuple((str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files)


def texts_in(value: Any, *, but: str = "") -> Iterator[str]:
    """Yields the texts of a record, but for those under the key `but`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            if key != but:
                yield from texts_in(inner, but=but)


# -- Rows of records ------------------------------------------------------------------------------


Row = dict[str, Any]


class WrittenFloat(float):
    """A number of JSON with a fraction or an exponent. `text` is how the file writes it."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Reads the text of a number."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def read_rows(path: Path, columns_of: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """Yields the rows of a file, or of a directory of `datasets.save_to_disk`.

    columns_of: returns those of a table's columns that are needed; rows of JSON have all
    Raises ConfigError, which names the file and, of JSON lines, the line.
    """
    reader = "disk" if path.is_dir() else READERS.get(path.suffix.lower(), "json")
    with _reading(path, Exception):  # Readers of Arrow raise many kinds for a damaged file.
        if reader == "json":
            yield from _rows_of_json(path)
        elif reader == "parquet":
            yield from _rows_of_parquet(path, columns_of)
        else:
            yield from _rows_of_disk(path, columns_of)


def parse(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError."""
    return json.loads(text, parse_float=WrittenFloat, object_pairs_hook=unique_keys)


def _rows_of_json(path: Path) -> Iterator[Row]:
    with open(open_regular(path), "rb") as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        begin = file.tell()
        first = next(filter(None, map(bytes.strip, iter(lambda: file.readline(1 << 20), b""))), b"")
        file.seek(begin)
        if first.startswith(b"[") or path.suffix.lower() == ".json":
            try:
                yield from _rows_of_document(file.read().decode(), path)
                return
            except ValueError as error:  # More than one value: JSON lines by another name.
                if not str(error).startswith("Extra data"):
                    raise
            file.seek(begin)
        yield from _rows_of_lines(file, path)


def _rows_of_document(content: str, path: Path) -> Iterator[Row]:
    """Yields the rows of a whole file: of a list, or the one that it is."""
    found = parse(content) if content.strip() else []
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        if not isinstance(row, dict | str):
            raise ConfigError(
                f"data.paths: {path}: record {number} is no object; expected a list of records"
            )
        yield {"text": row} if isinstance(row, str) else row


def _rows_of_lines(file: BinaryIO, path: Path) -> Iterator[Row]:
    number = 0
    while line := file.readline(_LONGEST_LINE_NBYTES):
        number += 1
        if not line.strip():
            continue
        reason = "no object"
        try:
            row = parse(line.decode())
        except (ValueError, RecursionError) as fault:
            row, reason = None, f"no JSON: {fault}"
        if not isinstance(row, dict):
            raise ConfigError(
                f"data.paths: {path}:{number} is {reason}; expected one record per line, "
                "in braces. Repair or remove that line"
            )
        yield row


def rows_at_once(nbytes: int, count: int) -> int:
    """Returns how many of `count` rows of together `nbytes` are taken at a time: few large ones."""
    return max(1, min(_NUM_ROWS, _ROWS_NBYTES * count // max(nbytes, 1)))


def _rows_of_parquet(path: Path, columns_of: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    from pyarrow import parquet

    # Otherwise it reads a whole row group.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=MIB) as file:
        columns = columns_of(file.schema_arrow.names)
        count = rows_at_once(path.stat().st_size, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=count, columns=columns):
            yield from _rows_of_batch(batch)


def _rows_of_disk(path: Path, columns_of: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found:
            raise ConfigError(f"data.paths: {path} has no split train, but {', '.join(found)}")
        found = found["train"]
    found = found.select_columns(columns_of(found.column_names)).with_format("arrow")
    for table in found.iter(rows_at_once(found.data.nbytes, len(found.data))):
        yield from _rows_of_batch(table)


def _rows_of_batch(batch: Any) -> Iterator[Row]:
    import datasets

    kinds = {name: batch.schema.field(name).type for name in batch.schema.names}
    classes: dict[str, list[str]] = {}  # By column, the names of what it has the numbers of.
    if b"huggingface" in (batch.schema.metadata or {}):
        features = datasets.Features.from_arrow_schema(batch.schema).items()
        classes = {n: kind.names for n, kind in features if isinstance(kind, datasets.ClassLabel)}
    for row in batch.to_pylist():
        for name in classes:
            number = row[name]
            row[name] = None if number is None or number < 0 else classes[name][number]
        yield {name: _without_nulls(value, kinds[name]) for name, value in row.items()}


def _without_nulls(value: Any, kind: Any) -> Any:
    """Returns a value of an Arrow type without the keys that only other rows have."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return parse(value)
    if pa.types.is_struct(kind):
        return {
            field.name: _without_nulls(value[field.name], field.type)
            for field in kind
            if value[field.name] is not None
        }
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return [_without_nulls(inner, kind.value_type) for inner in value]
    return value
