"""A resumed run is the uninterrupted one, bit by bit, wherever its state rests."""

from __future__ import annotations

from itertools import product

import numpy
import pytest
import torch
from safetensors import safe_open

import infinity
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.storage.probe import find_uring_refusal
from infinity.testing import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled

from .harness import MAX_NORM, Net, content, durable, has_state, is_linked, run

ELSEWHERE = {
    "same": {},
    "host": {"placement": "host", "host_nbytes": "16MiB"},
    "device": {"placement": "device", "host_nbytes": "16MiB", "updates": "at_step"},
    "mixture": {
        "placement": {"parameters": ["host", "nvme"], "moments": "nvme", "master": "host"},
        "prefetch": False,
        "host_nbytes": "3MiB",
    },
}


KINDS = ["fp32", "bf16", "fp16", "conv", "frozen", "tied", "mixed"]
PLACES = [*ELSEWHERE]


def is_sampled(case: tuple[str, str, str]) -> bool:
    """One place of each kind; each place with at least one kind."""
    form, kind, place = case
    if form == "linked":
        return (kind == "conv") == (place != "same")
    return form == "8bit" or PLACES.index(place) == KINDS.index(kind) % 4


@pytest.mark.parametrize(
    ("form", "kind", "elsewhere"),
    sampled(
        [
            *(("copied", *case) for case in product(KINDS, PLACES)),
            *(("linked", kind, "same") for kind in KINDS),
            *(("linked", *case) for case in product(["bf16", "conv"], PLACES[1:])),
            *(("8bit", *case) for case in [
                ("bf16", "same"), ("bf16", "mixture"), ("fp16", "host"), ("conv", "device"),
                ("tied", "same"), ("conv", "mixture"), ("frozen", "host"),
            ]),
        ],
        is_sampled,
    ),
)  # fmt: skip
def test_resumed_run_is_the_uninterrupted_one(tmp_path, form, kind, elsewhere):
    """Losses, gradient norms, fp32 weights and buffers; dropout and other generators included. While
    the run that was saved goes on, and again after it has ended."""
    checkpoints = tmp_path / "checkpoints"
    both = {"moments": "8bit"} if form == "8bit" else {}
    section = {"checkpoint": durable(checkpoints)} if form == "linked" else {}
    with run(kind, tmp_path / "swap", **section, **both) as whole:
        whole.steps(0, 3)
        if form == "linked":
            whole.model(10).backward()  # Gradients, which are on NVMe as well.
        path = whole.save(checkpoints)
        saved = whole.state()
        expected = whole.steps(3, 6), whole.state()
        assert is_linked(path) == (form == "linked")
        if form == "linked":
            has_state(tmp_path / "a", path, saved, kind, **ELSEWHERE[elsewhere])
    assert not (tmp_path / "swap").exists() or not list((tmp_path / "swap").iterdir())
    with run(kind, tmp_path / "b", seed=6, **ELSEWHERE[elsewhere], **both) as resumed:
        assert resumed.load(checkpoints).step == 3
        assert resumed.steps(3, 6) == expected[0]
        assert_same(expected[1], resumed.state())


@pytest.mark.parametrize("placement", ["nvme", "device", "host"])
def test_memory_of_a_device_of_its_own(tmp_path, placement):
    """Copies that come late and released memory that is poisoned: a wait that is missing shows."""
    with run("bf16", tmp_path / "swap") as whole:
        whole.steps(0, 2)
        whole.model(10).backward()
        whole.save(tmp_path / "plain")
        expected = whole.steps(2, 4), whole.state()
    options = {"placement": placement, "host_nbytes": "16MiB"}
    with run("bf16", tmp_path / "swap", device=SimulatedDevice(1), **options) as there:
        there.load(tmp_path / "plain")
        path = there.save(tmp_path / "again")
        assert (there.steps(2, 4), there.state().keys()) == (expected[0], expected[1].keys())
        assert_same(expected[1], there.state())
    plain = content(tmp_path / "plain" / path.name)
    assert all(
        data == plain[name] for name, data in content(path).items() if "manifest" not in name
    )


def test_saving_changes_nothing(tmp_path):
    with run("bf16", tmp_path / "swap") as one:
        expected = one.steps(0, 5), one.state()
    with run("bf16", tmp_path / "swap") as other:
        losses = []
        for step in range(5):
            losses += other.steps(step, step + 1)
            other.save(tmp_path / "checkpoints")
        assert losses == expected[0]
        assert_same(expected[1], other.state())


