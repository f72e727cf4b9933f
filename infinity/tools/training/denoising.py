"""`train.method = "diffusion"`: the transformer of a pipeline of diffusers learns to remove noise.

Flow matching as the training scripts of diffusers compute it: at a noise level sigma the
transformer sees (1 - sigma) x + sigma noise, and learns noise - x. Levels, weights of the loss,
packing and positions are diffusers' own functions. What differs between families of pipelines is in
`FAMILIES`. Written against diffusers 0.42.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from infinity.config import JobConfig
from infinity.config.extras import installed
from infinity.errors import ConfigError, UnsupportedError, refusing
from infinity.modules.reading.configuration import CLASS_NAME, table_of_file
from infinity.tools.training.base_identity import sha256_of
from infinity.tools.training.process import give_back
from infinity.tools.training.videos import refuse_without_av

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """How the pipeline of a family calls its encoders and its transformer.

    transformer: the class, whose name config.json has
    predict: calls the transformer for noisy latents; returns the velocity in their shape
    most_tokens: of a caption, above which the pipeline refuses to generate; None if it never does
    has_frames: latents are those of a video, of one frame or more, and have a mean and a deviation
        for each channel; otherwise one shift and one scale for all
    makes_videos: it learns more than one frame
    num_prompts: of `encode_prompt`, one for each encoder, which takes the first where it has None
    pooled: the place of the pooled embedding in what `encode_prompt` returns; None without one
    mask: the place of the mask of the tokens that are no padding; None without one
    options: of `encode_prompt`
    """

    transformer: str
    predict: Callable[[Denoising, Any, Tensor, Tensor, Tensors], Tensor]
    most_tokens: int | None
    has_frames: bool = False
    makes_videos: bool = False
    num_prompts: int = 1
    pooled: int | None = None
    mask: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def embeddings(self, pipeline: Any, caption: str, length: int) -> Tensors:
        """Returns what the text encoders make of a caption, one row of each argument. Raises
        UnsupportedError where a part of it is padding, which the transformer would take for
        text."""
        prompts = [[caption], *[None] * (self.num_prompts - 1)]
        found = pipeline.encode_prompt(*prompts, max_sequence_length=length, **self.options)
        mask = None if self.mask is None else found[self.mask]  # None stands for a full one.
        if mask is not None and not bool(mask.all()):
            raise UnsupportedError(
                f"the {type(pipeline).__name__} pads the caption {caption!r:.40} to "
                f"{mask.numel()} tokens, of which {int(mask.sum())} are text; expected no padding "
                "of a single caption: take the tokenizer and the diffusers that the pipeline was "
                "published for"
            )
        places = {"encoder_hidden_states": 0, "pooled_projections": self.pooled}
        return {name: found[place][0] for name, place in places.items() if place is not None}


class Denoising:
    """The pipeline around a transformer: its encoders, and the loss of the transformer.

    Raises ConfigError for a directory that is no transformer in a pipeline of a family in
    `FAMILIES`.
    """

    def __init__(self, config: JobConfig) -> None:
        if installed("diffusers") is None:
            raise ConfigError(
                'train.method: "diffusion" needs diffusers, which is not installed: '
                "pip install diffusers"
            )
        import diffusers

        assert config.model.path is not None and config.train.diffusion is not None
        self.options, self._seed = config.train.diffusion, config.train.seed
        self.dtype: torch.dtype = getattr(torch, config.precision.compute_dtype)
        is_cpu = config.tiers.device.kind == "cpu" or not torch.cuda.is_available()
        self._device = torch.device("cpu" if is_cpu else "cuda")
        self._path = config.model.path.parent
        index = self._path / "model_index.json"
        if not index.is_file():
            raise ConfigError(
                f'train.method: "diffusion" trains the transformer of a pipeline of diffusers, a '
                f"directory with model_index.json; got {config.model.path}"
            )
        self._index = table_of_file(index)
        name = str(self._index.get("_class_name"))
        if name not in FAMILIES:
            raise ConfigError(
                f'train.method: {index} is a {name}; "diffusion" trains {", ".join(FAMILIES)}. '
                "Any other denoiser trains in a loop of your own (docs/INTEGRATIONS.md)"
            )
        self.family, self._class = FAMILIES[name], getattr(diffusers, name)
        most_tokens, length = self.family.most_tokens, config.data.sequence_length
        if most_tokens is not None and length > most_tokens:
            raise ConfigError(
                f"data.sequence_length: expected at most {most_tokens}, the tokens of a caption "
                f"that a {name} takes; got {length}"
            )
        self._own = own = table_of_file(config.model.path / "config.json")
        if own.get(CLASS_NAME) != self.family.transformer:
            raise ConfigError(
                f"model.path: {config.model.path} is a {own.get(CLASS_NAME)}; expected the "
                f"{self.family.transformer} of a {name}"
            )
        self._vae = table_of_file(self._path / "vae" / "config.json")
        self._refuse_frames(name)
        side = own.get("pos_embed_max_size")  # Patches: 2 x 2 latents.
        self._most_pixels = side and side << len(self._vae["block_out_channels"])
        self._refuse_long(self.options.resolution, "train.diffusion.resolution")
        num_images = min(config.train.batch_size, config.schedule.micro_batch or math.inf)
        if self.options.aspect == "keep" and num_images > 1:
            raise ConfigError(
                'train.diffusion.aspect: images of several sizes ("keep") are micro-batches of '
                f"their own; expected train.batch_size = 1, or schedule.micro_batch = 1; got "
                f"{num_images}"
            )
        self._scheduler = _scheduler(self._path / "scheduler" / "scheduler_config.json")
        self._numbers = _numbers(index, self._index, config.model.path.name, self._scheduler)

    def _refuse_frames(self, name: str) -> None:
        num_frames, ratio = self.options.frames, self._vae.get("scale_factor_temporal", 4)
        if num_frames == 1:
            return
        if not self.family.makes_videos:
            raise ConfigError(
                f"train.diffusion.frames: a {name} makes images; expected 1, got {num_frames}"
            )
        if (num_frames - 1) % ratio:
            raise ConfigError(
                f"train.diffusion.frames: expected one more than a multiple of {ratio}, the frames "
                f"of a latent; got {num_frames}"
            )
        refuse_without_av()

    def _refuse_long(self, num_pixels: int, key: str) -> None:
        if self._most_pixels and num_pixels > self._most_pixels:
            raise ConfigError(
                f"{key}: expected at most {self._most_pixels} pixels a side for this transformer; "
                f"got {num_pixels}"
            )

    # -- Encoders ----------------------------------------------------------------------------------

    @property
    def encoders(self) -> list[str]:
        """The parts of the pipeline that captions need."""
        return [
            name for name, kind in self._index.items()
            if name.startswith(("text_encoder", "tokenizer")) and kind[0]
        ]  # fmt: skip

    def facts(self, names: Sequence[str]) -> list[str]:
        """Returns what the results of these parts depend on: digests of their whole files,
        versions, the device."""
        found = [str(self._index["_class_name"]), self._device.type]
        found += [f"{name} {installed(name)}" for name in ("torch", "diffusers", "transformers")]
        for name in sorted(names):
            with refusing(f"model.path: {self._path / name} cannot be read", OSError):
                files = sorted(filter(Path.is_file, (self._path / name).iterdir()))
                found.append(f"{name} {sha256_of(*files)}")
        return found

    def sha256(self) -> str:
        """Returns a digest of the numbers of VAE and scheduler, on which the loss depends, and of
        the boundary between two transformers."""
        names = ["vae/config.json", "scheduler/scheduler_config.json"]
        names += ["model_index.json"] * (len(self._numbers) < len(self._scheduler.timesteps))
        return sha256_of(*(self._path / name for name in names))

    @contextmanager
    def pipeline(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[Any]:
        """Yields the pipeline with these parts alone, for a `with` block, without gradients. Frees
        their memory behind it."""
        others = {n for n, kind in self._index.items() if isinstance(kind, list)}
        parts: dict[str, Any] = dict.fromkeys(others - {*names, "scheduler"})
        # A broken directory makes diffusers raise any exception.
        with refusing(f"model.path: {self._path} cannot be loaded", Exception):
            made = self._class.from_pretrained(
                self._path, dtype=dtype, local_files_only=True, **parts
            )
        made.to(self._device)
        # Without its third text encoder SD3 asks the transformer for the width of the zeros.
        made.transformer = SimpleNamespace(config=SimpleNamespace(**self._own))
        try:
            with torch.no_grad():
                yield made
        finally:
            made.register_modules(**dict.fromkeys(names))
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            give_back()

    def moments(self, pipeline: Any, images: Sequence[Any], at: str) -> Tensors:
        """Returns mean and log-variance of the latents of an image, or of the frames of a video:
        (1, 2 channels, ...). `at` names it."""
        from PIL.ImageOps import exif_transpose

        side = self.options.resolution
        processor = getattr(pipeline, "image_processor", None) or pipeline.video_processor
        images = [exif_transpose(image).convert("RGB") for image in images]
        width, height = side, side
        if self.options.aspect == "keep":
            scale = side / math.sqrt(math.prod(images[0].size))
            plain = getattr(pipeline, "vae_scale_factor", None)  # Of videos, it is one of two.
            patch = 2 * (plain or pipeline.vae_scale_factor_spatial)
            width, height = (max(round(n * scale / patch), 1) * patch for n in images[0].size)
            self._refuse_long(max(width, height), f'{at}: with train.diffusion.aspect = "keep"')
        pixels = processor.preprocess(images, height=height, width=width, resize_mode="crop")
        pixels = pixels.to(self._device)
        pixels = pixels.transpose(0, 1)[None].contiguous() if self.family.has_frames else pixels
        found = pipeline.vae.encode(pixels).latent_dist.parameters
        patch = 2 * (pixels.shape[-1] // found.shape[-1])
        if pixels.shape[-1] != width or found.shape[-1] % 2:
            raise ConfigError(
                f"train.diffusion.resolution: expected a multiple of {patch}, the pixels of a "
                f"patch; got {side}"
            )
        return {"moments": found}

    # -- The loss ----------------------------------------------------------------------------------

    def loss(self, model: Any, batch: Tensors, step: int) -> Tensor:
        """Returns the loss of a batch of `collate`, a scalar in fp32. Noise and noise levels follow
        from seed, step and row; those of rows that are held out are the same at every step."""
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        device = batch["moments"].device
        drawn = [
            self._draw(moments[None], 0 if is_held_out else step, int(row), bool(is_held_out))
            for moments, row, is_held_out in zip(
                batch["moments"], batch["row"], batch["held_out"], strict=True
            )
        ]
        latents, noise, levels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        first, count = self._numbers[0], len(self._numbers)
        number = first + (levels * count).long().clamp(0, count - 1)  # A level may round to 1.
        times = self._scheduler.timesteps[number].to(device)
        sigmas = self._scheduler.sigmas[number].to(device).view(-1, *[1] * (latents.dim() - 1))
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        found = self.family.predict(self, model, noisy.to(self.dtype), times, batch)
        weights = compute_loss_weighting_for_sd3(self.options.weighting, sigmas)
        squares = weights.float() * (found.float() - (noise - latents)) ** 2
        mean: Tensor = squares.reshape(len(squares), -1).mean(1).mean()
        return mean

    def _draw(self, moments: Tensor, step: int, row: int, is_held_out: bool) -> tuple[Tensor, ...]:
        """Returns latents, noise and level of one row, each drawn on the CPU."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.training_utils import compute_density_for_timestep_sampling
        from diffusers.utils.torch_utils import randn_tensor

        text, options = json.dumps([self._seed, step, row, is_held_out]), self.options
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        source = torch.Generator().manual_seed(number >> 1)
        latents = self._scaled(DiagonalGaussianDistribution(moments).sample(source))
        noise = randn_tensor(latents.shape, source, latents.device, latents.dtype)
        level = compute_density_for_timestep_sampling(
            options.weighting, 1, options.logit_mean, options.logit_std, options.mode_scale,
            generator=source,
        )  # fmt: skip
        return latents, noise, level

    def _scaled(self, latents: Tensor) -> Tensor:
        vae = self._vae
        if not self.family.has_frames:
            shift: float = vae.get("shift_factor") or 0.0
            return (latents - shift) * float(vae["scaling_factor"])
        mean, std = (
            torch.tensor(vae[name], device=latents.device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return (latents - mean) * (1.0 / std)

    def packed(self, latents: Tensor) -> Tensor:
        """Returns latents as a sequence of patches, by the pipeline's own function."""
        pack: Callable[..., Tensor] = self._class._pack_latents  # noqa: SLF001
        return pack(latents, len(latents), latents.shape[1], *latents.shape[-2:])

    def unpacked(self, patches: Tensor, like: Tensor) -> Tensor:
        """Returns patches as latents of the shape of `like`."""
        unpack: Callable[..., Tensor] = self._class._unpack_latents  # noqa: SLF001
        return unpack(patches, *like.shape[-2:], 1)

    def positions(self, latents: Tensor) -> Tensor:
        """Returns the positions of patches, by the pipeline's own function."""
        height, width = (side // 2 for side in latents.shape[-2:])
        make: Callable[..., Tensor] = self._class._prepare_latent_image_ids  # noqa: SLF001
        return make(len(latents), height, width, latents.device, latents.dtype)

    def guidance(self, model: Any, count: int, device: torch.device) -> Tensor | None:
        """Returns the guidance that a distilled model takes as an argument; None for any other."""
        if not model.config.guidance_embeds:
            return None
        return torch.full((count,), self.options.guidance, device=device)


def _scheduler(file: Path) -> Any:
    """Returns the noise levels of training: those of a scheduler's own numbers, whichever solver
    the pipeline samples with."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    kind: Any = FlowMatchEulerDiscreteScheduler
    table = table_of_file(file)
    if "flow_shift" in table:  # Of a solver that is none of flows alone.
        return kind(shift=float(table["flow_shift"]))
    return kind.from_config(table)


def _numbers(index: Path, table: dict[str, Any], part: str, scheduler: Any) -> range:
    """Returns the numbers of the noise levels that a transformer sees, from the most noise to none:
    all, or those on its side of the boundary between two (Wan 2.2). Raises ConfigError."""
    if table.get("expand_timesteps"):
        raise ConfigError(
            f"model.path: {index} has several noise levels in one image (Wan 2.2 TI2V); expected a "
            "pipeline with one"
        )
    count = len(scheduler.timesteps)
    if not (table.get("transformer_2") or [None])[0]:
        return range(count)
    if part not in ("transformer", "transformer_2"):
        raise ConfigError(
            f"model.path: expected transformer or transformer_2 of {index}, each of which has its "
            f"own noise levels; got {part}"
        )
    boundary, found = table.get("boundary_ratio"), range(0)
    if isinstance(boundary, float):
        least = boundary * scheduler.config.num_train_timesteps
        noisy = int((scheduler.timesteps >= least).sum())
        found = range(noisy, count) if part == "transformer_2" else range(noisy)
    if not found:
        raise ConfigError(
            f"model.path: boundary_ratio of {index}: expected a number between 0 and 1, the noise "
            f"level at which transformer_2 takes over; got {boundary}"
        )
    return found


# -- Families --------------------------------------------------------------------------------------


def _packed(own: Denoising, model: Any, noisy: Tensor, times: Tensor, **arguments: Any) -> Tensor:
    """For a transformer that takes patches, a guidance, and further `arguments` of its family."""
    guidance = own.guidance(model, len(noisy), noisy.device)
    found = model(
        hidden_states=own.packed(noisy), timestep=times / 1000, guidance=guidance,
        return_dict=False, **arguments,
    )[0]  # fmt: skip
    return own.unpacked(found, noisy)


def _flux(own: Denoising, model: Any, noisy: Tensor, times: Tensor, batch: Tensors) -> Tensor:
    text, pooled = batch["encoder_hidden_states"], batch["pooled_projections"]
    return _packed(
        own, model, noisy, times, encoder_hidden_states=text, pooled_projections=pooled,
        txt_ids=text.new_zeros(text.shape[1], 3), img_ids=own.positions(noisy),
    )  # fmt: skip


def _qwen(own: Denoising, model: Any, noisy: Tensor, times: Tensor, batch: Tensors) -> Tensor:
    text, mask = batch["encoder_hidden_states"], batch.get("encoder_hidden_states_mask")
    shape = (1, noisy.shape[-2] // 2, noisy.shape[-1] // 2)
    return _packed(
        own, model, noisy, times, encoder_hidden_states=text, encoder_hidden_states_mask=mask,
        img_shapes=[[shape]] * len(noisy),
    )  # fmt: skip


def _plain(own: Denoising, model: Any, noisy: Tensor, times: Tensor, batch: Tensors) -> Tensor:
    """For a transformer that makes patches itself, and takes what `embeddings` returned."""
    del own
    arguments = {key: batch[key] for key in batch if key.endswith(("_states", "_projections"))}
    found: Tensor = model(hidden_states=noisy, timestep=times, **arguments, return_dict=False)[0]
    return found


_ALONE = {"do_classifier_free_guidance": False}
FAMILIES = {
    "FluxPipeline": Family("FluxTransformer2DModel", _flux, 512, num_prompts=2, pooled=1),
    "QwenImagePipeline": Family(
        "QwenImageTransformer2DModel", _qwen, 1024, has_frames=True, mask=1
    ),
    "StableDiffusion3Pipeline": Family(
        "SD3Transformer2DModel", _plain, 512, num_prompts=3, pooled=2, options=_ALONE
    ),
    "WanPipeline": Family(
        "WanTransformer3DModel", _plain, None, has_frames=True, makes_videos=True, options=_ALONE
    ),
}
