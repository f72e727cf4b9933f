"""Images and videos with captions as a transformer of diffusers takes them: latents and prompt
embeddings.

The pipeline's own VAE and text encoders compute them once, before the transformer has weights, and
are released. They lie in a directory, a file for each image or video and for each caption, whose
name is a digest of what the file was computed from. So they serve later runs, too. A file has the
digest of its tensors, which every read compares.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from infinity.checkpoint.durable import make_directory, sync_file
from infinity.checkpoint.huggingface.safetensors_file import tensor_bytes
from infinity.config import DataSource, JobConfig
from infinity.config.extras import installed
from infinity.config.schema.train import Diffusion
from infinity.errors import ConfigError, CorruptionError, corrupt, reporting
from infinity.sizes import counted
from infinity.tools.training.data_files import READERS, is_records, read_rows, read_utf8
from infinity.tools.training.denoising import Denoising, Tensors
from infinity.tools.training.images import COLUMNS, Image, content_of, decoded, located
from infinity.tools.training.videos import SUFFIXES, first_frames

_log = logging.getLogger("infinity")

_IMAGES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
_CAPTIONS = ("caption", "text", "prompt")
# By what is trained, images or videos: the word, the endings of files, and the columns of records,
# of which the last one is that of `imagefolder` and `videofolder`.
_KINDS = {
    False: ("image", _IMAGES, (*COLUMNS, "file_name")),
    True: ("video", SUFFIXES, ("videos", "video", "file_name")),
}
_FORMAT = 1  # Of the files, and a part of their names.


def load_images(sources: Sequence[DataSource], config: JobConfig) -> Any:
    """Returns a `datasets.Dataset` of the images or videos with captions of all sources.

    Each row has its number and the names of two files in `cache_of(config)`, which are there when
    this returns. Raises ConfigError for an image without a caption, and for one that cannot be
    read.
    """
    import datasets

    assert config.train.diffusion is not None
    found = captioned(sources, are_videos=config.train.diffusion.frames > 1)
    images, captions = _encoded(found, config, Denoising(config))
    columns = {"row": [*range(len(found))], "image": images, "caption": captions}
    return datasets.Dataset.from_dict(columns)


def cache_of(config: JobConfig) -> Path:
    """Returns the directory of the latents and embeddings of a run."""
    assert config.train.diffusion is not None
    return config.train.diffusion.cache or config.output.directory / "encoded"


def collate(directory: Path, rows: Sequence[dict[str, Any]]) -> Tensors:
    """Returns a batch of rows of `load_images`, for `Denoising.loss`. Embeddings of several lengths
    are padded with zeros, and `encoder_hidden_states_mask` says where they are."""
    images = [read_tensors(directory / row["image"])["moments"] for row in rows]
    texts = [read_tensors(directory / row["caption"]) for row in rows]
    batch = {
        name: pad_sequence([text[name] for text in texts], batch_first=True) for name in texts[0]
    }
    lengths = torch.tensor([len(text["encoder_hidden_states"]) for text in texts])
    if len({*lengths.tolist()}) > 1:
        batch["encoder_hidden_states_mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
    numbers = {
        "row": [row["row"] for row in rows],
        "held_out": [bool(row.get("held_out")) for row in rows],
        "num_tokens": [_num_patches(image.shape) for image in images],
    }
    return {"moments": torch.cat(images), **batch} | {
        name: torch.tensor(values) for name, values in numbers.items()
    }


def measure_images(dataset: Any, directory: Path) -> tuple[int, int, str]:
    """Returns what `job_data.measure` does of other data: the number of patches, 0, and a digest of
    all latents and embeddings, whose files `load_images` has compared with theirs."""
    from safetensors import safe_open

    digest, count = hashlib.sha256(), 0
    for row in dataset:
        digest.update(json.dumps(row["row"]).encode())
        for name in ("image", "caption"):
            with safe_open(directory / row[name], framework="pt") as file:
                digest.update(file.metadata()["sha256"].encode())
                if name == "image":
                    count += _num_patches(file.get_slice("moments").get_shape())
    return count, 0, digest.hexdigest()


def _num_patches(latents: Sequence[int]) -> int:
    """Returns the tokens of the transformer for latents of this shape: (1, channels, height, width)
    or (1, channels, frames, height, width)."""
    return math.prod(latents[2:]) // 4


# -- Images and their captions ---------------------------------------------------------------------


# An image, its caption, and the file that names it, for messages.
Captioned = tuple[Image, str, str]


def captioned(sources: Sequence[DataSource], *, are_videos: bool) -> list[Captioned]:
    """Returns the images or videos of all sources. Raises ConfigError for none, and for one without
    a caption."""
    found = [pair for source in sources for pair in _pairs_of(source, are_videos)]
    if not found:
        word, suffixes, _ = _KINDS[are_videos]
        places = ", ".join(str(source.location) for source in sources)
        raise ConfigError(
            f"data.paths: {places} has no {word}s; expected files ({', '.join(sorted(suffixes))}) "
            f"with captions in .txt files of the same names, or records with {word} and caption"
        )
    other, suffixes, _ = _KINDS[not are_videos]
    num_others = sum(path.suffix.lower() in suffixes for path in _files_in(sources))
    if num_others:
        _log.warning(
            "data.paths: %s left out: they need a run of their own, with another "
            "train.diffusion.frames", counted(num_others, f"{other}s"),
        )  # fmt: skip
    return found


def has_videos(sources: Sequence[DataSource]) -> bool:
    """Whether there are videos, and no images with captions."""
    with suppress(ConfigError):
        return not captioned(sources, are_videos=False)
    with suppress(ConfigError):
        return bool(captioned(sources, are_videos=True))
    # Without captions.
    return any(path.suffix.lower() in SUFFIXES for path in _files_in(sources))


def _files_in(sources: Sequence[DataSource]) -> Iterator[Path]:
    for source in sources:
        yield from source.location.glob(source.pattern if source.has_pattern else "**/*")


def _pairs_of(source: DataSource, are_videos: bool) -> Iterator[Captioned]:
    place = source.location
    records = place if is_records(place) else place / "metadata.jsonl"
    if records.exists():
        yield from _of_records(records, are_videos)
        return
    if place.is_file():
        raise ConfigError(
            f"data.paths: {place}: expected a directory of images, or records: {', '.join(READERS)}"
        )
    for path in sorted(_files_in([source])):
        if path.suffix.lower() not in _KINDS[are_videos][1] or path.name.startswith("."):
            continue
        text = path.with_suffix(".txt")
        if not text.is_file():
            raise ConfigError(f"data.paths: {path} has no caption; expected it in {text}")
        caption = b"".join(read_utf8(text)).decode().strip()
        yield {"bytes": None, "path": str(path)}, caption, str(path)


def _of_records(path: Path, are_videos: bool) -> Iterator[Captioned]:
    word, _, names = _KINDS[are_videos]
    for number, row in enumerate(read_rows(path, list), 1):
        at = f"data.paths: {path}: record {number}"
        value = next((row[name] for name in names if row.get(name)), None)
        caption = next((row[name] for name in _CAPTIONS if isinstance(row.get(name), str)), None)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or caption is None:
            raise ConfigError(
                f"{at} has {', '.join(row)}; expected {word} ({', '.join(names)}) and caption "
                f"({', '.join(_CAPTIONS)})"
            )
        folder = path if path.is_dir() else path.parent
        yield located(value, folder, f"{at}: {word}"), caption, at


# -- Encoding --------------------------------------------------------------------------------------


def _encoded(
    found: Sequence[Captioned], config: JobConfig, denoising: Denoising
) -> tuple[list[str], list[str]]:
    """Returns the names of the files of all images and of all captions. Computes those that are
    not there, or broken."""
    directory, length, vae = cache_of(config), config.data.sequence_length, ["vae"]
    options = denoising.options
    with reporting("open", directory):
        make_directory(directory)
    of_image: list[Any] = [*denoising.facts(vae), options.resolution]
    # Square images have the names that they had without these keys.
    if options.aspect == "keep":
        of_image.append("keep")
    if options.frames > 1:
        of_image += [options.frames, options.fps, f"av {installed('av')}"]
    images = [_name_of(content_of(image, at), of_image) for image, _, at in found]
    wanted = _missing(images, directory)
    if wanted:
        word = _KINDS[options.frames > 1][0]
        _log.warning("computing the latents of %d %ss", len(wanted), word)
        with denoising.pipeline(vae, torch.float32) as pipeline:
            for name, index in wanted.items():
                image, _, at = found[index]
                frames = _frames_of(content_of(image, at), options, at)
                _write(directory / name, denoising.moments(pipeline, frames, at))
    encoders, dtype = denoising.encoders, denoising.dtype
    of_caption = [*denoising.facts(encoders), length, str(dtype)]
    captions = [_name_of(caption.encode(), of_caption) for _, caption, _ in found]
    wanted = _missing(captions, directory)
    if wanted:
        _log.warning("computing the embeddings of %d captions", len(wanted))
        with denoising.pipeline(encoders, dtype) as pipeline:
            for name, index in wanted.items():
                made = denoising.family.embeddings(pipeline, found[index][1], length)
                _write(directory / name, made)
    return images, captions


def _frames_of(content: bytes, options: Diffusion, at: str) -> list[Any]:
    if options.frames > 1:
        return first_frames(content, options.frames, options.fps, at)
    made = decoded({"bytes": content, "path": None}, at)
    if made.mode.startswith(("I", "F", "LAB")):  # PIL would cut off what exceeds 255.
        raise ConfigError(
            f"{at}: expected an image of 8 bits a channel; got the mode {made.mode} of PIL. "
            "Convert it, with a scale of your choice"
        )
    return [made]


def _name_of(content: bytes, facts: Sequence[Any]) -> str:
    digest = hashlib.sha256(json.dumps([_FORMAT, *facts]).encode())
    digest.update(hashlib.sha256(content).digest())
    return f"{digest.hexdigest()[:40]}.safetensors"


def _missing(names: Sequence[str], directory: Path) -> dict[str, int]:
    """Returns the files that are not there or broken, with the number of the row that has them."""
    found: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in found or not (directory / name).exists():
            found.setdefault(name, index)
            continue
        try:
            read_tensors(directory / name)
        except CorruptionError as error:
            _log.warning("%s; it is computed again", error)
            found[name] = index
    return found


# -- The files -------------------------------------------------------------------------------------


def _write(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save

    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with reporting("write", path):
        partial_path.write_bytes(save(own, metadata={"sha256": _digest(own)}))
        sync_file(partial_path)
        partial_path.replace(path)


def read_tensors(path: Path) -> Tensors:
    """Returns the tensors of a file. Raises CorruptionError for one that was damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with reporting("read", path), safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise corrupt(str(path), f"it cannot be read: {error}") from None
    if digest != _digest(found):
        raise corrupt(str(path), "its tensors are not those that were written")
    return found


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
