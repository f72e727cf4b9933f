"""Steps of diffusers' models, plain and offloaded: equal to the bit in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.support.offloading import small_tiers

diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    """One step of noise prediction; the loss."""
    source = torch.Generator().manual_seed(seed)
    predicted: Tensor
    images, noise = (torch.randn(2, 3, 8, 8, generator=source) for _ in range(2))
    times = torch.randint(0, 100, (2,), generator=source)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    noisy = scheduler.add_noise(images, noise, times)
    if isinstance(model, diffusers.FluxTransformer2DModel):
        predicted, noise = velocity(model, source)
    elif isinstance(model, diffusers.DiTTransformer2DModel):
        labels = torch.randint(0, 10, (2,), generator=source)
        predicted = model(noisy, timestep=times, class_labels=labels).sample
    else:
        text = torch.randn(2, 4, 8, generator=source)
        predicted = model(noisy, times, encoder_hidden_states=text).sample
    loss = torch.nn.functional.mse_loss(predicted[:, : noise.shape[1]], noise)
    loss.backward()
    if not isinstance(optimizer, infinity.AdamW):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def flux() -> nn.Module:
    """With an adapter, as the LoRA scripts of diffusers attach it."""
    model: Any = diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
        axes_dims_rope=[2, 2, 4],
    )  # fmt: skip
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    return model


def velocity(model: Any, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """What a step of the LoRA scripts compares: the prediction of noise - x, and that."""
    pack = diffusers.FluxPipeline._pack_latents
    latents, noise = (torch.randn(2, 2, 8, 8, generator=source) for _ in range(2))
    sigmas = torch.rand(2, generator=source).view(-1, 1, 1, 1)
    predicted: Tensor = model(
        hidden_states=pack((1.0 - sigmas) * latents + sigmas * noise, 2, 2, 8, 8),
        timestep=sigmas.flatten(),
        pooled_projections=torch.randn(2, 8, generator=source),
        encoder_hidden_states=torch.randn(2, 4, 8, generator=source),
        txt_ids=torch.zeros(4, 3),
        img_ids=diffusers.FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return predicted, pack(noise - latents, 2, 2, 8, 8)


@pytest.mark.parametrize("make", [unet, dit, flux])
def test_a_denoiser_gives_the_same_run(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = make().train()
    torch.manual_seed(0)
    model = infinity.offload(make().train(), {"tiers": small_tiers(tmp_path / "swap", "8MiB")})
    with infinity.engine_of(model) as engine:
        trained = [p for p in plain.parameters() if p.requires_grad]
        theirs = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        mine = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.5)
        for seed in range(3):
            torch.manual_seed(seed)  # Labels are dropped at random.
            expected = step(plain, theirs, seed)
            torch.manual_seed(seed)
            assert step(model, mine, seed) == expected
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name
