"""Names of models on the Hugging Face hub, where a directory was expected. Pure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

# An owner and a name; the hub's rule for both.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def download_remedy(path: str | Path) -> str:
    """Returns the command that would download a path's last two parts as a model of the hub, to
    append to an error about a missing directory; "" for a path that cannot be meant so.

    A path below a directory that exists was more likely mistyped.
    """
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
