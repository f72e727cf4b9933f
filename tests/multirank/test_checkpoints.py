"""Checkpoints over ranks: one transaction, exact where the number of ranks is the same, and the same
state at any other number, stage and placement."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.checkpoint.reader import CheckpointSource
from infinity.checkpoint.run import save as state_save
from infinity.checkpoint.run.directory import step_of
from infinity.checkpoint.run.opened import OpenCheckpoint, StoredReader
from infinity.errors import ConfigError, CorruptionError, InfinityError, StorageError
from infinity.ops.dynamic_8bit import State8Bit, decode
from infinity.storage.checksums import PageReader
from tests.support import forked
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.file_systems import seem_elsewhere

from .models import batch
from .processes import Ranks, run_ranks
from .work import LR, MIXED, NVME, Case, offload_case, read_weights

TIME_LIMIT_S = 120.0


class Run:
    """An offloaded model on one rank, whose loss draws random numbers."""

    def __init__(self, rank: int, case: Case, directory: str, **options: Any) -> None:
        self.rank = rank
        torch.manual_seed(100 + rank)
        self.model = offload_case(case, Path(directory) / "swap", **options)
        self.engine = infinity.engine_of(self.model)
        self.optimizer = infinity.AdamW(self.model, lr=LR, max_grad_norm=1.0)
        self.dtype = getattr(torch, case.compute)

    def step(self, number: int) -> tuple[float, float]:
        x = batch(10 * number + self.rank, self.model.width).to(self.dtype)
        loss = self.model(x).float().square().mean() * (1 + torch.rand(()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), self.optimizer.grad_norm.item()

    def save(self, directory: str, **options: Any) -> Path:
        return infinity.checkpoint.save(directory, self.model, self.optimizer, **options)

    def plain(self) -> dict[str, dict[str, Tensor]]:
        """What a plain optimizer would be given, by name."""
        state = infinity.checkpoint.optimizer_state_dict(self.model, self.optimizer)
        assert self.rank == 0 or not state
        groups = self.optimizer.named_state()["groups"]
        names = [name for group in groups for name in group["params"]]
        return {names[index]: entry for index, entry in state.get("state", {}).items()}

    def load(self, path: str) -> Any:
        return infinity.checkpoint.load(path, self.model, self.optimizer)


def content(path: Path) -> dict[tuple[str, str], Tensor]:
    """Every weight, master and moment in a checkpoint, in full, and each as it is stored. Ranks keep
    no state without an element."""
    with CheckpointSource(path) as source, StoredReader() as reader:
        tensors = OpenCheckpoint(source.path).tensors
        found = {}
        for name, tensor in tensors.items():
            parameter, _, kind = name.rpartition(".")
            key = (name, "weight") if tensor.kind == "parameters" else (parameter, kind)
            if key[1] == "weight" or tensor.info.nbytes:
                found[key] = reader.read_full(tensor)
        masters = [info for info in source.infos if info.kind == "master" and info.nbytes]
        return found | {(info.name, info.kind): source.tensor(info) for info in masters}


def assert_same_content(found: Path, wanted: Path) -> None:
    assert_same(content(wanted), content(found), is_ordered=False)


def assert_plain(found: dict[str, dict[str, Tensor]], saved: Path) -> None:
    """What a plain optimizer would be given, beside a checkpoint."""
    there = content(saved)
    assert {name for name, kind in there if kind == "exp_avg"} == found.keys()
    for name, entry in found.items():
        assert entry["step"] == step_of(saved)
        for kind in ("exp_avg", "exp_avg_sq"):
            value = there[name, kind].flatten()
            if value.dtype is torch.uint8:
                value = decode(State8Bit(value, there[f"{name}.{kind}", "scales"]), kind)
            assert torch.equal(entry[kind].flatten(), value), (name, kind)


def _train_and_save(
    rank: int, case: Case, directory: str, linked: bool
) -> dict[str, dict[str, Tensor]]:
    """Two steps, a save that fails on one rank, a save, and two more steps; and these again after a
    load."""
    section = {"directory": f"{directory}/saved", "keep": 1} if linked else None
    run = Run(rank, case, directory, checkpoint=section)
    run.step(0)
    run.step(1)
    intact = state_save.write_contents
    if rank == 1:
        state_save.write_contents = _no_space  # type: ignore[assignment]
    with pytest.raises(InfinityError) as failure:
        run.save(f"{directory}/saved")
    state_save.write_contents = intact
    assert "of the test" in str(failure.value)
    assert isinstance(failure.value, StorageError) or "failed on rank 1" in str(failure.value)
    assert rank > 0 or os.listdir(f"{directory}/saved") == []
    run.save(f"{directory}/saved", extra={"rank": rank})
    expected = [run.step(2), run.step(3)]
    run.save(f"{directory}/later")
    run.engine.close()

    run = Run(rank, case, directory)
    run.step(7)
    read_weights(run.model)  # Put together from shards that are about to change.
    loaded = run.load(f"{directory}/saved")
    assert (loaded.step, loaded.num_ranks, loaded.extra) == (2, 4, {"rank": rank})
    assert [run.step(2), run.step(3)] == expected
    run.save(f"{directory}/exact")
    plain = run.plain()
    run.engine.close()
    return plain


def _no_space(*unused: Any) -> Any:
    raise StorageError(28, operation="write", path="of the test")


def _save_again(
    rank: int, case: Case, source: str, target: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Loads, exports and saves; weights, and what a plain optimizer would be given."""
    run = Run(rank, case, str(Path(target).parent))
    loaded = run.load(source)
    assert loaded.extra == {"rank": rank if rank < loaded.num_ranks else 0}
    plain = run.plain()
    if case.moments == "8bit":
        with pytest.raises(InfinityError, match=r"expected float32 ones"):
            infinity.checkpoint.export_dcp(run.model, f"{target}-dcp", run.optimizer)
    else:
        infinity.checkpoint.export_dcp(run.model, f"{target}-dcp", run.optimizer)
    run.save(target, linked=False, extra={"rank": rank})
    engine = run.engine
    weights = {name: engine.read_parameter(name, master=True) for name in engine.parameter_names()}
    engine.close()
    return weights, plain


