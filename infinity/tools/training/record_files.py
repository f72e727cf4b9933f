"""The rows of files of records, as the file writes them: JSON lines, JSON, Parquet, `datasets`.

Rows of JSON are what `json` reads, with numbers that remember their text: no reader of tables
infers a date from a text, or gives a row the keys of another. Arrow writes a key that a row does
not have as null. So nulls in the structs of Parquet and of `datasets` are left out; inside columns
of JSON (`datasets.Json`) they stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from infinity.bounded import MalformedError, open_regular, unique_keys
from infinity.errors import ConfigError
from infinity.tools.training.source_files import READERS

_LONGEST_LINE_NBYTES = 1 << 28
_NUM_ROWS = 256  # At a time.
_BOM = b"\xef\xbb\xbf"

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
    try:
        if reader == "json":
            yield from _rows_of_json(path)
        elif reader == "parquet":
            yield from _rows_of_parquet(path, columns_of)
        else:
            yield from _rows_of_disk(path, columns_of)
    except ConfigError:
        raise
    except MalformedError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error}") from None
    except Exception as error:  # Readers of Arrow raise many kinds for a damaged file.
        reason = " ".join(str(error).split())
        raise ConfigError(f"data.paths: {path} cannot be read: {reason}") from error


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


def _rows_of_parquet(path: Path, columns_of: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = columns_of(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=_NUM_ROWS, columns=columns):
            yield from _rows_of_batch(batch)


def _rows_of_disk(path: Path, columns_of: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found:
            raise ConfigError(f"data.paths: {path} has no split train, but {', '.join(found)}")
        found = found["train"]
    found = found.select_columns(columns_of(found.column_names)).with_format("arrow")
    for table in found.iter(_NUM_ROWS):
        yield from _rows_of_batch(table)


def _rows_of_batch(batch: Any) -> Iterator[Row]:
    kinds = {name: batch.schema.field(name).type for name in batch.schema.names}
    classes = _names_of_classes(batch.schema)
    for row in batch.to_pylist():
        for name in classes:
            number = row[name]
            row[name] = None if number is None or number < 0 else classes[name][number]
        yield {name: _without_nulls(value, kinds[name]) for name, value in row.items()}


def _names_of_classes(schema: Any) -> dict[str, list[str]]:
    """Returns the names of the classes that a column has the numbers of."""
    import datasets

    if b"huggingface" not in (schema.metadata or {}):
        return {}
    features = datasets.Features.from_arrow_schema(schema).items()
    return {name: kind.names for name, kind in features if isinstance(kind, datasets.ClassLabel)}


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
