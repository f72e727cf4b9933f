"""`infinity train` with method = "diffusion": the bits of a plain loop over the classes of diffusers;
latents and embeddings are computed once; diffusers loads what a run exports."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import infinity
from infinity.config import DataSource, JobConfig, SwapConfig
from infinity.config.hub import in_hub_cache
from infinity.config.paths import with_located_model
from infinity.config.schema import changed
from infinity.config.schema.inputs import AdapterConfig
from infinity.errors import ConfigError, CorruptionError, UnsupportedError
from infinity.modules.reading.configuration import config_of_directory
from infinity.tools.training import denoising, latents, program
from infinity.tools.training.model import build_model, plan_model
from infinity.tools.training.replay import replay
from infinity.tools.training.settle import settle
from tests.support.bits import aligned
from tests.support.commands import run_command
from tests.support.exhaustive import sampled
from tests.train.jobs import lines_of, run_and_kill

diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")
training_utils = pytest.importorskip("diffusers.training_utils")
pipelines = pytest.importorskip("tests.support.models.pipelines")

SIDE, LENGTH, ROWS, STEPS, SEED = 16, 12, 8, 4, 3
# Height and width of the images in `aspect = "keep"`, by the pixels of a patch.
SIDES = {
    4: [(28, 8), (8, 32), (16, 16), (16, 20), *[(12, 20)] * 4],
    8: [(24, 8), (8, 32), *[(16, 16)] * 6],
}
FRAMES = 5
LENGTHS = {"qwen": 300}  # Its template has one token for each byte here.
JOB = """
[tiers]
host = {{capacity = "32MiB"}}
device = {{kind = "cpu"}}
[[tiers.nvme]]
path = "swap"
[placement]
{placement}
[model]
path = "{pipeline}"
seed = 5
{adapter}
[data]
paths = ["{images}"]
sequence_length = {length}
held_out = 0.0
shuffle = false
[output]
directory = "output"
[optimizer]
lr = 1e-2
weight_decay = 0.1
max_grad_norm = "off"
no_decay = []
[train]
method = "diffusion"
steps = 4
batch_size = 2
gradient_accumulation_steps = 2
seed = 3
threads = 1
activation_checkpointing = {repeats}
[train.diffusion]
resolution = 16
weighting = "logit_normal"
cache = "{cache}"
[checkpoint]
every = 1
"""
PLACES = {
    "device": 'parameters = "device"\nmaster = "host"\nmoments = "host"\ngradients = "host"',
    "host": 'parameters = "host"\nmaster = "host"\nmoments = "host"\ngradients = "host"',
    "nvme": 'parameters = "nvme"\nmaster = "nvme"\nmoments = "nvme"\ngradients = "nvme"',
}
ADAPTER = "[adapter]\nrank = 2\nalpha = 4"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("diffusion")
    pipelines.images(made / "images", ROWS)
    pipelines.videos(made / "videos", ROWS)
    for family in pipelines.MAKERS:
        pipelines.pipeline(family, made / family)
    return made


def job_of(
    directory: Path, home: Path, family: str, place: str = "nvme", adapter: str = ""
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "job.toml").write_text(
        JOB.format(
            length=LENGTHS.get(family, LENGTH),
            repeats=str(family == "sd3").lower(),
            placement=PLACES[place],
            pipeline=home / family,
            images=home / "images",
            cache=home / "cache",
            adapter=adapter,
        )
    )
    return directory


def config_of(job: Path) -> JobConfig:
    return settle(JobConfig.of(with_located_model(SwapConfig.load(job / "job.toml"))))


def train(job: Path, **options: Any) -> list[float]:
    program.train(config_of(job), **options)
    return [line["loss"] for line in lines_of(job / "output")]


def test_new_writes_a_file_that_trains(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    said = run_command("new", home / "flux", "-o", file).output
    assert "expected --data IMAGES or VIDEOS" in said and not file.exists()
    said = run_command("new", home / "flux", "--data", home / "images", "-o", file).output
    assert f"Your data, {ROWS} images with captions: {ROWS} steps" in said
    sizes = ("train.steps=1", "train.diffusion.resolution=16", "tiers.host.capacity=32MiB")
    done = run_command("train", file, *(word for size in sizes for word in ("--set", size)))
    assert done.exit_code == 0, done.output


def targets(transformer: Any) -> list[str]:
    """The linear layers of attention and feed-forward modules."""
    return [
        name for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear)
        and any(p in ("attn", "ff", "ff_context", "proj_mlp", "attn1", "attn2", "ffn", "img_mlp",
                      "txt_mlp") for p in name.split("."))
    ]  # fmt: skip


class Plain:
    """A loop as the training scripts of diffusers have it, with everything in memory."""

    def __init__(
        self, directory: Path, adapter: bool, dtype: torch.dtype = torch.float32,
        part: str = "transformer",
    ) -> None:  # fmt: skip
        self.dtype, self.part = dtype, part
        index = json.loads((directory / "model_index.json").read_text())
        without = {name: None for name, kind in index.items() if kind == [None, None]}
        self.pipe = getattr(diffusers, index["_class_name"]).from_pretrained(
            directory, dtype={"default": dtype, "vae": torch.float32}, **without
        )
        self.family = directory.name
        self.transformer = aligned(getattr(self.pipe, part).train())
        if adapter:
            self.transformer.requires_grad_(False)
            torch.manual_seed(5)
            wanted = targets(self.transformer)
            self.transformer.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=wanted))
            diffusers.training_utils.cast_training_params(self.transformer, torch.float32)

    def run(self, images: Path, batch: int = 2) -> list[float]:
        """`batch`: images of a micro-batch. Alone, each has sides of its own."""
        with torch.no_grad():
            is_video = (images / "0.mkv").exists()
            kind = "pt" if is_video else "png"
            rows = [self.encoded(images / f"{row}.{kind}", batch == 1) for row in range(ROWS)]
        trained = [p for p in self.transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)
        losses = []
        for step in range(STEPS):
            total = torch.zeros(())
            for first in range(0, 4, batch):
                numbers = [(4 * step + first + one) % ROWS for one in range(batch)]
                loss = self.loss([(n, rows[n]) for n in numbers], step + 1) / (4 / batch)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        return losses

    def encoded(self, image: Path, keeps_aspect: bool) -> tuple[Any, Any]:
        """The distribution of latents, and what `encode_prompt` returns."""
        pipe, caption = self.pipe, image.with_suffix(".txt").read_text()
        processor = getattr(pipe, "image_processor", None) or pipe.video_processor
        sides = SIDES[8 if self.family in ("qwen", "wan", "wan2") else 4]
        height, width = sides[int(image.stem)] if keeps_aspect else (SIDE, SIDE)
        if image.suffix == ".pt":
            frames = [Image.fromarray(one) for one in torch.load(image)[:FRAMES].numpy()]
            pixels = processor.preprocess_video(frames, height, width, resize_mode="crop")
            pixels = pixels.contiguous()
        else:
            pixels = processor.preprocess(Image.open(image), height, width, resize_mode="crop")
        if (
            image.suffix != ".pt"
            and "latents_mean" in pipe.vae.config
            and pipe.vae.config.latents_mean is not None
        ):
            pixels = pixels[:, :, None]
        length = LENGTHS.get(self.family, LENGTH)
        options: dict[str, Any] = {"max_sequence_length": length}
        if "do_classifier_free_guidance" in pipe.encode_prompt.__code__.co_varnames:
            options["do_classifier_free_guidance"] = False
        if "prompt_2" in pipe.encode_prompt.__code__.co_varnames:
            options["prompt_2"] = None
        if "prompt_3" in pipe.encode_prompt.__code__.co_varnames:
            options["prompt_3"] = None
        return pipe.vae.encode(pixels).latent_dist, pipe.encode_prompt(prompt=[caption], **options)

    def loss(self, rows: list[tuple[int, Any]], step: int) -> Tensor:
        parts = []
        for row, (distribution, _) in rows:
            key = hashlib.sha256(json.dumps([SEED, step, row, False]).encode()).digest()
            source = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            # A file keeps no order of dimensions in memory, which products of the backward round by.
            latents = scaled(distribution.sample(source).contiguous(), self.pipe.vae.config)
            noise = torch.randn(latents.shape, generator=source)
            level = training_utils.compute_density_for_timestep_sampling(
                "logit_normal", 1, 0.0, 1.0, 1.29, generator=source
            )
            parts.append((latents, noise, level))
        latents, noise, levels = (torch.cat(part) for part in zip(*parts, strict=True))
        scheduler = self.pipe.scheduler
        if "wan" in self.family:  # Sampled by another solver of the same flow.
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        chosen = (levels * len(scheduler.timesteps)).long()
        if self.family == "wan2":  # As the pipeline samples: t >= 0.8 * 1000 is the first's.
            [noisy] = [n for n, t in enumerate(scheduler.timesteps) if t < 800][:1]
            chosen = (levels * noisy).long()
            if self.part == "transformer_2":
                chosen = noisy + (levels * (1000 - noisy)).long()
        times = scheduler.timesteps[chosen]
        sigmas = scheduler.sigmas[chosen].view(-1, *[1] * (latents.dim() - 1))
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        predicted = CALLS[type(self.pipe).__name__](
            self, noisy.to(self.dtype), times, [r[1][1] for r in rows]
        )
        weighting = training_utils.compute_loss_weighting_for_sd3("logit_normal", sigmas)
        squares = weighting.float() * (predicted.float() - (noise - latents).float()) ** 2
        return torch.mean(squares.reshape(len(rows), -1), 1).mean()


def scaled(latents: Tensor, config: Any) -> Tensor:
    if latents.dim() == 4:
        return (latents - config.shift_factor) * config.scaling_factor
    mean = torch.tensor(config.latents_mean).view(1, config.z_dim, 1, 1, 1)
    std = 1.0 / torch.tensor(config.latents_std).view(1, config.z_dim, 1, 1, 1)
    return (latents - mean) * std


def call_flux(plain: Plain, noisy: Tensor, times: Tensor, texts: list[Any]) -> Tensor:
    count, channels, height, width = noisy.shape
    kind, text = type(plain.pipe), torch.cat([found[0] for found in texts])
    found = plain.transformer(
        hidden_states=kind._pack_latents(noisy, count, channels, height, width),
        timestep=times / 1000,
        guidance=torch.full([1], 3.5).expand(count),
        pooled_projections=torch.cat([found[1] for found in texts]),
        encoder_hidden_states=text,
        txt_ids=texts[0][2],
        img_ids=kind._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", text.dtype),
        return_dict=False,
    )[0]
    pixels = plain.pipe.vae_scale_factor
    return kind._unpack_latents(found, height * pixels, width * pixels, pixels)


def call_qwen(plain: Plain, noisy: Tensor, times: Tensor, texts: list[Any]) -> Tensor:
    count, channels, _, height, width = noisy.shape
    kind, lengths = type(plain.pipe), [found[0].shape[1] for found in texts]
    text = torch.zeros(count, max(lengths), texts[0][0].shape[-1])
    for row, found in enumerate(texts):
        text[row, : lengths[row]] = found[0][0]
    mask = torch.tensor([[at < length for at in range(max(lengths))] for length in lengths])
    found = plain.transformer(
        hidden_states=kind._pack_latents(noisy, count, channels, height, width),
        timestep=times / 1000,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None if bool(mask.all()) else mask,
        img_shapes=[[(1, height // 2, width // 2)]] * count,
        return_dict=False,
    )[0]
    pixels = plain.pipe.vae_scale_factor
    return kind._unpack_latents(found, height * pixels, width * pixels, pixels)


def call_sd3(plain: Plain, noisy: Tensor, times: Tensor, texts: list[Any]) -> Tensor:
    return plain.transformer(
        hidden_states=noisy,
        timestep=times,
        encoder_hidden_states=torch.cat([found[0] for found in texts]),
        pooled_projections=torch.cat([found[2] for found in texts]),
        return_dict=False,
    )[0]


def call_wan(plain: Plain, noisy: Tensor, times: Tensor, texts: list[Any]) -> Tensor:
    text = torch.cat([found[0] for found in texts])
    return plain.transformer(noisy, times, text, return_dict=False)[0]


CALLS = {
    "FluxPipeline": call_flux, "QwenImagePipeline": call_qwen,
    "StableDiffusion3Pipeline": call_sd3, "WanPipeline": call_wan,
}  # fmt: skip


def same(plain: Plain, output: Path) -> None:
    """Compares what a run has exported with the plain model."""
    if not (output / "adapter_config.json").exists():
        theirs = type(plain.transformer).from_pretrained(output).state_dict()
        for name, tensor in plain.transformer.state_dict().items():
            assert torch.equal(tensor, theirs[name]), name
        return
    want = peft.get_peft_model_state_dict(plain.transformer)
    into = {} if plain.part == "transformer" else {f"load_into_{plain.part}": True}
    plain.pipe.load_lora_weights(output, adapter_name="trained", **into)
    found = peft.get_peft_model_state_dict(plain.transformer, adapter_name="trained")
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor.to(found[name].dtype), found[name]), name


@pytest.mark.parametrize(("family", "adapter", "place"), sampled(
    [("flux", ADAPTER, "device"), ("flux", "", "nvme"), ("qwen", ADAPTER, "nvme"),
     ("qwen", "", "host"), ("sd3", ADAPTER, "nvme"),
     ("wan", ADAPTER, "host"), ("wan", "", "nvme")],
    # Each family, with an adapter and without one, on each tier.
    lambda case: (case[0] in ("flux", "sd3") and case[1]) or (case[0] in ("qwen", "wan") and not case[1]),
))  # fmt: skip
def test_a_run_has_the_bits_of_the_plain_loop_wherever_state_lies(
    family: str, adapter: str, place: str, home: Path, tmp_path: Path
) -> None:
    plain = Plain(home / family, bool(adapter))
    want = plain.run(home / "images")
    assert train(job_of(tmp_path, home, family, place, adapter)) == want
    same(plain, tmp_path / "output")
    if not adapter:
        done = run_command("export", tmp_path / "output", tmp_path / "again")
        assert done.exit_code == 0, done.output
        same(plain, tmp_path / "again")


@pytest.mark.parametrize(("part", "adapter", "place"), [
    ("transformer", "", "nvme"), ("transformer_2", ADAPTER, "host"),
])  # fmt: skip
def test_each_transformer_of_wan_2_2_learns_its_noise_levels(
    part: str, adapter: str, place: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    plain = Plain(home / "wan2", bool(adapter), part=part)
    want = plain.run(home / "images")
    file = job_of(tmp_path, home, "wan2", place, adapter) / "job.toml"
    file.write_text(file.read_text().replace(str(home / "wan2"), str(home / "wan2" / part)))
    assert train(tmp_path) == want
    same(plain, tmp_path / "output")
    assert ("load_into_transformer_2=True" in capsys.readouterr().out) == bool(adapter)


@pytest.mark.parametrize(
    ("adapter", "within"), sampled([("", 0.02), (ADAPTER, 0.2)], lambda case: case[0] == ADAPTER)
)
def test_a_plan_has_the_bytes_of_a_run(
    adapter: str, within: float, home: Path, tmp_path: Path
) -> None:
    """Written to the byte, in most steps: a write may end in the next one. Of units this small, what
    memory keeps is a part of the reads. No update is early: how many depends on the moment."""
    file = job_of(tmp_path, home, "wan", "nvme", adapter) / "job.toml"
    text = file.read_text().replace("[checkpoint]\nevery = 1", '[schedule]\nupdates = "deferred"')
    file.write_text(text.replace("32MiB", "600KiB").replace("steps = 4", "steps = 12"))
    train(tmp_path)
    moved = json.loads(run_command("plan", file, "--json").stdout)["moved_nbytes"]
    lines = lines_of(tmp_path / "output")[1:]
    wrote, found = (
        median(line[f"nvme_{what}_nbytes"] for line in lines) for what in ("write", "read")
    )
    assert moved["nvme_write"] == wrote
    read = moved["nvme_read"] + moved.get("checkpoint_read", 0)
    assert read == pytest.approx(found, rel=within)


@pytest.mark.parametrize(
    "family", sampled(["flux", "qwen", "sd3", "wan"], lambda family: family in ("flux", "wan"))
)
def test_images_of_several_sizes_have_the_bits_of_the_plain_loop(
    family: str, home: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "images", tmp_path / "images")
    for row in ("0", "1"):  # A tall one and a wide one.
        path = tmp_path / "images" / f"{row}.png"
        Image.open(path).resize((20, 60) if row == "0" else (90, 20)).save(path)
    plain = Plain(home / family, True)
    want = plain.run(tmp_path / "images", batch=1)
    job = job_of(tmp_path, home, family, "nvme", ADAPTER)
    change = {"data.paths": (DataSource(path=tmp_path / "images"),), "train.batch_size": 1,
              "train.gradient_accumulation_steps": 4, "train.diffusion.aspect": "keep"}  # fmt: skip
    program.train(changed(config_of(job), change))
    assert [line["loss"] for line in lines_of(job / "output")] == want
    same(plain, tmp_path / "output")


@pytest.mark.parametrize(("adapter", "place"), [(ADAPTER, "nvme"), ("", "host")])
def test_videos_have_the_bits_of_the_plain_loop(
    adapter: str, place: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    plain = Plain(home / "wan", bool(adapter))
    want = plain.run(home / "videos")
    job = job_of(tmp_path, home, "wan", place, adapter)
    change = {"data.paths": (DataSource(path=home / "videos"),), "train.diffusion.frames": FRAMES}
    config = changed(config_of(job), change)
    program.train(config)
    assert [line["loss"] for line in lines_of(job / "output")] == want
    same(plain, tmp_path / "output")
    patches = 3 * 4 * ROWS  # Three latents for five frames here, each of 2 x 2 patches.
    said = f"{patches} tokens in {ROWS} videos of 5 frames of 16 x 16 pixels"
    assert said in capsys.readouterr().out


def test_a_narrow_transformer_keeps_wide_what_its_class_does(home: Path, tmp_path: Path) -> None:
    plain = Plain(home / "wan", True, torch.bfloat16)
    assert plain.transformer.scale_shift_table.dtype is torch.float32
    want = plain.run(home / "images")
    job = job_of(tmp_path, home, "wan", "nvme", f'[precision]\ncompute = "bfloat16"\n{ADAPTER}')
    assert train(job) == want
    same(plain, job / "output")


def test_a_killed_run_goes_on_with_the_same_bits(
    home: Path, tmp_path: Path, processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain(home / "flux", adapter=True)
    want = plain.run(home / "images")
    job = job_of(tmp_path, home, "flux", "nvme", ADAPTER)
    run_and_kill(job, 2, processes)
    job_of(tmp_path, home, "flux", "host", ADAPTER)
    assert train(job, resume=True) == want
    same(plain, job / "output")
    with monkeypatch.context() as patch:
        patch.delattr(denoising.Denoising, "pipeline")  # What the run has encoded is read.
        found = replay(job / "output", 3, console=Console(quiet=True))
    assert found["differences"] == [] and found["compared"]["loss"]
    config = changed(config_of(job), {"adapter": AdapterConfig(resume=job / "output")})
    again = peft.get_peft_model_state_dict(build_model(plan_model(config.model), config))
    for name, tensor in load_file(job / "output" / "adapter_model.safetensors").items():
        assert torch.equal(again[name], tensor), name


def test_a_run_with_another_scheduler_is_another_run(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "flux", tmp_path / "flux")
    shutil.copytree(home / "images", tmp_path / "images")
    job = job_of(tmp_path, tmp_path, "flux", "host", ADAPTER)
    text = (
        (job / "job.toml").read_text().replace("steps = 4", 'schedule = "constant"\nsteps = 1', 1)
    )
    (job / "job.toml").write_text(text)
    train(job)
    (job / "job.toml").write_text(text.replace("steps = 1", "steps = 2", 1))
    file = tmp_path / "flux/scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 2.0}))
    with pytest.raises(ConfigError, match="the SHA-256 of the numbers of VAE and scheduler is"):
        train(job, resume=True)


def test_held_out_images_have_the_same_noise_at_every_step(home: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, home, "flux", "host", ADAPTER)
    text = (job / "job.toml").read_text().replace("held_out = 0.0", "held_out = 0.25")
    text = text.replace("lr = 1e-2", "lr = 0.0").replace("steps = 4", "steps = 2\neval_every = 1")
    (job / "job.toml").write_text(text)
    assert len({*train(job)}) == 2
    lines = (job / "output" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["held_out_loss"] for line in lines)
    assert first == second


def test_latents_and_embeddings_are_computed_once_and_a_broken_file_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, config = tmp_path / "cache", config_of(job_of(tmp_path, home, "flux"))
    config = changed(config, {"train.diffusion.cache": cache})
    rows = latents.load_images(config.data.paths, config)
    assert len(list(cache.iterdir())) == ROWS + 3  # There are three captions.
    before = {file: file.read_bytes() for file in cache.iterdir()}
    broken = cache / rows[1]["image"]
    broken.write_bytes(before[broken][:-1] + bytes([before[broken][-1] ^ 1]))
    with pytest.raises(CorruptionError, match="not those that were written"):
        latents.collate(cache, list(rows))
    assert latents.load_images(config.data.paths, config)[:] == rows[:]
    assert str(broken) in caplog.text and "computed again" in caplog.text
    assert {file: file.read_bytes() for file in cache.iterdir()} == before
    monkeypatch.delattr(denoising.Denoising, "pipeline")
    assert latents.load_images(config.data.paths, config)[:] == rows[:]


def test_neither_vae_nor_text_encoders_are_in_memory_beside_the_transformer(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    kinds = (diffusers.AutoencoderKL, PreTrainedModel)
    before = [one for one in gc.get_objects() if isinstance(one, kinds)]  # Of other tests.
    known = set(map(id, before))

    def offload(*_: Any, **__: Any) -> None:
        gc.collect()
        made = (one for one in gc.get_objects() if isinstance(one, kinds) and id(one) not in known)
        found.extend(type(one).__name__ for one in made)
        raise ConfigError("seen")

    shutil.rmtree(home / "cache", ignore_errors=True)
    monkeypatch.setattr(infinity, "offload", offload)
    with pytest.raises(ConfigError, match="seen"):
        train(job_of(tmp_path, home, "flux"))
    assert (home / "cache").is_dir() and found == []


@pytest.mark.parametrize("form", ["records", "metadata", "saved"])
def test_records_name_images_with_their_captions(form: str, home: Path, tmp_path: Path) -> None:
    config = config_of(job_of(tmp_path, home, "flux"))
    want = latents.load_images(config.data.paths, config)
    shutil.copytree(home / "images", tmp_path / "images")
    keys = ("file_name", "text") if form == "metadata" else ("image", "caption")
    rows = [
        dict(zip(keys, (f"{n}.png", (home / f"images/{n}.txt").read_text()), strict=True))
        for n in range(ROWS)
    ]
    path = tmp_path / "images" / ("rows.jsonl" if form == "records" else "metadata.jsonl")
    if form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path.parent)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    place = path if form == "records" else path.parent
    assert latents.load_images([DataSource(path=place)], config)[:] == want[:]


@pytest.mark.parametrize(("change", "message"), [
    ({"model.path": "sd3/transformer", "train.diffusion.resolution": 64}, "at most 32 .*; got 64"),
    ({"train.diffusion.resolution": 18}, "expected a multiple of 4, .*; got 18"),
    ({"train.diffusion.aspect": "keep"}, "expected train.batch_size = 1, .*; got 2"),
    ({"train.diffusion.frames": 5}, "frames: a FluxPipeline makes images; expected 1, got 5"),
    ({"model.path": "wan/transformer", "train.diffusion.frames": 4}, "2, the frames of a latent; got 4"),
    ({"model.path": "wan/transformer", "train.diffusion.frames": 5}, "images has no videos; expected"),
    ({"data.sequence_length": 513}, "at most 512, .* a FluxPipeline takes; got 513"),
    ({"model.path": "qwen/transformer", "data.sequence_length": 1025}, "at most 1024, .*; got 1025"),
    ({"model.path": "images"}, "a directory with model_index.json; got"),
    ({"model.path": "wan2/copy"}, "expected transformer or transformer_2 of .*; got copy"),
    ({"model.path": "flux/vae"}, "is a AutoencoderKL; expected the FluxTransformer2DModel of a F"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    change: dict[str, Any], message: str, home: Path, tmp_path: Path, caplog: Any
) -> None:
    change = {k: home / v if k == "model.path" else v for k, v in change.items()}
    shutil.copytree(home / "wan2/transformer", home / "wan2/copy", dirs_exist_ok=True)
    config = changed(config_of(job_of(tmp_path, home, "flux")), change)
    with pytest.raises(ConfigError, match=message):
        program.train(config)
    assert ("computing" in caplog.text) == ("multiple" in message)  # Latents may lie there already.


def test_keys_of_text_are_refused(home: Path, tmp_path: Path) -> None:
    file = job_of(tmp_path, home, "flux") / "job.toml"
    file.write_text(file.read_text().replace("shuffle = false", "packing = true"))
    with pytest.raises(ConfigError, match='expected no data.packing with method = "diffusion"'):
        SwapConfig.load(file)


def test_an_image_of_more_than_8_bits_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("a red cat")
    Image.new("I;16", (20, 18), 999).save(tmp_path / "0.png")
    config = config_of(job_of(tmp_path, home, "flux"))
    with pytest.raises(ConfigError, match=r"0\.png: expected .* 8 bits a channel; got .* I;16"):
        latents.load_images([DataSource(path=tmp_path)], config)


def test_facts_of_a_part_follow_from_every_byte_of_its_weights(home: Path, tmp_path: Path) -> None:
    path = shutil.copytree(home / "flux", tmp_path / "flux")
    config = changed(config_of(job_of(tmp_path, home, "flux")), {
        "model.path": path / "transformer",
    })  # fmt: skip
    found, table = [], torch.zeros(4096, 16)  # Far more than a page.
    for _ in range(2):
        save_file({"shared.weight": table}, path / "text_encoder_2" / "model.safetensors")
        found.append(denoising.Denoising(config).facts(["text_encoder_2"]))
        table[-1] += 1
    assert found[0] != found[1]


def test_sd3_without_t5_learns_zeros_in_its_place(home: Path, tmp_path: Path) -> None:
    path = shutil.copytree(home / "sd3", tmp_path / "sd3")
    index = json.loads((path / "model_index.json").read_text())
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(path / name)
        index[name] = [None, None]
    (path / "model_index.json").write_text(json.dumps(index))
    want = Plain(path, adapter=True).run(home / "images")
    job = job_of(tmp_path, tmp_path, "sd3", "host", ADAPTER)
    shutil.copytree(home / "images", tmp_path / "images")
    assert train(job) == want


def test_an_image_without_a_caption_is_named(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "images", tmp_path / "images")
    (tmp_path / "images" / "3.txt").unlink()
    config = config_of(job_of(tmp_path, home, "flux"))
    with pytest.raises(ConfigError, match=r"3\.png has no caption; expected it in .*3\.txt"):
        latents.load_images([DataSource(path=tmp_path / "images")], config)


def test_a_caption_that_the_pipeline_pads_is_refused() -> None:
    family, text = denoising.FAMILIES["QwenImagePipeline"], torch.ones(1, 4, 8)

    def embeddings(mask: Tensor | None) -> dict[str, Tensor]:
        encoder = SimpleNamespace(encode_prompt=lambda *_, **__: (text, mask))
        return family.embeddings(encoder, "a cat", 4)

    for full in (None, torch.ones(1, 4, dtype=torch.int64)):
        assert embeddings(full)["encoder_hidden_states"].equal(text[0])
    with pytest.raises(UnsupportedError, match="pads the caption 'a cat' to 4 tokens, of which 3"):
        embeddings(torch.tensor([[1, 1, 1, 0]]))


def test_a_pipeline_that_is_not_known_is_refused_with_those_that_are(
    home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(home / "flux", other)
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "SanaPipeline"}))
    with pytest.raises(ConfigError, match="is a SanaPipeline; .* trains FluxPipeline, "):
        program.train(changed(config_of(job_of(tmp_path, home, "flux")), {
            "model.path": other / "transformer",
        }))  # fmt: skip
    file = job_of(tmp_path, tmp_path, "other") / "job.toml"
    done = run_command("plan", file, "--hardware", "rtx4090-desktop")
    assert done.exit_code and "is a SanaPipeline; " in done.output


def test_a_transformer_of_diffusers_is_refused_as_a_language_model(home: Path) -> None:
    with pytest.raises(
        ConfigError, match="FluxTransformer2DModel of diffusers, which `infinity tr"
    ):
        config_of_directory(in_hub_cache(home / "flux"))