@pytest.mark.parametrize(
    ("case", "linked", "elsewhere"),
    sampled(
        [
            (
                # Room to keep what is outdated.
                Case(3, NVME, model="empty", compute="bfloat16", capacity="160MiB"),
                True,
                [(2, Case(1)), (1, Case()), (3, Case(3, MIXED))],
            ),
            (Case(2, MIXED, simulated=True), True, [(3, Case(3, NVME))]),
            (  # Shards larger than a granule of codes, and smaller ones.
                Case(1, model="wide", moments="8bit", compute="bfloat16", capacity="256MiB"),
                False,
                [(2, Case(3, NVME)), (1, Case(3, NVME)), (3, Case(2, MIXED))],
            ),
        ],
        lambda job: job[0].stage != 2,
    ),
    ids=["stage3-nvme", "stage2-mixed", "stage1-8bit"],
)
def test_state_is_the_same_at_any_number_of_ranks(
    case: Case, linked: bool, elsewhere: list[tuple[int, Case]], tmp_path: Path
) -> None:
    """Saved by four ranks, gone on with by four to the bit; loaded and saved by others in turn."""
    plain, *_ = run_ranks(4, _train_and_save, case, str(tmp_path), linked)
    assert_same_content(tmp_path / "exact" / "step-00000004", tmp_path / "later" / "step-00000004")
    assert_plain(plain, tmp_path / "exact" / "step-00000004")
    source = tmp_path / "saved"
    saved = source / "step-00000002"
    wanted = content(saved)
    exported = []
    for count, other in elsewhere:
        target = tmp_path / f"again-{count}"
        same = {n: getattr(case, n) for n in ("compute", "model", "moments", "capacity")}
        arguments = replace(other, **same), str(source), str(target)
        if count == 1:
            ranks = [_save_again(0, *arguments)]
        else:
            ranks = run_ranks(count, _save_again, *arguments)
        assert_plain(ranks[0][1], saved)
        files = target.with_name(f"{target.name}-dcp").glob("*.distcp")
        exported.append({file.name: file.read_bytes() for file in files})
        for weights, _ in ranks:
            for name, weight in weights.items():
                kind = "master" if (name, "master") in wanted else "weight"
                assert torch.equal(weight, wanted[name, kind]), name
        assert_same_content(target / "step-00000002", saved)
        source = target
    assert all(files == exported[0] for files in exported), "as one rank writes them"


