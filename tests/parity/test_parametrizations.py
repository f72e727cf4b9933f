"""Parametrized weights over a base that `infinity.init_empty_weights` built without memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import (
    EncodecConfig,
    EncodecModel,
    HubertConfig,
    HubertModel,
    VitsConfig,
    VitsModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WavLMConfig,
    WavLMModel,
)

import infinity
from infinity.errors import ConfigError
from infinity.modules.reading import empty_weights
from infinity.modules.reading.empty_weights import is_to_come
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.offloading import offloaded, swap_config


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", Symmetric())


WRAPS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of all": lambda linear: parametrizations.weight_norm(linear, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "a module of one's own": symmetric,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}


class Stack(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module], width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(wrap(nn.Linear(width, width)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.fixture(params=["kept", "left out"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether `init_empty_weights` keeps the values of constructors, as of small parameters."""
    if request.param == "left out":
        monkeypatch.setattr(empty_weights, "_KEPT_NBYTES", 0)
    return str(request.param)


def train_alike(plain: nn.Module, model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
    """Trains both for three steps, and compares parameters and buffers."""
    sides = [
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)),
        (model, infinity.AdamW(model, lr=1e-3)),
    ]
    for step in range(3):
        for side, optimizer in sides:
            torch.manual_seed(step)
            loss(side.train()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", WRAPS)
def test_a_parametrized_weight_trains_as_in_memory(kind: str, size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Stack(WRAPS[kind], 16)
    (tmp_path / "base").mkdir()
    values = {name: value.clone().contiguous() for name, value in plain.state_dict().items()}
    save_file(values, tmp_path / "base" / "model.safetensors")
    torch.manual_seed(1)
    if kind == "orthogonal" and size == "left out":
        refusal = pytest.raises(ConfigError, match="before the `with` block")
        with refusal, infinity.init_empty_weights():
            Stack(WRAPS[kind], 16)
        built = [WRAPS[kind](nn.Linear(16, 16)) for _ in range(2)]
        with infinity.init_empty_weights():
            model = Stack(lambda linear: built.pop(), 16)
    else:
        with infinity.init_empty_weights():
            model = Stack(WRAPS[kind], 16)
    with offloaded(model, swap_config(tmp_path / "swap"), weights=tmp_path / "base"):
        train_alike(plain, model, lambda side: side(torch.randn(4, 16)).square().mean())


@pytest.mark.parametrize("kind", WRAPS)
def test_a_parametrization_after_the_block_trains_as_in_memory_or_is_refused(
    kind: str, size: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Stack(WRAPS[kind], 16)
    (tmp_path / "base").mkdir()
    values = {name: value.clone().contiguous() for name, value in plain.state_dict().items()}
    save_file(values, tmp_path / "base" / "model.safetensors")
    with infinity.init_empty_weights():
        model = Stack(lambda linear: linear, 16)
    if size == "left out" and kind in ("spectral_norm", "orthogonal", "old spectral_norm"):
        with pytest.raises(ConfigError, match="without"):
            WRAPS[kind](model.layers[0])  # type: ignore[arg-type]
        return
    for layer in model.layers:
        WRAPS[kind](layer)  # type: ignore[arg-type]
    with offloaded(model, swap_config(tmp_path / "swap"), weights=tmp_path / "base"):
        train_alike(plain, model, lambda side: side(torch.randn(4, 16)).square().mean())


SPEECH: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 32, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip
VOICE: dict[str, Any] = {
    "vocab_size": 38, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "ffn_dim": 32, "flow_size": 16, "spectrogram_bins": 9, "upsample_initial_channel": 32,
    "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]], "prior_encoder_num_flows": 2,
    "prior_encoder_num_wavenet_layers": 2, "posterior_encoder_num_wavenet_layers": 2,
    "duration_predictor_num_flows": 2, "layerdrop": 0.0, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "duration_predictor_dropout": 0.0,
    "depth_separable_num_layers": 1, "duration_predictor_flow_bins": 4, "hidden_act": "relu",
}  # fmt: skip
SOUND: dict[str, Any] = {
    "num_filters": 8, "upsampling_ratios": [4, 2], "hidden_size": 32, "codebook_size": 16,
    "codebook_dim": 32, "num_lstm_layers": 1,
}  # fmt: skip


def loss_of_speech(model: Any) -> torch.Tensor:
    wave = torch.linspace(-1, 1, 800).view(2, 400)
    loss: torch.Tensor = model(input_values=wave).last_hidden_state.square().mean()
    return loss


def loss_of_voice(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 13).view(2, 6)
    waveform = model(input_ids=ids, attention_mask=torch.ones_like(ids)).waveform
    loss: torch.Tensor = waveform.square().mean()
    return loss


def loss_of_sound(model: Any) -> torch.Tensor:
    wave = torch.linspace(-1, 1, 640).view(1, 1, 640)
    loss: torch.Tensor = model(input_values=wave).audio_values.square().mean()
    return loss


FAMILIES: dict[str, tuple[Any, Any, Callable[[Any], torch.Tensor]]] = {
    "wav2vec2": (Wav2Vec2Model, Wav2Vec2Config(**SPEECH), loss_of_speech),
    "hubert": (HubertModel, HubertConfig(**SPEECH), loss_of_speech),
    "wavlm": (WavLMModel, WavLMConfig(**SPEECH), loss_of_speech),
    "vits": (VitsModel, VitsConfig(**VOICE), loss_of_voice),
    "encodec": (EncodecModel, EncodecConfig(**SOUND), loss_of_sound),
}


@pytest.mark.parametrize(("family", "names"), in_turn(FAMILIES, ["new", "old"]))
def test_speech_models_train_as_those_of_from_pretrained(
    family: str, names: str, size: str, tmp_path: Path
) -> None:
    kind, config, loss = FAMILIES[family]
    base = tmp_path / "base"
    kind(copy.deepcopy(config)).save_pretrained(base)
    if names == "old":  # Those of the directories on the hub.
        file = base / "model.safetensors"
        renamed = {
            name.replace("parametrizations.weight.original0", "weight_g").replace(
                "parametrizations.weight.original1", "weight_v"
            ): value
            for name, value in load_file(file).items()
        }
        assert any(name.endswith("weight_g") for name in renamed)
        save_file(renamed, file, metadata={"format": "pt"})
    plain = kind.from_pretrained(base)
    with infinity.init_empty_weights():
        model = kind(copy.deepcopy(config))
    with offloaded(model, swap_config(tmp_path / "swap", host_nbytes="32MiB"), weights=base):
        train_alike(plain, model, loss)


def test_weights_that_no_initialisation_reaches_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rule of transformers writes to a weight that weight_norm computes, which is dropped."""
    monkeypatch.setattr(empty_weights, "_KEPT_NBYTES", 0)
    with infinity.init_empty_weights():
        model = Wav2Vec2Model(Wav2Vec2Config(**SPEECH))
    with (
        pytest.raises(ConfigError, match="original0.*no initialisation of Wav2Vec2Model"),
        offloaded(model, swap_config(tmp_path)),
    ):
        pass


def test_a_model_that_another_thread_builds_meanwhile_has_memory() -> None:
    begun, ended = threading.Event(), threading.Event()
    built: dict[str, nn.Module] = {}

    def build_beside() -> None:
        begun.wait(60)
        built["beside"] = nn.Linear(256, 256)
        ended.set()

    thread = threading.Thread(target=build_beside)
    thread.start()
    with infinity.init_empty_weights():
        begun.set()
        ended.wait(60)
        built["within"] = nn.Linear(256, 256)
    thread.join()
    assert {type(parameter) for parameter in built["beside"].parameters()} == {nn.Parameter}
    assert not any(parameter.is_meta for parameter in built["beside"].parameters())
    assert built["within"].weight.is_meta  # type: ignore[union-attr]


def test_a_block_within_a_block_leaves_weights_out_until_the_outer_one_ends() -> None:
    with infinity.init_empty_weights():
        with infinity.init_empty_weights():
            large, small = nn.Linear(256, 256), nn.Linear(8, 8)
        wrapped: Any = parametrizations.weight_norm(nn.Linear(256, 256))
        large.reset_parameters()
        small.reset_parameters()
    assert all(map(is_to_come, [*wrapped.parameters(), *large.parameters(), *small.parameters()]))
    assert not any(map(is_to_come, nn.Linear(256, 256).parameters()))


def test_threads_build_with_and_without_memory_at_the_same_time() -> None:
    def build(is_empty: bool) -> list[bool]:
        found = []
        for _ in range(20):
            with infinity.init_empty_weights() if is_empty else nullcontext():
                built = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
            found += list(map(is_to_come, built.parameters()))
        return found

    with ThreadPoolExecutor(4) as threads:
        for is_empty, found in zip(
            [True, False] * 8, threads.map(build, [True, False] * 8), strict=True
        ):
            assert set(found) == {is_empty}
