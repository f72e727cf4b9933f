"""The frames of a video that a transformer learns, decoded by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from infinity.config.extras import installed
from infinity.errors import ConfigError, refusing

SUFFIXES = frozenset((".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def refuse_without_av() -> None:
    """Raises ConfigError, which names the package, where videos cannot be decoded."""
    if installed("av") is None:
        raise ConfigError(
            "train.diffusion.frames: videos need PyAV, which is not installed: pip install av"
        )


def first_frames(content: bytes, count: int, fps: float, at: str) -> list[Any]:
    """Returns the first frames as upright images of PIL, `fps` of them a second: frames are
    repeated and left out as by the filter "fps" of FFmpeg. `at` names the video. Raises ConfigError
    for one that is shorter, and for what cannot be read."""
    # Readers of videos raise many kinds for a damaged file.
    with refusing(f"{at}: cannot be read as a video", Exception):
        found = [
            frame.to_image().rotate(frame.rotation, expand=True)
            for frame in islice(_frames(content, fps), count)
        ]
    if len(found) < count:
        raise ConfigError(
            f"{at}: train.diffusion.frames: expected a video of {count} frames at {fps:g} a "
            f"second, got {len(found)}"
        )
    return found


def _frames(content: bytes, fps: float) -> Iterator[Any]:
    import av

    with av.open(io.BytesIO(content), "r") as file:
        graph = av.filter.Graph()
        nodes = graph.add_buffer(file.streams.video[0]), graph.add("fps", str(fps))
        graph.link_nodes(*nodes, graph.add("buffersink")).configure()
        for frame in chain(file.decode(video=0), [None]):  # None: the end.
            graph.push(frame)
            try:
                while True:
                    yield graph.pull()
            except (BlockingIOError, EOFError):  # It needs another frame; it has none left.
                continue
