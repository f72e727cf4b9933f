"""The names of machines and models that are shipped, and the errors for other names.

Imports neither torch nor pydantic, so that a wrong name is refused at once.
"""

from __future__ import annotations

import shlex
import tomllib
from importlib import resources
from pathlib import Path

from infinity.errors import ConfigError


def shipped_in(folder: str) -> list[str]:
    """Returns the names of the files that come with the package."""
    entries = (resources.files("infinity.plan") / folder).iterdir()
    return sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml"))


def refuse_unknown(folder: str, name: str) -> None:
    """Raises ConfigError for the name of a machine or model (folder: "hardware", "models") that is
    no .toml file and none of those that are shipped."""
    if Path(name).is_file() if name.endswith(".toml") else name in shipped_in(folder):
        return
    raise unknown(folder, name)


def unknown(folder: str, name: str) -> ConfigError:
    """Returns the error of a machine or model that is not there."""
    return ConfigError(
        f"{folder}: {name!r} is neither a .toml file nor one of {', '.join(shipped_in(folder))}"
        + (shapes_remedy(name) if folder == "models" else "")
    )


def refuse_no_model(directory: Path) -> None:
    """Raises ConfigError for a directory without config.json."""
    file = directory / "config.json"
    if not file.is_file():
        from infinity.config.paths import refuse_adapter  # `infinity.config` is slow to import.

        refuse_adapter(directory)
        raise ConfigError(
            f"{file}: No such file or directory; expected the directory of a downloaded model"
            + shapes_remedy(str(directory))
        )


def shapes_remedy(hub_name: str) -> str:
    """Returns the option that plans a hub model from shipped shapes, and its download command, to
    append to an error; "" for a name that cannot be one of the hub.

    A name that continues a shipped model's (`-Instruct`, `-0324`) has the shapes of that model.
    """
    from infinity.config.hub import download_remedy

    download = download_remedy(hub_name)
    found = _shapes_of_hub(hub_name.casefold()) if download else None
    if found is None:
        return download
    name, hub = found
    return (
        f". Without a download, `infinity plan --model {name}` plans the shapes of {hub}{download}"
    )


def refuse_model_as_file(config: Path) -> None:
    """Raises ConfigError for a model that stands where a configuration file was expected."""
    if config.is_dir():
        raise ConfigError(
            f"{config}: expected a configuration file; got a directory. For a model's directory: "
            f"infinity plan --model {shlex.quote(str(config))}"
        )
    if remedy := shapes_remedy(str(config)):
        raise ConfigError(f"{config}: expected a configuration file; there is none{remedy}")


def _shapes_of_hub(wanted: str) -> tuple[str, str] | None:
    folder = resources.files("infinity.plan") / "models"
    texts = {name: (folder / f"{name}.toml").read_text() for name in shipped_in("models")}
    hubs = {name: tomllib.loads(text).get("hub", "") for name, text in texts.items()}
    matches = [
        (name, hub) for name, hub in hubs.items()
        if hub and f"{wanted}-".startswith(f"{hub.casefold()}-")
    ]  # fmt: skip
    return max(matches, key=lambda match: len(match[1]), default=None)
