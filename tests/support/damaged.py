"""Checkpoints whose files were changed by somebody who knows how to compute a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from infinity.checkpoint.run.manifest import DIGEST_NAME, MANIFEST_NAME, digest_line


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a file of one extent, and its entry in the manifest."""
    (checkpoint / name).write_bytes(content)
    body = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    (entry,) = [file for file in body["files"] if file["name"] == name]
    (extent,) = entry["extents"]
    entry["nbytes"] = extent["nbytes"] = len(content)
    extent["sha256"] = hashlib.sha256(content).hexdigest()
    manifest = json.dumps(body).encode()
    (checkpoint / MANIFEST_NAME).write_bytes(manifest)
    (checkpoint / DIGEST_NAME).write_bytes(digest_line(manifest))
