"""Checkpoints whose files were changed by somebody who knows how to compute a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.checkpoint.run.format import DIGEST_NAME, MANIFEST_NAME, digest_line


def edit_manifest(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, whose digest is right then."""
    body = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    edit(body)
    content = json.dumps(body).encode()
    (checkpoint / MANIFEST_NAME).write_bytes(content)
    (checkpoint / DIGEST_NAME).write_bytes(digest_line(content))


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a file of one extent, and its entry in the manifest."""
    (checkpoint / name).write_bytes(content)

    def edit(body: dict[str, Any]) -> None:
        (entry,) = [file for file in body["files"] if file["name"] == name]
        (extent,) = entry["extents"]
        entry["nbytes"] = extent["nbytes"] = len(content)
        extent["sha256"] = hashlib.sha256(content).hexdigest()

    edit_manifest(checkpoint, edit)
