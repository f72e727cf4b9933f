"""How close is the optimizer's update to the bandwidth of memory?

    python bench/update_kernel.py [--numel 24M] [--threads 1 2] [--rounds 15] [--json FILE]
    python bench/update_kernel.py --only sum              sums of gradients

Measured interleaved, so that a slow spell of the machine hits all alike; medians, and ratios of
medians taken round by round. The ceiling is a bare kernel over the same streams (`stream`: 4 in, 3
out, one addition each) in the same pass. Arrays lie in an arena as in training and are together at
least eight times the last-level cache; what an update finds there was evicted by the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import take_turns, timed

from infinity.ops.dynamic_8bit import State8Bit, num_scales
from infinity.ops.exact import split
from infinity.ops.host_sums import add_, copy_
from infinity.ops.optimizers import apply_rule, instruction_sets, torch_step_, update_
from infinity.ops.rules import AdamSettings, AdamWSettings, LionSettings, SGDSettings
from infinity.ops.span import StateSpan
from infinity.storage.arena import Arena

FP32_NBYTES = 28  # Per parameter: gradient, weight, two moments in; weight and moments out.


@dataclass(frozen=True)
class Case:
    """One thing to time: bytes moved per parameter, and the case that it is a share of."""

    name: str
    nbytes: int
    run: Callable[[], object]
    ceiling: str | None = None


class Arrays:
    """Models' worth of state in one arena: fp32, split, split beside, and moments of eight bits."""

    def __init__(self, numel: int) -> None:
        self._arena = Arena(15 * 4 * numel, huge_pages=True)
        self._memory = torch.frombuffer(
            self._arena.memory(0, self._arena.capacity_nbytes), dtype=torch.uint8
        )
        self._taken_nbytes = 0
        self.weight, self.gradient, self.exp_avg, self.exp_avg_sq = (
            self._take(numel, torch.float32) for _ in range(4)
        )
        self.split_exp_avg, self.split_exp_avg_sq = (
            self._take(numel, torch.float32) for _ in range(2)
        )
        self.narrow_weight, self.narrow_gradient = (
            self._take(numel, torch.bfloat16) for _ in range(2)
        )
        self.residual = self._take(numel, torch.int16)
        self.beside = StateSpan(
            self._take(numel, torch.bfloat16), self.gradient,
            (self._take(numel, torch.float32), self._take(numel, torch.float32)),
            self._take(numel, torch.int16),
        )  # fmt: skip
        self.states_8bit = tuple(
            State8Bit(self._take(numel, torch.uint8), self._take(num_scales(numel), torch.float32))
            for _ in range(2)
        )
        source = torch.Generator().manual_seed(0)
        for array in (self.weight, self.gradient, self.exp_avg, self.split_exp_avg):
            array.normal_(generator=source)
        for array in (self.exp_avg_sq, self.split_exp_avg_sq):
            array.uniform_(generator=source)
        self.narrow_gradient.copy_(self.gradient)
        for state in self.states_8bit:  # Any codes and scales are numbers.
            state.codes.random_(generator=source)
            state.scales.uniform_(0.5, 2.0, generator=source)
        for start in range(0, numel, 1 << 20):
            part = slice(start, start + (1 << 20))
            self.narrow_weight[part], self.residual[part] = split(self.weight[part])

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._taken_nbytes
        self._taken_nbytes += numel * dtype.itemsize
        return self._memory[start : self._taken_nbytes].view(dtype)

    @property
    def fp32(self) -> StateSpan:
        return StateSpan(self.weight, self.gradient, (self.exp_avg, self.exp_avg_sq))

    def split(self, gradient: torch.Tensor) -> StateSpan:
        states = (self.split_exp_avg, self.split_exp_avg_sq)
        return StateSpan(self.narrow_weight, gradient, states, self.residual)

    def split_beside(self, gradient: torch.Tensor) -> StateSpan:
        """New bytes go beside the old."""
        return replace(self.split(gradient), into=self.beside)

    @property
    def fp32_8bit(self) -> StateSpan:
        return StateSpan(self.weight, self.gradient, self.states_8bit)

    def split_8bit(self, gradient: torch.Tensor) -> StateSpan:
        return StateSpan(self.narrow_weight, gradient, self.states_8bit, self.residual)


def changed(span: StateSpan) -> list[torch.Tensor]:
    return [span.weight, span.residual, *span.states]


