"""Models of the Hugging Face hub, where a directory was expected: in the local cache, or by the
command that downloads them. Downloads nothing."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

PIPELINE_NAME = "model_index.json"  # In the directory of a pipeline of diffusers.
# An owner and a name; the hub's rule for both.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def download_remedy(path: str | Path) -> str:
    """Returns the command that would make a directory of a GGUF file, or of one in a directory, or
    download a path's last two parts as a model of the hub, to append to an error about a missing
    directory; "" for a path that cannot be meant so.

    A path below a directory that exists was more likely mistyped.
    """
    inside = sorted(file for file in Path(path).glob("*.gguf") if not file.match("mmproj*"))
    for file in [Path(path)][: Path(path).suffix == ".gguf"] or inside:
        return f". `infinity convert {shlex.quote(str(file))} -o DIR` makes one of a GGUF file"
    parts = Path(path).parts[-2:]
    name = "/".join(parts)
    if not _HUB_ID.fullmatch(name) or name.count("/") != 1 or Path(path).parent.is_dir():
        return ""
    target = parts[-1]
    return (
        f". If it is a model of the Hugging Face hub: hf download {name} --local-dir "
        f"{shlex.quote(target)}, then give that directory (with --include '*.json' first, a few "
        "kB, `infinity new` and `infinity plan` say whether it fits)"
    )


def in_hub_cache(path: Path) -> Path:
    """Returns the snapshot of a model in the hub's local cache, for its repository id (the last two
    parts of the path) or its folder there. Returns any other path as it is.

    The snapshot is that of `refs/main`. A path that exists is never taken for an id. A pipeline of
    diffusers means its transformer.
    """
    if (path / "config.json").exists():
        return path
    if (path / PIPELINE_NAME).exists() and (path / "transformer").is_dir():
        return path / "transformer"
    folder = path
    if not path.exists() and download_remedy(path):
        folder = _cache() / "--".join(("models", *path.parts[-2:]))
    main = folder / "refs" / "main"
    if not main.is_file():
        return path
    snapshot = folder / "snapshots" / Path(main.read_text().strip()).name
    return in_hub_cache(snapshot) if snapshot.is_dir() else path


def model_name(directory: Path) -> str:
    """Returns the name of a model's directory; of a snapshot, that of its repository."""
    found = _directory_of_pipeline(directory)
    if found.parent.name == "snapshots":
        return found.parent.parent.name.rpartition("--")[2]
    return found.name


def published_name(directory: Path) -> str | None:
    """Returns the repository id of a snapshot in the hub's cache; None of any other directory."""
    folder = _directory_of_pipeline(directory).parent
    if folder.name != "snapshots" or not folder.parent.name.startswith("models--"):
        return None
    return folder.parent.name.removeprefix("models--").replace("--", "/")


def base_name(directory: Path) -> str:
    """Returns the name of a model for configurations: its repository id, or where it lies."""
    return published_name(directory) or str(directory)


def published_commit(directory: Path) -> str | None:
    """Returns the commit of a snapshot in the hub's cache; None of any other directory."""
    return _directory_of_pipeline(directory).name if published_name(directory) else None


def downloaded_commit(directory: Path) -> str:
    """Returns the commit from which `hf download --local-dir` has made a directory, "" of any
    other. It does not record the name of the model."""
    known = _directory_of_pipeline(directory) / ".cache/huggingface/download/config.json.metadata"
    return known.read_text().partition("\n")[0][:12] if known.is_file() else ""


def _directory_of_pipeline(directory: Path) -> Path:
    """Returns the pipeline that a directory is a part of, or else the directory, without links."""
    found = directory.resolve()
    return found.parent if (found.parent / PIPELINE_NAME).is_file() else found


def _cache() -> Path:
    """Returns the hub's cache, by the rules of huggingface_hub."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    home = Path(os.environ.get("HF_HOME", home))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