# Deaths.


def _die(rank: int, phase: str, victim: int, directory: str) -> None:
    """A committed step, and a second one in which a rank dies: in training, while it writes, or as
    the first one is about to give all of it its name."""
    run = Run(rank, Case(3, NVME), directory, checkpoint={"durability": "step", "keep": 1})
    run.step(0)
    infinity.checkpoint.commit(run.model, run.optimizer)

    def die(*unused: Any) -> None:
        Path(directory, "death").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        if phase == "training":
            run.model.blocks[1].register_forward_pre_hook(die)
        else:
            name = {"files": "write_contents", "name": "_write_manifest"}[phase]
            setattr(state_save, name, die)
    run.step(1)
    infinity.checkpoint.commit(run.model, run.optimizer)


def _resume(rank: int, directory: str) -> tuple[int, int]:
    commits = f"{directory}/swap/commits"
    section = {"durability": "step", "keep": 1}
    run = Run(rank, Case(3, NVME), directory, checkpoint=section, resume=commits)
    loaded = run.load(commits)
    run.save(f"{directory}/again", linked=False)
    run.step(1)
    infinity.checkpoint.commit(run.model, run.optimizer)
    run.engine.close()
    return loaded.step, loaded.num_ranks


@pytest.mark.parametrize(("phase", "victim"), [("training", 2), ("files", 2), ("name", 0)])
def test_a_killed_rank_leaves_the_last_commit_to_any_number_of_ranks(
    phase: str, victim: int, tmp_path: Path
) -> None:
    others = set(range(4)) - {victim}
    with Ranks(4, _die, phase, victim, str(tmp_path)) as ranks:
        outcomes = ranks.outcomes(others)
        death_s = float((tmp_path / "death").read_text())
        assert time.monotonic() - death_s < TIME_LIMIT_S
    for rank in others:
        message = outcomes[rank][1][0]
        assert message.startswith(f"RankError: rank {victim} "), message
    commits = tmp_path / "swap" / "commits"
    [left] = infinity.checkpoint.inspect(commits, verify=True)
    assert left.is_intact and left.manifest is not None and left.manifest.step == 1
    if phase == "files":
        return  # What is left is that of the other two.
    wanted = content(left.path)
    assert run_ranks(2, _resume, str(tmp_path)) == [(1, 4)] * 2
    found = content(tmp_path / "again" / "step-00000001")
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert sorted(os.listdir(commits)) == ["step-00000002"]
    assert infinity.checkpoint.inspect(commits, verify=True)[0].is_intact


def _commit_and_end(rank: int, directory: str) -> None:
    """Two committed steps; then two more that nobody keeps, and all ranks are killed."""
    section = {"durability": "step", "keep": 1, "directory": f"{directory}/saved"}
    run = Run(rank, Case(2, NVME, compute="bfloat16"), directory, checkpoint=section)
    for number in range(2):
        run.step(number)
        infinity.checkpoint.commit(run.model, run.optimizer)
    Path(directory, f"steps-{rank}").write_text(repr([run.step(2), run.step(3)]))
    while len(list(Path(directory).glob("steps-*"))) < 2:  # The other needs this rank until then.
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def _go_on_in_place(rank: int, directory: str) -> tuple[float, list[tuple[float, float]]]:
    """Bytes of moments and masters that loading wrote, and the steps."""
    commits = f"{directory}/swap/commits"
    section = {"durability": "step", "keep": 1, "directory": f"{directory}/saved"}
    case = Case(2, NVME, compute="bfloat16")
    run = Run(rank, case, directory, checkpoint=section, resume=commits)
    weights_nbytes = sum(unit.weight_nbytes for unit in run.engine.ranks.partition.full_units)
    before = run.engine.counters.snapshot()["nvme_write_nbytes"]
    assert run.load(commits).step == 2
    written = run.engine.counters.snapshot()["nvme_write_nbytes"] - before
    steps = [run.step(2), run.step(3)]
    infinity.checkpoint.commit(run.model, run.optimizer)
    far = Path(directory, "far")
    seem_elsewhere(far)
    saving = infinity.checkpoint.async_save(far, run.model, run.optimizer)
    assert saving.done() and saving.source is None, "nothing is copied behind training"
    assert infinity.checkpoint.inspect(saving.wait(), verify=True)[0].is_intact
    run.engine.close()
    return written - weights_nbytes, steps


