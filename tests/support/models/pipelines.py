"""Pipelines of diffusers with tiny random parts, saved to a directory."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = string.ascii_lowercase + string.digits
WIDTH = 16
FILM = {
    "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True],
    "latents_mean": [0.1, -0.2, 0.3, -0.4], "latents_std": [1.5, 2.0, 2.5, 3.0],
}  # fmt: skip


def clip(projects: bool = False) -> tuple[Any, Any]:
    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{one}</w>" for one in LETTERS)]
    tokenizer = transformers.CLIPTokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=16
    )
    config = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=16, num_attention_heads=2,
        num_hidden_layers=2, max_position_embeddings=16, projection_dim=WIDTH, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    kind = "CLIPTextModelWithProjection" if projects else "CLIPTextModel"
    return getattr(transformers, kind)(config), tokenizer


def t5(kind: str = "T5", width: int = WIDTH) -> tuple[Any, Any]:
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((one, -3.0) for one in "▁" + LETTERS)]
    tokenizer = transformers.T5Tokenizer(vocab=words, extra_ids=0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(words), d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return getattr(transformers, f"{kind}EncoderModel")(config), tokenizer


def vae(channels: int, **options: Any) -> Any:
    return diffusers.AutoencoderKL(
        latent_channels=channels, block_out_channels=(4, 4), layers_per_block=1, norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06,
        mid_block_add_attention=False, **options,
    )  # fmt: skip


def flux(directory: Path) -> Path:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=2, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=[2, 2, 4], guidance_embeds=True,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    parts = (scheduler, vae(2), *clip(), *t5(), transformer)
    return saved(diffusers.FluxPipeline(*parts), directory)


def sd3(directory: Path) -> Path:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=2, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=2 * WIDTH, caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH, out_channels=2, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    texts = (*clip(projects=True), *clip(projects=True), *t5(width=2 * WIDTH))
    parts = (transformer, scheduler, vae(2), *texts)
    return saved(diffusers.StableDiffusion3Pipeline(*parts), directory)


def wan(directory: Path, boundary: float | None = None) -> Path:
    """Wan 2.1, or with a boundary 2.2, which has two transformers."""
    transformers = [
        diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        )
        for _ in range(1 if boundary is None else 2)
    ]  # fmt: skip
    encoder = diffusers.AutoencoderKLWan(
        **FILM, base_dim=4, scale_factor_spatial=4, scale_factor_temporal=2
    )
    text, tokenizer = t5("UMT5")
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    parts = (tokenizer, text, encoder, scheduler, *transformers)
    return saved(diffusers.WanPipeline(*parts, boundary_ratio=boundary), directory)


def wan2(directory: Path) -> Path:
    return wan(directory, 0.8)


def qwen(directory: Path) -> Path:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={one: number for number, one in enumerate([*alphabet, "<|endoftext|>"])}, merges=[]
    )
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 16,
                "num_hidden_layers": 1, "rope_parameters": rope, **attention,
            },
            vision_config={
                "depth": 1, "hidden_size": WIDTH, "intermediate_size": 16, "num_heads": 2,
                "out_hidden_size": WIDTH, "fullatt_block_indexes": [0],
            },
        )
    )  # fmt: skip
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    parts = (scheduler, diffusers.AutoencoderKLQwenImage(**FILM, base_dim=4), text, tokenizer)
    return saved(diffusers.QwenImagePipeline(*parts, transformer), directory)


def saved(pipeline: Any, directory: Path) -> Path:
    pipeline.save_pretrained(directory)
    return directory


MAKERS = {"flux": flux, "sd3": sd3, "wan": wan, "wan2": wan2, "qwen": qwen}


def pipeline(family: str, directory: Path) -> Path:
    torch.manual_seed(0)
    return MAKERS[family](directory)


def images(directory: Path, count: int) -> Path:
    """`count` images of several sizes, with captions of several lengths beside them."""
    from PIL import Image

    directory.mkdir()
    source = random.Random(0)
    for number in range(count):
        size = (20 + number, 18)
        image = Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1]))
        image.save(directory / f"{number}.png")
        (directory / f"{number}.txt").write_text("a red cat sat"[: 5 + 2 * (number % 3)])
    return directory


def videos(directory: Path, count: int) -> Path:
    """`count` videos of 7 frames at 16 a second, with captions of several lengths beside them; the
    frames lie in `NUMBER.pt`: (7, height, width, 3), uint8."""
    import av

    directory.mkdir()
    source = torch.Generator().manual_seed(0)
    for number in range(count):
        frames = torch.randint(256, (7, 18, 20, 3), dtype=torch.uint8, generator=source)
        with av.open(directory / f"{number}.mkv", "w") as file:
            stream = file.add_stream("ffv1", rate=16)
            stream.width, stream.height, stream.pix_fmt = 20, 18, "bgr0"  # Without a loss.
            for frame in frames.numpy():
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            file.mux(stream.encode())
        torch.save(frames, directory / f"{number}.pt")
        (directory / f"{number}.txt").write_text("a red cat sat"[: 5 + 2 * (number % 3)])
    return directory
