"""Peak memory stays within the host budget and a stated overhead.

Each case trains in a process of its own whose training state is more than six times its host
budget, and reads the kernel's high-water mark of resident memory (VmHWM in /proc/self/status). The
mark is reset (writing 5 to /proc/self/clear_refs) after imports and after a tiny model has run
forward, backward and step, so that code pages, thread stacks and library workspaces are in the
baseline. What is then allowed on top of the baseline is

    the host budget (the arena, resident from the start)
  + the activations, counted by `activations_nbytes`
  + twice the gradients of the largest unit in fp32: autograd makes a unit's gradients in its own
    memory before they are drained, and on a bf16 model converts them
  + FIXED_NBYTES: 32 MiB for the allocator's slack (glibc keeps freed blocks, up to its trim
    threshold), request tables, and Python objects.

The plain training of the same model would need the whole state; `state >= 6 * budget` is asserted.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import infinity
from tests.support import models
from tests.support.exhaustive import sampled
from tests.support.forked import run_script
from tests.support.memory import resident_nbytes
from tests.support.offloading import swap_config

MIB = 1 << 20
FIXED_NBYTES = 32 * MIB

PROGRAM = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path

    def status(key):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def reset_peak():
        Path("/proc/self/clear_refs").write_text("5")

    from tests.support.memory import use_small_pages

    use_small_pages()
    case = json.loads(sys.argv[1])
    import torch, infinity
    from tests.support import models

    torch.set_num_threads(case["threads"])

    def train(model, steps, seed=0):
        optimizer = infinity.AdamW(model, lr=1e-4, max_grad_norm=1.0)
        losses = []
        for step in range(steps):
            source = torch.Generator().manual_seed(step)
            for _ in range(case["accumulation"]):
                ids = torch.randint(0, 256, (case["rows"], case["length"]), generator=source)
                loss = model(ids, ids)
                loss.backward()
                losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def on_meta(layers, config):
        with infinity.init_empty_weights(config):
            return models.TinyDecoder(width=case["width"], layers=layers, heads=8, vocab=256,
            length=64)

    def make(layers, config, **options):
        return infinity.offload(on_meta(layers, config), config, **options)

    def export_shards(directory):
        model = on_meta(case["layers"], config)
        infinity.checkpoint.export_safetensors(
            model, directory, max_shard_nbytes=16 << 20,
            read=lambda name: torch.randn(model.get_parameter(name).shape).mul_(0.02)
                .to(model.get_parameter(name).dtype),
        )
        assert len(list(Path(directory).glob("model-*.safetensors"))) > 2

    # The baseline: everything the process needs whatever the size of the model.
    config = case["config"]
    small = dict(config, tiers=dict(config["tiers"], host={"capacity": case["warm_nbytes"]}))
    warm = make(1, small)
    train(warm, 1)
    infinity.engine_of(warm).close()
    del warm
    if case["weights"]:
        export_shards(case["weights"])
    import gc; gc.collect()
    reset_peak()
    baseline = status("VmRSS")

    model = make(case["layers"], config, weights=case["weights"])
    numel = sum(p.numel() for p in model.parameters())
    after_offload = status("VmHWM")
    losses = train(model, case["steps"])
    engine = infinity.engine_of(model)
    units = {}
    for p, name in ((p, n) for n, p in model.named_parameters()):
        unit = ".".join(name.split(".")[:2])
        units[unit] = units.get(unit, 0) + p.numel()
    print(json.dumps({
        "baseline": baseline,
        "peak": status("VmHWM"),
        "after_offload": after_offload,
        "numel": numel,
        "largest_unit": max(units.values()),
        "losses": losses,
        "placed": engine.placed_nbytes(),
        "nvme_read_nbytes": engine.counters.snapshot().get("nvme_read_nbytes", 0),
    }))
    engine.close()
    """
)