def test_all_ranks_killed_go_on_in_their_own_swap_files(tmp_path: Path) -> None:
    """In stage 2 every rank has the full weights, which are streamed; the rest is where it was."""
    with Ranks(2, _commit_and_end, str(tmp_path)) as ranks:
        for process in ranks.processes:
            process.join(forked.TIME_LIMIT_S)
    for rank, (written, steps) in enumerate(run_ranks(2, _go_on_in_place, str(tmp_path))):
        assert written == 0
        assert repr(steps) == (tmp_path / f"steps-{rank}").read_text()


# What is there is checked, and other programs can use it.


def _save(rank: int, directory: str) -> str:
    run = Run(rank, Case(3, NVME), directory, checkpoint={"directory": f"{directory}/saved"})
    run.step(0)
    try:
        run.save(f"{directory}/saved", step=7 + rank)
    except ConfigError as error:
        refusal = str(error)
    run.save(f"{directory}/saved")
    run.engine.close()
    return refusal


def _import(rank: int, directory: str) -> int:
    """Loads a checkpoint, and then the same from another format. Bytes that the first has read."""
    read, nbytes = PageReader.read, 0

    def counted(self: PageReader, path: Path, offset_nbytes: int, length: int, *more: Any) -> Any:
        nonlocal nbytes
        nbytes += length
        return read(self, path, offset_nbytes, length, *more)

    PageReader.read = counted  # type: ignore[method-assign]
    run = Run(rank, Case(3, MIXED), directory)
    run.load(f"{directory}/saved")
    infinity.checkpoint.import_dcp(f"{directory}/dcp", run.model, run.optimizer)
    run.save(f"{directory}/imported")
    run.engine.close()
    return nbytes


def test_checkpoints_of_ranks_are_verified_and_exported(tmp_path: Path) -> None:
    for refusal in run_ranks(2, _save, str(tmp_path)):
        assert "step and options are" in refusal
    saved = tmp_path / "saved" / "step-00000001"
    infinity.checkpoint.export_checkpoint_dcp(saved, tmp_path / "dcp")
    read = run_ranks(3, _import, str(tmp_path))
    assert_same_content(tmp_path / "imported" / "step-00000001", saved)
    [seen] = infinity.checkpoint.inspect(saved)
    there = sum(linked.nbytes for linked in seen.linked)
    assert there <= sum(read) < 1.3 * there, "a rank reads what it keeps"
    assert max(read) < there / 2
    shard = saved / "rank-00001"
    kinds = json.loads((shard / "linked.json").read_text())["pieces"]
    file, at, _ = next(kind for kind in kinds if kind["piece"] == "exp_avg")["runs"][0]
    with (shard / file).open("r+b") as linked:
        byte = os.pread(linked.fileno(), 1, at + 5)[0]
        os.pwrite(linked.fileno(), bytes([byte ^ 16]), at + 5)
    for found in (saved, saved.parent):
        [seen] = infinity.checkpoint.inspect(found, verify=True)
        assert not seen.is_intact
        assert "exp_avg" in seen.faults[0] and f"rank-00001/{file}" in seen.faults[0]
    run = Run(0, Case(1), str(tmp_path))
    with pytest.raises(CorruptionError, match="rank-00001"):
        run.load(str(saved))
    (shard / "linked.crc32c").unlink()
    with pytest.raises(CorruptionError, match=r"rank-00001/linked.crc32c"):
        run.load(str(saved))
    run.engine.close()