def test_a_checkpoint_does_not_depend_on_where_state_rests(tmp_path):
    saved = []
    for name, options in (("a", {}), ("b", ELSEWHERE["mixture"]), ("c", ELSEWHERE["device"])):
        with run("bf16", tmp_path / f"swap-{name}", **options) as each:
            each.steps(0, 2)
            path = each.save(tmp_path / name)
            files = content(path)
            saved.append({name: files[name] for name in files if "manifest" not in name})
    assert saved[0] == saved[1] == saved[2]


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_either_engine_goes_on_with_what_the_other_wrote(tmp_path, engine):
    if (refusal := find_uring_refusal()) is not None:
        pytest.skip(f"one engine here: {refusal}")
    with run("fp32", tmp_path / "swap", engine=engine) as whole:
        whole.steps(0, 2)
        whole.save(tmp_path / "checkpoints")
        expected = whole.steps(2, 4)
    other = "io_uring" if engine == "threads" else "threads"
    with run("fp32", tmp_path / "swap", seed=5, engine=other) as resumed:
        resumed.load(tmp_path / "checkpoints")
        assert resumed.steps(2, 4) == expected


def test_gradients_summed_so_far_are_kept(tmp_path):
    """Saved between two backward passes of one step."""
    with run("bf16", tmp_path / "swap") as whole:
        whole.steps(0, 1)
        whole.model(10).backward()
        whole.save(tmp_path / "checkpoints")
        expected = whole.steps(1, 3), whole.state()
    with run("bf16", tmp_path / "swap", seed=5, placement="host", host_nbytes="8MiB") as resumed:
        resumed.model(11).backward()  # What was there before is gone.
        resumed.load(tmp_path / "checkpoints")
        assert resumed.steps(1, 3) == expected[0]
        assert_same(expected[1], resumed.state())