def activations_nbytes(case: dict) -> int:
    """Upper bound of what a forward keeps for its backward, and one block's backward on top.

    A block of TinyDecoder keeps, in units of (rows, length, width) elements: two normed inputs, qkv
    (3) and its chunks seen as views, attention's output and its transposed copy (2), the residual
    stream (2), gate, up, silu and their product (4 x 2), and attention's log-sum-exp (< 1): 18. The
    backward of a block makes each of these once more while it runs. Logits are kept with their
    log-softmax.
    """
    item = 4 if case["config"]["precision"]["compute"] == "float32" else 2
    tokens = case["rows"] * case["length"]
    blocks = (case["layers"] + 1) * 18 * tokens * case["width"] * item
    return blocks + 4 * tokens * 256 * 4


CASES = {
    "fp32-nvme": {"compute": "float32", "placement": "nvme"},
    "fp32-gradients-split": {
        "compute": "float32",
        "placement": "nvme",
        "gradients": ["host", "nvme"],
    },
    "bf16-nvme": {"compute": "bfloat16", "placement": "nvme"},  # From shards of safetensors.
    "fp32-nvme-demand": {"compute": "float32", "placement": "nvme", "prefetch": False},
}


@pytest.mark.parametrize("name", sampled(CASES, {"bf16-nvme", "fp32-gradients-split"}.__contains__))
def test_peak_memory_is_the_budget_and_a_stated_overhead(name: str, tmp_path: Path) -> None:
    options = CASES[name]
    budget_nbytes = 48 * MIB
    placement = {kind: ["nvme"] for kind in ("parameters", "master", "moments", "gradients")}
    if "gradients" in options:
        placement["gradients"] = options["gradients"]
    case = {
        "width": 512, "layers": 8, "rows": 2, "length": 4, "steps": 2, "accumulation": 2,
        "threads": 1, "warm_nbytes": 40 * MIB,
        "weights": str(tmp_path / "shards") if options["compute"] == "bfloat16" else None,
        "config": {
            "tiers": {
                "device": {"kind": "cpu"},
                "host": {"capacity": budget_nbytes},
                "nvme": [{"path": str(tmp_path / "swap")}],
            },
            "placement": placement,
            "schedule": {"prefetch": options.get("prefetch", True)},
            "precision": {"compute": options["compute"]},
        },
    }  # fmt: skip
    done = run_script(PROGRAM, json.dumps(case))
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])

    is_narrow = options["compute"] == "bfloat16"
    state_nbytes = seen["numel"] * (2 + 4 + 8 + 4 if is_narrow else 4 + 8 + 4)
    assert state_nbytes >= 6 * budget_nbytes, f"{state_nbytes / MIB:.0f} MiB of state is too little"
    assert seen["nvme_read_nbytes"] > state_nbytes

    gradients_nbytes = 2 * 4 * seen["largest_unit"]
    allowed_nbytes = budget_nbytes + activations_nbytes(case) + gradients_nbytes + FIXED_NBYTES
    used_nbytes = seen["peak"] - seen["baseline"]
    assert used_nbytes <= allowed_nbytes, (
        f"peak is {used_nbytes / MIB:.1f} MiB above the baseline of {seen['baseline'] / MIB:.0f} MiB; "
        f"allowed {allowed_nbytes / MIB:.1f} MiB = budget {budget_nbytes / MIB:.0f} + activations "
        f"{activations_nbytes(case) / MIB:.1f} + gradients of the largest unit "
        f"{gradients_nbytes / MIB:.1f} + {FIXED_NBYTES / MIB:.0f}"
    )
    # Building and filling the tiers must not hold the model either.
    assert (
        seen["after_offload"] - seen["baseline"] <= budget_nbytes + gradients_nbytes + FIXED_NBYTES
    )


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_closed_engine_gives_its_memory_back_although_model_and_optimizer_live(
    where: str, swap_directory: Path
) -> None:
    capacity_nbytes = 128 * MIB
    placement = {**dict.fromkeys(("parameters", "master", "moments"), where), "gradients": "host"}
    config = swap_config(swap_directory, placement=placement, host_nbytes=capacity_nbytes)
    model = models.Mlp()
    infinity.offload(model, config)
    optimizer = infinity.AdamW(model, lr=1e-3)
    for number in range(2):
        model(**model.inputs(number)).square().sum().backward()
        optimizer.step()
    open_nbytes = resident_nbytes()
    infinity.close(model)
    assert open_nbytes - resident_nbytes() > 0.9 * capacity_nbytes
