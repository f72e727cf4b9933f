"""Videos with captions: which frames are learned, and what cannot be."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from infinity.config import DataSource, SwapConfig
from infinity.config.schema import changed
from infinity.errors import ConfigError
from infinity.simulate.job import batch_of
from infinity.tools.training import latents, videos
from tests.support.commands import run_command

av = pytest.importorskip("av", reason="pip install av")
pipelines = pytest.importorskip("tests.support.models.pipelines")

FRAMES = np.random.default_rng(0).integers(0, 256, (7, 18, 20, 3), dtype=np.uint8)


def video(form: str = "matroska", codec: str = "ffv1", pixels: str = "bgr0") -> bytes:
    """FRAMES at 16 a second, without a loss."""
    written = io.BytesIO()
    with av.open(written, "w", format=form) as file:
        stream = file.add_stream(codec, rate=16, options={"qp": "0"} if "264" in codec else {})
        stream.width, stream.height, stream.pix_fmt = 20, 18, pixels
        for frame in FRAMES:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return written.getvalue()


MP4 = ("mp4", "libx264rgb", "rgb24")


def numbers(content: bytes, count: int, fps: float) -> list[int]:
    """Which of FRAMES are returned."""
    found = [np.asarray(image) for image in videos.first_frames(content, count, fps, "it")]
    return [next(n for n, own in enumerate(FRAMES) if np.array_equal(own, one)) for one in found]


@pytest.mark.parametrize("form", [("matroska", "ffv1", "bgr0"), MP4], ids=["ms", "exact"])
@pytest.mark.parametrize(("fps", "want"), [
    (16, [0, 1, 2, 3, 4, 5, 6]), (32, [0, 0, 1, 1, 2, 2, 3]),
])  # fmt: skip
def test_frames_are_those_that_are_shown_at_a_rate(
    form: tuple[str, str, str], fps: float, want: list[int]
) -> None:
    """Matroska rounds the times of its frames to milliseconds."""
    assert numbers(video(*form), len(want), fps) == want


def test_a_lower_rate_leaves_frames_out_and_too_few_are_refused() -> None:
    assert numbers(video(*MP4), 3, 8) == [0, 2, 4]
    with pytest.raises(ConfigError, match=r"it: .* a video of 8 frames at 16 a second, got 7"):
        videos.first_frames(video(), 8, 16, "it")


def test_a_video_of_a_camera_held_upright_is_upright() -> None:
    content = bytearray(video(*MP4))
    matrix = content.find(b"tkhd") + 44  # ISO 14496-12, 8.3.2: of a rotation by 90 degrees.
    content[matrix : matrix + 36] = struct.pack(
        ">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 18 << 16, 0, 1 << 30
    )
    [image] = videos.first_frames(bytes(content), 1, 16, "it")
    assert np.array_equal(np.asarray(image), np.rot90(FRAMES[0], -1))


@pytest.mark.parametrize("content", [b"", b"no video", video()[:300]], ids=["none", "text", "cut"])
def test_what_is_no_video_is_named(content: bytes) -> None:
    with pytest.raises(ConfigError, match="it: cannot be read as a video"):
        videos.first_frames(content, 1, 16, "it")


def test_a_missing_decoder_is_named_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(videos, "installed", lambda _: None)
    with pytest.raises(ConfigError, match="pip install av"):
        videos.refuse_without_av()


def test_new_writes_a_file_for_videos_that_trains(tmp_path: Path) -> None:
    pipelines.pipeline("wan", tmp_path / "wan")
    pipelines.videos(tmp_path / "videos", 3)
    file = tmp_path / "run.toml"
    said = run_command("new", tmp_path / "wan", "--data", tmp_path / "videos", "-o", file).output
    assert "Your data, 3 videos with captions" in said
    small = ("train.steps=1", "train.diffusion.resolution=16", "tiers.host.capacity=32MiB")
    small += ("train.diffusion.frames=5",)
    done = run_command("train", file, *(word for size in small for word in ("--set", size)))
    assert done.exit_code == 0, done.output
    config = SwapConfig.load(file)
    assert config.train is not None and config.train.diffusion is not None
    images = changed(config, {"train.diffusion.frames": 1})
    caption = config.data.sequence_length if config.data else 0
    many, one = (batch_of(found).sequence_length - caption for found in (config, images))
    assert many == 9 * one  # Frames 2 to 33 are eight latents.


@pytest.mark.parametrize("form", ["directory", "records"])
def test_videos_are_told_from_images(form: str, tmp_path: Path) -> None:
    place = tmp_path / "data"
    if form == "directory":
        pipelines.videos(place, 2)
    else:
        place = tmp_path / "rows.jsonl"
        place.write_text(json.dumps({"video": "0.mkv", "caption": "a cat"}))
    assert latents.has_videos([DataSource(path=place)])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "0.png", "caption": "a cat"}))
    assert not latents.has_videos([DataSource(path=tmp_path / "rows.jsonl")])


def test_images_beside_videos_are_left_out_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipelines.videos(tmp_path / "data", 2)
    sources = [DataSource(path=tmp_path / "data")]
    assert len(latents.captioned(sources, are_videos=True)) == 2 and not caplog.text
    (tmp_path / "data" / "9.png").touch()
    latents.captioned(sources, are_videos=True)
    assert "1 image left out" in caplog.text


def test_a_video_without_a_caption_is_named(tmp_path: Path) -> None:
    pipelines.videos(tmp_path / "videos", 1)
    (tmp_path / "videos" / "0.txt").unlink()
    sources = [DataSource(path=tmp_path / "videos")]
    assert latents.has_videos(sources)
    with pytest.raises(ConfigError, match=r"0\.mkv has no caption; expected it in .*0\.txt"):
        latents.captioned(sources, are_videos=True)
