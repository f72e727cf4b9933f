"""Tiny models of modules of torch that read parameters in unusual ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models.blocks import ROWS, WIDTH, TinyModel, noise


class ConvNet(TinyModel):
    """Convolutions, batch norm with running statistics, group norm, in channels_last."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8, affine=False),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, 2, 3, 8, 8)}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Recurrent(TinyModel):
    """nn.LSTM and nn.GRU: they keep a private flat list of their parameters, and packed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, ROWS, 5, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 5, 4, 3, 2, 1][: x.shape[0]])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        _, hidden = self.gru(padded)
        return self.head(self.cell(hidden[0])[0])


class Attention(TinyModel):
    """nn.MultiheadAttention and nn.TransformerEncoder, whose inference fast path reads the
    parameters of grandchildren without calling them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=8, vdim=8,
                                           add_bias_kv=True)  # fmt: skip
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, 2, 5, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        crossed, _ = self.cross(x, memory[..., :8], memory[..., 8:])
        return self.decoder(crossed, memory)


class Parametrized(TinyModel):
    """Weights computed from other parameters: weight norm of both kinds, spectral norm, own."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).t()

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.own = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.own, "weight", self.Symmetric())
        self.fixed = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.fixed, "bias", nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.normed(x))
        x = torch.tanh(self.spectral(x))
        with nn.utils.parametrize.cached():
            x = torch.tanh(self.own(x)) + self.own(x)
        return self.fixed(x)


class HookedWeightNorm(TinyModel):
    """The older `nn.utils.weight_norm`: a forward pre-hook of the module reads the parameters."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.conv = nn.utils.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), dim=2)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def inputs(self, seed: int) -> dict[str, Any]:
        return {"x": noise(seed, 2, WIDTH, 5)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).transpose(1, 2))


class Embeddings(TinyModel):
    """Embedding tables with padding, a bag with weights, and a table read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, WIDTH, mode="sum")
        self.classes = nn.Parameter(torch.randn(20, WIDTH))

    def inputs(self, seed: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(seed)
        return {"ids": torch.randint(0, 20, (ROWS, 4), generator=source)}

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.ones(ids.shape)
        x = self.table(ids).mean(1) + self.bag(ids, per_sample_weights=weights)
        return x @ self.classes.t() + self.classes[ids[:, 0]].sum(1, keepdim=True)