def make_cases(arrays: Arrays, threads: int) -> list[Case]:
    adam = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 5}
    adamw = AdamWSettings(**adam)
    fp32 = arrays.fp32
    split_fp32 = arrays.split(arrays.gradient)
    split_bf16 = arrays.split(arrays.narrow_gradient)
    beside = arrays.split_beside(arrays.gradient)
    one_state = StateSpan(arrays.weight, arrays.gradient, (arrays.exp_avg,))
    sgd = SGDSettings(
        lr=1e-6, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=False, step=2
    )
    lion = LionSettings(lr=1e-6, beta1=0.9, beta2=0.99, weight_decay=0.01, step=2)

    def stream(span: StateSpan) -> Callable[[], object]:
        return lambda: apply_rule("stream", [span], [0.0], grad_scale=1e-30, threads=threads)

    def native(span: StateSpan, settings: object) -> Callable[[], object]:
        return lambda: update_([span], settings, threads=threads)

    def copied() -> None:
        for old, copy in zip(changed(split_fp32), changed(arrays.beside), strict=True):
            copy_(copy, old)
        update_([split_fp32], adamw, threads=threads)

    def torch_fused() -> None:
        states = [[arrays.exp_avg, arrays.exp_avg_sq]]
        torch_step_([arrays.weight], [arrays.gradient], states, adamw)

    def torch_fused_and_copy() -> None:
        torch_fused()
        arrays.narrow_weight.copy_(arrays.weight)

    def torch_sum() -> None:
        arrays.gradient.add_(arrays.narrow_gradient)

    def native_sum() -> None:
        add_(arrays.gradient, arrays.narrow_gradient)

    return [
        Case("stream fp32", FP32_NBYTES, stream(fp32)),
        Case("adamw fp32", FP32_NBYTES, native(fp32, adamw), "stream fp32"),
        Case("torch fused adamw", FP32_NBYTES, torch_fused, "stream fp32"),
        Case("stream split", 28, stream(split_fp32)),
        Case("adamw split, fp32 gradient", 28, native(split_fp32, adamw), "stream split"),
        Case("stream split beside", 28, stream(beside)),
        Case("adamw split beside, fp32 gradient", 28, native(beside, adamw), "stream split"),
        # What it replaces: old bytes are copied first.
        Case("copies, adamw split, fp32 gradient", 52, copied, "stream split"),
        Case("stream split, bf16 gradient", 26, stream(split_bf16)),
        Case(
            "adamw split, bf16 gradient",
            26,
            native(split_bf16, adamw),
            "stream split, bf16 gradient",
        ),
        # What the split replaces: an fp32 master and a bf16 copy for the forward.
        Case("torch fused adamw, bf16 copy", 34, torch_fused_and_copy, "stream fp32"),
        # 4 bytes of moments per parameter, and a byte of scales in 32.
        Case("adamw fp32, 8-bit moments", 16, native(arrays.fp32_8bit, adamw)),
        Case(
            "adamw split, 8-bit moments",
            16,
            native(arrays.split_8bit(arrays.gradient), adamw),
        ),
        Case("adam fp32", FP32_NBYTES, native(fp32, AdamSettings(**adam)), "stream fp32"),
        Case("momentum sgd fp32", 20, native(one_state, sgd)),
        Case("lion fp32", 20, native(one_state, lion)),
        # A further gradient is added to its sum: 4 and 2 bytes in, 4 out.
        Case("torch sum, bf16 gradient", 10, torch_sum),
        Case("native sum, bf16 gradient", 10, native_sum),
    ]


def measure(cases: Sequence[Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by name. The first round is for page tables and threads."""
    return take_turns({case.name: timed(case.run) for case in cases}, rounds)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def describe(cases: Sequence[Case], times: dict[str, list[float]], numel: int) -> list[dict]:
    rows = []
    for case in cases:
        elapsed_s = times[case.name]
        share = None
        if case.ceiling is not None:
            share = median_ratio(times[case.ceiling], elapsed_s)
        rows.append(
            {
                "name": case.name,
                "median_s": statistics.median(elapsed_s),
                "best_s": min(elapsed_s),
                "parameters_per_s": numel / statistics.median(elapsed_s),
                "bytes_per_s": case.nbytes * numel / statistics.median(elapsed_s),
                "share_of_ceiling": share,
                "speed_over_torch": median_ratio(times["torch fused adamw"], elapsed_s),
                "speed_over_adamw_fp32": median_ratio(times["adamw fp32"], elapsed_s),
            }
        )
    return rows


def print_table(rows: Sequence[dict], threads: int) -> None:
    print(f"\n{threads} thread{'s' if threads > 1 else ''}")
    print(
        f"{'':<36}{'median ms':>10}{'best ms':>9}{'Gparam/s':>10}{'GB/s':>7}{'of ceiling':>12}"
        f"{'x torch':>9}{'x fp32':>8}"
    )
    for row in rows:
        share = row["share_of_ceiling"]
        print(
            f"{row['name']:<36}{row['median_s'] * 1e3:>10.2f}{row['best_s'] * 1e3:>9.2f}"
            f"{row['parameters_per_s'] / 1e9:>10.3f}{row['bytes_per_s'] / 1e9:>7.1f}"
            f"{'' if share is None else format(share, '.2f'):>12}"
            f"{row['speed_over_torch']:>9.2f}{row['speed_over_adamw_fp32']:>8.2f}"
        )


def parse_count(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text if scale == 1 else text[:-1]) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=parse_count, default=24 << 20, help="parameters (24M)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--only", default="", help="the cases with this word in their names")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()

    arrays = Arrays(options.numel)
    report = {
        "question": __doc__.splitlines()[0],
        "machine": platform.processor() or platform.machine(),
        "instruction_sets": instruction_sets(),
        "torch": torch.__version__,
        "numel": options.numel,
        "rounds": options.rounds,
        "load_before": os.getloadavg(),
        "by_threads": {},
    }
    for threads in sorted(set(options.threads)):
        torch.set_num_threads(threads)
        every = make_cases(arrays, threads)
        wanted = [case for case in every if options.only in case.name]
        compared = {"torch fused adamw", "adamw fp32", *(case.ceiling for case in wanted)}
        compared |= {case.ceiling for case in every if case.name in compared}
        cases = [case for case in every if case in wanted or case.name in compared]
        rows = describe(cases, measure(cases, options.rounds), options.numel)
        report["by_threads"][threads] = rows
        print_table(rows, threads)
    report["load_after"] = os.getloadavg()
    print(
        f"\nload average {report['load_before'][0]:.1f} before, {report['load_after'][0]:.1f} after"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
