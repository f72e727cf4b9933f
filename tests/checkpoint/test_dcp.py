"""torch.distributed.checkpoint in and out, compared with plain PyTorch on the other side."""

from __future__ import annotations

import errno
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import infinity
from infinity.checkpoint import (
    export_checkpoint_dcp,
    export_dcp,
    import_dcp,
    optimizer_state_dict,
)
from infinity.checkpoint.dcp import export_state
from infinity.checkpoint.reader import CheckpointSource
from infinity.errors import ConfigError, CorruptionError, StorageError, UnsupportedError
from tests.checkpoint.harness import Net, content, durable, run
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.forked import Script
from tests.support.models import ConvNet, Mlp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = ("fp32", "bf16", "fp16", "conv", "frozen", "tied", "mixed")
HOST = dict.fromkeys(("parameters", "master", "moments", "gradients"), "host")


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of these models would fit one slab."""
    monkeypatch.setattr(export_state, "_SLAB_NBYTES", 1 << 14)
    monkeypatch.setattr(export_state, "_FILE_NBYTES", 1 << 15)


def plain_copy(kind: str, source: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What somebody without infinity does with the directory."""
    torch.manual_seed(9)
    model = Net(kind).train()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_plain_pytorch_reads_the_export(kind: str, tmp_path: Path) -> None:
    """Weights, moments, steps, settings and buffers, tied weights under every name."""
    with run(kind, tmp_path / "swap") as mine:
        mine.steps(0, 2)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        expected, whole = optimizer_state_dict(mine.model, mine.optimizer), mine.state()
        engine = infinity.engine_of(mine.model)
        weights = {name: engine.read_parameter(name) for name in engine.parameter_names()}
        buffers = dict(mine.model.named_buffers())
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1, "of more than one file"
    model, optimizer = plain_copy(kind, tmp_path / "out")
    assert_same(weights, {name: p.detach() for name, p in model.named_parameters()})
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    actual = optimizer.state_dict()
    assert actual["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            # Moments of a narrow parameter are as narrow in plain PyTorch.
            value = actual["state"][index][key]
            assert torch.equal(value, entry[key].to(value.dtype)), (index, key)
    for one, other in zip(actual["param_groups"], expected["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert one[key] == other[key], key
    whole_file = one_file(tmp_path / "out")
    narrow = {name for name, weight in weights.items() if weight.dtype is not torch.float32}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert whole_file.get("master", {}).keys() == narrow & trainable
    for name, master in whole_file.get("master", {}).items():
        assert torch.equal(master, whole[name]), name


@pytest.mark.parametrize("kind", sampled(KINDS, KINDS[::2].__contains__))
def test_import_goes_on_bit_by_bit_on_other_tiers(kind: str, tmp_path: Path) -> None:
    """What DCP carries (not the generators, which the loss here draws from) is all there is."""
    with run(kind, tmp_path / "swap") as mine:
        mine.steps(0, 2)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        saved = mine.save(tmp_path / "run", step=2)
        mine.load(saved)
        expected, after = mine.steps(2, 4), mine.state()
    with run(kind, tmp_path / "other", seed=5, placement=HOST, host_nbytes="8MiB") as other:
        other.steps(0, 1)  # Gradients, moments and steps of another state, to be forgotten.
        other.load(saved)  # The generators and the scheduler.
        scrambled = infinity.engine_of(other.model)
        for name in scrambled.parameter_names():
            scrambled.write_parameter(name, torch.zeros(scrambled.spec(name).facts.shape))
        import_dcp(tmp_path / "out", other.model, other.optimizer)
        assert other.steps(2, 4) == expected
        assert_same(after, other.state())


def test_a_checkpoint_of_a_run_gives_the_same_directory(tmp_path: Path) -> None:
    """Streamed from files alone, the same keys and values as from the engine."""
    with run("bf16", tmp_path / "swap") as mine:
        mine.steps(0, 2)
        export_dcp(mine.model, tmp_path / "live", mine.optimizer)
        mine.save(tmp_path / "run", step=2)
    with torch.device("meta"):
        model = Net("bf16")
    for name, given in (("named", model), ("bare", None)):
        export_checkpoint_dcp(tmp_path / "run", tmp_path / name, given)
        assert_same_directories(tmp_path / "live", tmp_path / name)


class _NarrowConv(ConvNet):
    """Convolutions in bf16, in channels_last."""

    def __init__(self) -> None:
        super().__init__(channels_last=True)
        self.to(torch.bfloat16)

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return {"x": super().inputs(seed)["x"].to(torch.bfloat16)}


@pytest.mark.parametrize("streamed", ["parameters", "master", "moments"])
def test_kinds_in_different_orders_give_the_same_directory(streamed: str, tmp_path: Path) -> None:
    """What is linked is in memory order (channels_last), what is streamed is row-major."""
    placement = dict.fromkeys(("parameters", "master", "moments", "gradients"), "nvme")
    checkpoints = tmp_path / "run"
    config = swap(tmp_path) | {
        "placement": placement | {streamed: "host"},
        "checkpoint": durable(checkpoints),
    }
    torch.manual_seed(3)
    model = infinity.offload(_NarrowConv(), config)
    optimizer = infinity.AdamW(model, lr=1e-2)
    for seed in range(2):
        step_of_plain(model, optimizer, seed)
    export_dcp(model, tmp_path / "live", optimizer)
    engine = infinity.engine_of(model)
    masters = {name: engine.read_parameter(name, master=True) for name in engine.parameter_names()}
    path = infinity.checkpoint.save(checkpoints, model, optimizer)
    engine.close()
    assert list(path.glob("*.swap")) and list(path.glob("unit-*.safetensors"))
    export_checkpoint_dcp(path, tmp_path / "stored")
    assert_same_directories(tmp_path / "live", tmp_path / "stored")
    with CheckpointSource(path) as source:
        found = {info.name: source.tensor(info) for info in source.infos if info.kind == "master"}
    assert found and all(torch.equal(value, masters[name]) for name, value in found.items())


def one_file(directory: Path) -> dict[str, Any]:
    """The content of a directory, by the converter of PyTorch."""
    target = directory.with_suffix(".pt")
    dcp_to_torch_save(directory, target)
    content: dict[str, Any] = torch.load(target)
    return content


def assert_same_directories(one: Path, other: Path) -> None:
    """Keys and values are the same."""
    first, second = (_flat(one_file(directory)) for directory in (one, other))
    assert first.keys() == second.keys()
    for key, value in first.items():
        is_same = (
            torch.equal(value, second[key]) if torch.is_tensor(value) else value == second[key]
        )
        assert is_same, key


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for key, value in pairs:
        if isinstance(value, dict) or (isinstance(value, list) and value and prefix != "p"):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def test_an_export_has_moments_of_parameters_with_an_optimizer_alone(tmp_path: Path) -> None:
    """An optimizer of some parameters; a checkpoint of none."""
    model = infinity.offload(Mlp(width=32, layers=2), swap(tmp_path))
    some = infinity.AdamW(model.blocks[0].parameters(), lr=1e-2)
    step_of_plain(model, some, 0)
    export_dcp(model, tmp_path / "out", some)
    export_dcp(model, tmp_path / "weights")
    path = infinity.checkpoint.save(tmp_path / "run", model, step=1)
    export_checkpoint_dcp(path, tmp_path / "stored")
    infinity.engine_of(model).close()
    keys = {name: one_file(tmp_path / name) for name in ("out", "weights", "stored")}
    assert all(name.startswith("blocks.0.") for name in keys["out"]["optimizer"]["state"])
    assert len(keys["out"]["optimizer"]["state"]) == len(list(model.blocks[0].parameters()))
    assert keys["weights"].keys() == keys["stored"].keys() == {"model"}


def test_a_flipped_bit_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    with run("fp32", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        path = mine.save(tmp_path / "run", step=1)
    file = sorted(path.glob("unit-*.safetensors"))[1]
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(CorruptionError, match="SHA-256") as caught:
        export_checkpoint_dcp(path, tmp_path / "out")
    assert caught.value.path == str(file)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def step_of_plain(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = model(**model.inputs(seed)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Numbered(nn.Sequential):
    """Names of parameters that begin with a number, as groups do."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return {"input": torch.randn(3, 24, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "names", [("model", "optimizer"), ("model", "optim"), ("app.model", "app.optim")]
)
def test_training_continues_from_a_checkpoint_of_plain_pytorch(
    names: tuple[str, str], is_flat: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    plain = Numbered()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    step_of_plain(plain, theirs, 0)
    state: dict[str, Any] = {}
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    moments = get_optimizer_state_dict(plain, theirs, options=options)
    for name, value in zip(names, (get_model_state_dict(plain), moments), strict=True):
        outer, _, inner = name.rpartition(".")
        (state.setdefault(outer, {}) if outer else state)[inner] = value
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    model = infinity.offload(Numbered(), swap(tmp_path))
    mine = infinity.AdamW(model, lr=7.0, weight_decay=7.0)
    import_dcp(tmp_path / "plain", model, mine)
    for seed in range(1, 4):
        assert step_of_plain(model, mine, seed) == step_of_plain(plain, theirs, seed)
    engine = infinity.engine_of(model)
    assert_same(
        {name: p.detach() for name, p in plain.named_parameters()},
        {name: engine.read_parameter(name) for name in engine.parameter_names()},
    )
    engine.close()


def swap(tmp_path: Path) -> dict[str, Any]:
    return {"tiers": {"host": {"capacity": "32MiB"}, "nvme": [{"path": str(tmp_path / "swap")}]}}


SHARDED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from tests.support.models import Mlp
rank, out, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(1)
model = Mlp(width=31, layers=2)
mesh = init_device_mesh("cpu", (2,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
model(**model.inputs(0)).square().mean().backward()
optimizer.step()
state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
dcp.save(state, checkpoint_id=out)
full = {n: p.full_tensor() for n, p in model.named_parameters()}
moments = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters()}
if rank == 0:
    torch.save({"weights": full, "moments": moments}, out + ".pt")
dist.barrier()
dist.destroy_process_group()
"""


def test_shards_of_fsdp_are_put_together(tmp_path: Path) -> None:
    """Written by FSDP2 on two ranks, in rows that do not divide evenly."""
    out = str(tmp_path / "fsdp")
    ranks = [Script(SHARDED, rank, out, tmp_path / "store") for rank in range(2)]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    expected = torch.load(f"{out}.pt")
    model = infinity.offload(Mlp(width=31, layers=2), swap(tmp_path))
    optimizer = infinity.AdamW(model, lr=7.0)
    import_dcp(out, model, optimizer)
    engine = infinity.engine_of(model)
    names = engine.parameter_names()
    assert_same(expected["weights"], {name: engine.read_parameter(name) for name in names})
    state = optimizer_state_dict(model, optimizer)["state"]
    assert_same(expected["moments"], {n: state[i]["exp_avg"] for i, n in enumerate(names)})
    assert optimizer.param_groups[0]["lr"] == 1e-2 and state[0]["step"] == 1
    engine.close()


def test_export_holds_one_slab_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[weakref.ref[torch.Tensor]] = []
    save = torch.save

    def watch(value: Any, file: Any) -> None:
        alive = [reference() for reference in written if reference() is not None]
        assert len(alive) <= 1, [tensor.shape for tensor in alive]
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            assert value.numel() * value.element_size() <= 1 << 14 or value.shape[0] == 1
            written.append(weakref.ref(value))
        save(value, file)

    with run("bf16", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        monkeypatch.setattr(export_state.torch, "save", watch)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
    assert len(written) > 40


# -- What is refused -------------------------------------------------------------------------------


def test_import_in_the_middle_of_a_use_changes_nothing(tmp_path: Path) -> None:
    with run("fp32", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        mine.steps(1, 2)
        before = mine.state()
        first = next(mine.model.parameters())
        with infinity.gather(first), pytest.raises(infinity.errors.InfinityError, match="in use"):
            import_dcp(tmp_path / "out", mine.model, mine.optimizer)
        assert_same(before, mine.state())


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    state = {"model": Mlp(width=32, layers=2).state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    for width, layers, said in ((16, 2, "the model expects"), (32, 3, "lacks")):
        model = infinity.offload(Mlp(width=width, layers=layers), swap(tmp_path))
        engine = infinity.engine_of(model)
        before = {name: engine.read_parameter(name) for name in engine.parameter_names()}
        with pytest.raises(ConfigError, match=said):
            import_dcp(tmp_path / "plain", model)
        assert_same(before, {name: engine.read_parameter(name) for name in before})
        engine.close()
    model = infinity.offload(Mlp(width=32, layers=2), swap(tmp_path))
    with pytest.raises(ConfigError, match="no state of an optimizer"):
        import_dcp(tmp_path / "plain", model, infinity.AdamW(model))
    import_dcp(tmp_path / "plain", model)
    infinity.engine_of(model).close()


def test_other_groups_are_refused(tmp_path: Path) -> None:
    with run("fp32", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        with pytest.raises(ConfigError, match="groups"):
            import_dcp(tmp_path / "out", mine.model, infinity.AdamW(mine.model))


def _in_halves(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest}])


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "another optimizer"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "no 'amsgrad'"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "no 'maximize'"),
        (torch.optim.Adam, "the other rule is infinity.Adam"),
        (_in_halves, "other groups"),
        (lambda p: torch.optim.AdamW([*p][1:]), "other groups"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    make: Any, said: str, is_flat: bool, tmp_path: Path
) -> None:
    plain = Mlp(width=32, layers=2)
    theirs = make(plain.parameters())
    step_of_plain(plain, theirs, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    optim = get_optimizer_state_dict(plain, theirs, options=options)
    state = {"model": plain.state_dict(), "optim": optim}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    model = infinity.offload(Mlp(width=32, layers=2), swap(tmp_path))
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        import_dcp(tmp_path / "plain", model, infinity.AdamW(model))
    infinity.engine_of(model).close()


def test_damage_is_named(tmp_path: Path) -> None:
    with run("fp32", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        out = export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        data = min(out.glob("*.distcp"))
        whole = data.read_bytes()
        data.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptionError, match="cannot be read"):
            import_dcp(out, mine.model, mine.optimizer)
        data.write_bytes(whole)
        metadata = (out / ".metadata").read_bytes()
        (out / ".metadata").write_bytes(metadata[:100])
        with pytest.raises(CorruptionError, match="unpickled"):
            import_dcp(out, mine.model)
        (out / ".metadata").unlink()
        with pytest.raises(ConfigError, match=r"no \.metadata"):
            import_dcp(out, mine.model)


def test_export_leaves_what_is_there_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with run("fp32", tmp_path / "swap") as mine:
        with pytest.raises(ConfigError, match="not empty"):
            export_dcp(mine.model, tmp_path / "out")
        with infinity.gather(mine.model), pytest.raises(infinity.errors.InfinityError, match="use"):
            export_dcp(mine.model, tmp_path / "new")
    assert content(tmp_path / "out") == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_drive_leaves_nothing_behind(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with run("fp32", tmp_path / "swap") as mine:
        mine.steps(0, 1)
        with monkeypatch.context() as patch:
            if where == "fsync":
                patch.setattr(export_state.os, "fsync", full)
            else:
                patch.setattr(Path, "open", lambda path, mode: open("/dev/full", mode))  # noqa: SIM115
            with pytest.raises(StorageError, match="No space left") as caught:
                export_dcp(mine.model, tmp_path / "out", mine.optimizer)
        assert caught.value.errno == errno.ENOSPC
        assert [p.name for p in tmp_path.iterdir()] == ["swap"]
        mine.steps(1, 2)
        export_dcp(mine.model, tmp_path / "out", mine.optimizer)
