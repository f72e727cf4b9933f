"""What the engine costs where nothing has to move: everything on the host, against plain PyTorch.

    python bench/overhead.py --save bench/results/overhead.json
    python bench/overhead.py --case narrow       one of: narrow, 124M

"narrow": 48 blocks of width 128 with 12 tensors each over 256 tokens, where Python is much of a
step. "124M": GPT-2's blocks at 12 x 768 over 512 tokens. Both sides train the same model with the
same AdamW (torch's is the fused one), in blocks of consecutive steps that take turns; the ratio is
the median over pairs of blocks, by the clock and by CPU time, which a busy machine changes less.
Also printed: what each block of the model costs more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Results, arguments, say, spread, take_turns
from torch import Tensor, nn

import infinity

KINDS = ("parameters", "master", "moments", "gradients")


@dataclass(frozen=True)
class Case:
    """A stack of blocks over `tokens` vectors of `width`; `steps` in a row are one sample."""

    name: str
    blocks: int
    width: int
    tokens: int
    steps: int
    host: str


CASES = (
    Case("narrow", 48, 128, 256, 5, "512MiB"),
    Case("124M", 12, 768, 512, 3, "3GiB"),
)


class Block(nn.Module):
    """A block of a decoder without its attention product: two norms, four linear layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.sigmoid(q * k) * v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.mlp_norm(x))))


class Stack(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        inner = case.width if case.name == "narrow" else 4 * case.width
        self.blocks = nn.ModuleList(Block(case.width, inner) for _ in range(case.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def main() -> None:
    parser = arguments(__doc__, path=False)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    results = Results(words.save, {"threads": words.threads})
    for case in CASES:
        if words.case in (None, case.name):
            row = compare(case, words.rounds)
            results.keep(row)
            for clock in ("wall", "cpu"):
                found = row[clock]
                say(
                    f"{case.name}, {clock}: {found['ratio']:.2f} of plain PyTorch "
                    f"({found['ratio_low']:.2f} - {found['ratio_high']:.2f}), "
                    f"{1e3 * found['plain_s']:.1f} ms a step; "
                    f"{found['us_per_block']:.0f} us a block"
                )


def compare(case: Case, rounds: int) -> dict[str, Any]:
    x = torch.randn(case.tokens, case.width)

    def trained(model: nn.Module, optimizer: Any) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(case.steps):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            passed = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            return passed[0] / case.steps, passed[1] / case.steps

        return run

    config = {
        "tiers": {"device": {"kind": "cpu"}, "host": {"capacity": case.host}},
        "placement": dict.fromkeys(KINDS, "host"),
    }
    torch.manual_seed(0)
    plain = Stack(case)
    torch.manual_seed(0)
    model = infinity.offload(Stack(case), config)
    sides = {
        "plain": trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)),
        "engine": trained(model, infinity.AdamW(model.parameters(), lr=1e-4)),
    }
    samples = take_turns(sides, rounds)
    infinity.engine_of(model).close()
    row: dict[str, Any] = {"name": case.name, "samples": samples}
    for place, clock in enumerate(("wall", "cpu")):
        plain, engine = ([sample[place] for sample in samples[name]] for name in sides)
        plain_s, engine_s = statistics.median(plain), statistics.median(engine)
        row[clock] = {
            "plain_s": plain_s, "engine_s": engine_s,
            **spread([own / other for own, other in zip(engine, plain, strict=True)]),
            "us_per_block": 1e6 * (engine_s - plain_s) / case.blocks,
        }  # fmt: skip
    return row


if __name__ == "__main__":
    main()
