"""The TOML files of machines and models: shipped files by name, a user's files by path. Imports no
torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from infinity.bounded import MAX_TEXT_NBYTES, MalformedError, parse_toml, read_bytes
from infinity.errors import ConfigError
from infinity.plan.files import unknown


class Table(BaseModel):
    """A table of such a file. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls, folder: str, name: str) -> Self:
        """Reads `infinity/plan/FOLDER/NAME.toml`, or the file `name` if it ends in .toml.

        Raises ConfigError for a missing file, with the names of the shipped files, and for invalid
        content.
        """
        shipped = resources.files("infinity.plan") / folder
        file = Path(name if name.endswith(".toml") else str(shipped / f"{name}.toml"))
        try:
            text = read_bytes(file, max_nbytes=MAX_TEXT_NBYTES).decode()
        except OSError:
            raise unknown(folder, name) from None
        except ValueError as error:  # Not a regular file, too long, or not UTF-8.
            raise ConfigError(f"{folder}: {name} is no text of TOML: {error}") from None
        try:
            return cls.model_validate(parse_toml(text))
        except MalformedError as error:
            where = "".join(f":{number}" for number in (error.line, error.column) if number)
            raise ConfigError(f"{name}{where}: {error}") from None
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(str(part) for part in fault["loc"])
            raise ConfigError(f"{folder} {name}: {key}: {fault['msg']}") from None

    def scaled(self, by: float, *rates: str, **others: Any) -> Self:
        """Returns the table with these rates multiplied, as far as they are set, and `others` as
        given."""
        found = {name: getattr(self, name) for name in rates}
        scaled = {name: by * rate for name, rate in found.items() if rate is not None}
        return self.model_copy(update=scaled | others)