def test_files_are_plain_safetensors_by_parameter_name(tmp_path):
    with run("bf16", tmp_path / "swap") as each:
        each.steps(0, 2)
        path = each.save(tmp_path / "checkpoints")
        engine = infinity.engine_of(each.model)
        narrow = {name: engine.read_parameter(name) for name in engine.parameter_names()}
    found = {}
    for file in sorted(path.glob("unit-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name, value in narrow.items():
        assert torch.equal(found[name], value), name
        shapes = {found[f"{name}.{s}"].shape for s in ("residual", "exp_avg", "exp_avg_sq")}
        assert shapes == {value.shape}, name
    assert len(found) == 4 * len(narrow)


@pytest.mark.parametrize("kind", ["fp32", "conv"])
def test_optimizer_state_goes_on_in_plain_pytorch(tmp_path, kind):
    """torch.optim.AdamW(fused=True) takes the next steps with the same bits."""
    with run(kind, tmp_path / "swap") as each:
        each.steps(0, 3)
        weights = each.state()
        state = infinity.checkpoint.optimizer_state_dict(each.model, each.optimizer)
        random = torch.get_rng_state()
        each.scheduler.step = lambda: None  # The rate stays.
        losses = [loss for loss, _ in _seeded(each, range(3, 5))]
        expected = each.state()

    model = Net(kind).train()
    model.load_state_dict(weights)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}], fused=True)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["fused"] = True
    torch.set_rng_state(random)
    got = []
    for number in (3, 4):
        _seed(number)
        loss = model(number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        got.append(loss.item())
    assert got == losses
    assert_same(
        expected, {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
    )


def test_gradients_that_a_call_has_clipped_are_not_clipped_again_after_a_load(tmp_path):
    found = []
    for is_resumed in (False, True):
        with run("fp32", tmp_path / "swap") as each:
            each.steps(0, 2)
            each.optimizer.max_grad_norm = 1e-3
            if is_resumed:
                infinity.checkpoint.load(tmp_path / "saved", each.model, each.optimizer)
            else:
                _seed(2)
                each.model(2).backward()
                each.optimizer.clip_grad_norm_(0.5)
                infinity.checkpoint.save(tmp_path / "saved", each.model, each.optimizer)
            each.optimizer.step()
            found.append(each.state())
    assert_same(*found)


def _seed(number):
    import random

    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _seeded(each, numbers):
    for number in numbers:
        _seed(number)
        yield each.step(number)


def test_extra_comes_back_and_code_is_refused(tmp_path):
    extra = {"epoch": 3, "names": ["a", "b"], "table": {"x": torch.arange(3)}, "none": None}
    with run("fp32", tmp_path / "swap") as each:
        each.save(tmp_path / "checkpoints", extra=extra)
        loaded = each.load(tmp_path / "checkpoints")
        assert torch.equal(loaded.extra.pop("table")["x"], torch.arange(3))
        assert loaded.extra == {key: extra[key] for key in ("epoch", "names", "none")}
        with pytest.raises(ConfigError, match="`extra`"):
            each.save(tmp_path / "checkpoints", step=1, extra={"code": lambda: 0})
        with pytest.raises(ConfigError, match="`extra`"):
            each.save(tmp_path / "checkpoints", step=1, extra={"object": each.scheduler})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]


class _Counting(torch.nn.Identity):
    """Keeps a number outside of parameters and buffers."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_the_extra_state_of_modules_comes_back(tmp_path):
    with run("fp32", tmp_path / "swap") as each:
        each.model.counting = _Counting()
        each.model.counting.count = 3
        path = each.save(tmp_path / "checkpoints")
        each.model.counting = _Counting()
        each.load(path)
        assert each.model.counting.count == 3
        each.model.counting = torch.nn.Identity()
        with pytest.raises(ConfigError, match="extra state of other modules .* 'counting'"):
            each.load(path)


def test_keep_leaves_the_newest(tmp_path):
    with run("fp32", tmp_path / "swap") as each:
        for step in range(5):
            each.step(step)
            each.save(tmp_path / "checkpoints", keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def test_an_optimizer_cannot_be_put_at_a_step_that_its_moments_are_not_of(tmp_path):
    with run("fp32", tmp_path / "swap") as each:
        each.steps(0, 2)
        early = each.optimizer.state_dict()
        each.optimizer.load_state_dict(early)
        each.steps(2, 3)
        with pytest.raises(UnsupportedError, match=r"infinity\.checkpoint\.load"):
            each.optimizer.load_state_dict(early)


def test_load_refuses_another_run_before_anything_changes(tmp_path):
    with run("fp32", tmp_path / "swap") as saved:
        saved.steps(0, 2)
        path = saved.save(tmp_path / "checkpoints")
        weights_only = infinity.checkpoint.save(tmp_path / "plain", saved.model, step=2)
    for kind, match in (("bf16", "another model|precision"), ("conv", "another model")):
        with run(kind, tmp_path / "swap") as other:
            before = other.state()
            with pytest.raises(ConfigError, match=match):
                infinity.checkpoint.load(path, other.model)
            assert_same(before, other.state())
    with run("fp32", tmp_path / "swap", seed=1) as other:
        before = other.state()
        one_group = infinity.AdamW(other.model)
        with pytest.raises(ConfigError, match="groups"):
            infinity.checkpoint.load(path, other.model, one_group)
        with pytest.raises(ConfigError, match="without an optimizer"):
            other.load(weights_only)
        with pytest.raises(ConfigError, match="no checkpoint"):
            other.load(tmp_path / "nowhere")
        with infinity.gather(other.model), pytest.raises(InfinityError, match="in use"):
            other.load(path)
        assert_same(before, other.state())


def test_buffers_of_any_form_come_back_and_another_dtype_is_refused(tmp_path):
    with run("fp32", tmp_path / "swap") as each:
        wide, turned = torch.arange(4.0).expand(3, 4), torch.tensor([1 + 2j, 3j]).conj()
        each.model.register_buffer("wide", wide)
        each.model.register_buffer("turned", turned)
        path = each.save(tmp_path / "checkpoints")
        each.model.wide, each.model.turned = torch.zeros(()).expand(3, 4), torch.zeros_like(turned)
        each.load(path)
        assert torch.equal(each.model.wide, wide) and torch.equal(each.model.turned, turned)
        each.model.wide = each.model.wide.double()
        with pytest.raises(ConfigError, match="float32, the model has .*float64"):
            each.load(path)
        each.model.register_buffer("edges", torch.eye(3).to_sparse())
        with pytest.raises(UnsupportedError, match="'edges' has the layout torch.sparse_coo"):
            each.save(tmp_path / "others")
        assert not (tmp_path / "others").exists()


@pytest.mark.parametrize("kind", ["SFC64", "Philox", "PCG64"])
def test_another_generator_of_numpy_comes_back(tmp_path, kind):
    own = vars(numpy.random)["get_bit_generator"]()
    with run("fp32", tmp_path / "swap") as each:
        try:
            numpy.random.set_bit_generator(getattr(numpy.random, kind)(1))
            path = each.save(tmp_path / "checkpoints")
            drawn = numpy.random.normal(size=3), numpy.random.random(3)
            each.load(path)
            again = numpy.random.normal(size=3), numpy.random.random(3)
            assert all(map(numpy.array_equal, drawn, again))
        finally:
            numpy.random.set_bit_generator(own)
        with pytest.raises(ConfigError, match=f"saved with {kind} as the generator of NumPy"):
            each.load(path)


def test_a_later_step_is_never_overwritten(tmp_path):
    with run("fp32", tmp_path / "swap") as each:
        each.steps(0, 2)
        each.save(tmp_path / "checkpoints")
        for step in (1, 2):
            with pytest.raises(ConfigError, match="already exists"):
                each.save(tmp_path / "checkpoints", step=step)
