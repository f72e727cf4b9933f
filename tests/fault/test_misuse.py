"""What cannot work is refused by name before anything changes; a fork leaves the parent alone."""

from __future__ import annotations

import contextlib
import copy
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import infinity
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from tests.support.forked import EXIT, run_script

from .harness import swap_config


def test_cuda_without_a_cuda_device_names_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = swap_config(tmp_path)
    config["tiers"]["device"] = {"kind": "cuda"}
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"tiers\.device\.kind: expected a CUDA device"):
        infinity.offload(model, config)
    assert type(model.weight) is nn.Parameter and not list(tmp_path.iterdir())


def test_lazy_modules_are_refused_until_they_have_a_shape(tmp_path):
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(UnsupportedError, match=r"'0\.weight' has no shape yet"):
        infinity.offload(model, swap_config(tmp_path))
    model(torch.ones(1, 3))
    infinity.engine_of(infinity.offload(model, swap_config(tmp_path))).close()


def test_a_gradient_that_was_cleared_raises_an_error_by_name(tmp_path):
    model = infinity.offload(nn.Linear(4, 4), swap_config(tmp_path))
    optimizer = infinity.AdamW(model)
    model(torch.ones(1, 4)).sum().backward()
    gradient = model.weight.grad
    assert gradient.sum() == 16
    optimizer.zero_grad()
    with pytest.raises(InfinityError, match="gradient of 'weight' is not there any more"):
        gradient.sum()
    model(torch.ones(1, 4)).sum().backward()  # Nothing is held: training goes on.
    infinity.engine_of(model).close()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "apply",
    [
        lambda module: parametrizations.weight_norm(module),
        lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
        lambda module: nn.Parameter(module.weight),
    ],
    ids=["weight_norm", "parametrization", "Parameter"],
)
def test_parametrizations_after_offload_are_refused(tmp_path, apply):
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4)), swap_config(tmp_path))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"'0\.weight'.*before infinity\.offload"):
        apply(model[0])
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model[0].weight.detach(), before)
    infinity.engine_of(model).close()


@pytest.mark.parametrize(
    "alias",
    [
        lambda a, b: setattr(a, "grad", b.grad),
        lambda a, b: setattr(a, "grad", b.grad.detach()),
        lambda a, b: setattr(a, "grad", b.grad.view(4, 4)),
        lambda a, b: setattr(a, "grad", b.detach()),
        lambda a, b: setattr(a, "grad", b.data),
        lambda a, b: setattr(a.grad, "data", b.grad),
    ],
    ids=["grad", "detached", "view", "weight", "data", "data of the gradient"],
)
def test_a_gradient_that_would_share_memory_is_refused(tmp_path, alias):
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), swap_config(tmp_path))
    model(torch.ones(1, 4)).sum().backward()
    a, b = model[0].weight, model[1].weight
    before = a.grad.clone()
    with pytest.raises(UnsupportedError, match=r"'0\.weight' would share .*assign a clone"):
        alias(a, b)
    assert torch.equal(a.grad, before)
    a.grad = a.grad.detach()  # Its own.
    assert torch.equal(a.grad, before)
    a.grad = b.grad.clone()
    b.grad.mul_(2)
    assert torch.equal(a.grad * 2, b.grad)
    infinity.engine_of(model).close()


early_bound_swap = torch.utils.swap_tensors


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "swap",
    [
        lambda model, other: torch.utils.swap_tensors(model[0].weight, other[0].weight),
        lambda model, other: torch.utils.swap_tensors(other[0].weight, model[0].weight),
        lambda model, other: torch.utils.swap_tensors(model[0].weight, model[1].weight),
        lambda model, other: early_bound_swap(other[0].weight, model[0].weight),
        lambda model, other: model.load_state_dict(other.state_dict()),
        lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
        lambda model, other: model.to(torch.float32),
        lambda model, other: model.half(),
    ],
    ids=["swap", "other", "both", "early", "load", "assign", "to", "half"],
)
@pytest.mark.parametrize("is_gathered", [False, True])
def test_parameters_cannot_be_swapped(tmp_path, swapping, swap, is_gathered):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    other, kept = build(), build()
    model = infinity.offload(build(), swap_config(tmp_path))
    model(torch.ones(1, 4)).sum().backward()
    kept(torch.ones(1, 4)).sum().backward()
    with infinity.gather(model) if is_gathered else contextlib.nullcontext():
        before = [(id(p), type(p)) for m in (model, other) for p in m.parameters()]
        with pytest.raises((UnsupportedError, RuntimeError), match="change places|swap"):
            swap(model, other)
        assert before == [(id(p), type(p)) for m in (model, other) for p in m.parameters()]
    for p, q in zip(model.parameters(), kept.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)
    assert torch.equal(model(torch.ones(1, 4)), other(torch.ones(1, 4)))
    torch.utils.swap_tensors(other[0].weight, kept[0].weight)
    infinity.engine_of(model).close()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_unless_frozen(tmp_path, kind):
    model = nn.ModuleDict({"tokens": kind(10, 4, sparse=True)})
    with pytest.raises(UnsupportedError, match="gradient of 'tokens' would be sparse"):
        infinity.offload(model, swap_config(tmp_path))
    model.requires_grad_(False)
    infinity.engine_of(infinity.offload(model, swap_config(tmp_path))).close()


def test_a_function_of_weights_that_gives_none_is_refused(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"weights\('weight'\) to return a tensor, got NoneType"):
        infinity.offload(model, swap_config(tmp_path), weights=lambda name: None)
    assert model.weight.is_meta and type(model.weight) is nn.Parameter


def test_offload_refuses_an_object_that_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module to offload, got list"):
        infinity.offload([nn.Linear(4, 4)], swap_config(tmp_path))


@pytest.mark.parametrize("loss", [None, torch.ones(2)])
def test_a_loss_that_is_none_is_named(tmp_path, loss):
    model = infinity.offload(nn.Linear(4, 4), swap_config(tmp_path))
    got = "NoneType" if loss is None else r"shape \(2,\)"
    with pytest.raises(ConfigError, match=f"expected loss_fn.* got {got}"):
        infinity.forward_backward(model, lambda batch: loss, [1, 2])
    model(torch.ones(1, 4)).sum().backward()
    infinity.engine_of(model).close()


def test_close_ends_the_engine_of_a_model(tmp_path):
    model = infinity.offload(nn.Linear(4, 4), swap_config(tmp_path))
    engine = infinity.engine_of(model)
    infinity.close(model)
    assert engine.is_closed
    with pytest.raises(infinity.InfinityError, match="Linear is not offloaded"):
        infinity.close(model)


@pytest.mark.parametrize("place", ["module", "forward"])
def test_close_in_a_thread_that_a_hook_joins_is_refused_instead_of_waiting(place, tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model, refused = infinity.offload(model, swap_config(tmp_path)), []

    def close() -> None:
        with pytest.raises(InfinityError, match="join it after the pass") as caught:
            infinity.close(model)
        refused.append(caught)

    def hook(*unused: object) -> None:
        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(60)

    if place == "module":
        model[1].register_full_backward_hook(hook)
    else:
        model[1].register_forward_hook(hook)
    model(torch.ones(1, 4)).sum().backward()
    assert len(refused) == 1
    infinity.close(model)


@pytest.mark.parametrize("place", ["parameter", "module", "forward", "gather", "node"])
def test_close_where_weights_are_in_use_is_refused_and_training_goes_on(place, tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = infinity.offload(copy.deepcopy(plain), swap_config(tmp_path))
    ones = torch.ones(1, 4)

    def close(*unused: object) -> None:
        infinity.close(model)

    places = {
        "parameter": lambda: model[0].weight.register_hook(close),
        "module": lambda: model[1].register_full_backward_hook(close),
        "forward": lambda: model[1].register_forward_hook(close),
    }
    hook = places[place]() if place in places else None
    refused = pytest.raises(InfinityError, match=r"close\(\) inside a forward, a backward or inf")
    with refused, infinity.gather(model) if place == "gather" else contextlib.nullcontext():
        loss = model(ones).sum()
        if place == "node":  # No weight is in use yet.
            loss.register_hook(close)
        if place == "gather":
            close()
        loss.backward()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    model(ones).sum().backward()
    plain(ones).sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    infinity.close(model)


@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_wrappers_that_would_sum_gradients_again_are_refused(wrapper, tmp_path):
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4)), swap_config(tmp_path))
    for module in (model, model[0]):
        with pytest.raises(UnsupportedError, match=f"{wrapper.__name__} of a model .*as it is"):
            wrapper(module)
    infinity.close(model)
    assert type(nn.DataParallel(nn.Linear(4, 4)).module) is nn.Linear


def test_fully_shard_of_an_offloaded_module_is_refused_and_changes_nothing(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = infinity.offload(copy.deepcopy(plain), swap_config(tmp_path))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (model, model[0]):
            with pytest.raises(UnsupportedError, match="fully_shard of a model .*as it is"):
                fully_shard(module, mesh=mesh)
        assert type(fully_shard(plain, mesh=mesh)[0].weight.device) is torch.device
    finally:
        torch.distributed.destroy_process_group()
    assert type(model[0]) is nn.Linear
    model(torch.ones(1, 4)).sum().backward()
    infinity.close(model)


def test_every_public_name_can_be_imported_from_the_package():
    assert infinity.StorageError is infinity.errors.StorageError
    for name in infinity.__all__:
        assert getattr(infinity, name) is not None, name


def test_every_use_of_a_closed_engine_is_refused(tmp_path):
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4)), swap_config(tmp_path))
    optimizer = infinity.AdamW(model)
    model(torch.ones(1, 4)).sum().backward()
    state = model.state_dict()
    engine = infinity.engine_of(model)
    engine.close()
    engine.close()  # Twice is once.
    for use in (
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: model(torch.ones(1, 4)),
        lambda: model[0].weight.sum(),
        lambda: state["0.weight"].zero_(),
    ):
        with pytest.raises(InfinityError, match="engine .*is closed"):
            use()
    with pytest.raises(InfinityError, match="not offloaded"):
        infinity.forward_backward(model, lambda batch: model(batch).sum(), [torch.ones(1, 4)])


@torch._dynamo.config.patch(compiled_autograd=True)
def compile_backward(model):
    loss = model(torch.ones(1, 4)).sum()
    torch.compile(lambda: loss.backward(), backend="eager")()


@pytest.mark.parametrize(
    ("compile_", "remedy"),
    [
        (lambda m: torch.jit.script(m), r"before infinity\.offload"),
        (lambda m: torch.jit.trace(m[0], torch.ones(1, 4)), r"before infinity\.offload"),
        (lambda m: torch.compile(m, fullgraph=True, backend="eager")(torch.ones(1, 4)),
         "leave out fullgraph=True"),
        (compile_backward, "compiled_autograd.*compile the blocks"),
    ],
    ids=["script", "trace", "fullgraph", "backward"],
)  # fmt: skip
def test_compilers_of_whole_models_are_refused(tmp_path, compile_, remedy):
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4)), swap_config(tmp_path))
    with pytest.raises(Exception, match=remedy):
        compile_(model)
    torch._dynamo.reset()
    model(torch.ones(1, 4)).sum().backward()
    infinity.engine_of(model).close()
    assert torch.jit.script(nn.Linear(4, 4)) is not None


@pytest.mark.parametrize(
    "compile_", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4))]
)
@pytest.mark.parametrize("is_trainable", [True, False])
def test_modules_of_torch_jit_with_parameters_are_refused(tmp_path, compile_, is_trainable):
    block = compile_(nn.Sequential(nn.Linear(4, 4).requires_grad_(is_trainable), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 4), block)
    for refused, name in ((model, "'1'"), (block, "ScriptModule|'Sequential|TopLevelTraced")):
        with pytest.raises(
            UnsupportedError, match=f"({name}).*compiled by torch.jit.*expected the"
        ):
            infinity.offload(refused, swap_config(tmp_path))
    assert type(model[0].weight) is nn.Parameter
    model[1] = compile_(nn.Sequential(nn.Softmax(dim=1), nn.ReLU()))
    expected = model(torch.ones(1, 4))
    model = infinity.offload(model, swap_config(tmp_path))
    assert torch.equal(model(torch.ones(1, 4)), expected)
    infinity.engine_of(model).close()


def test_a_whole_graph_over_a_weight_is_refused_unless_it_is_gathered(tmp_path):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: nn.functional.linear(x, w).sum(), backend="eager", fullgraph=True
    )
    model = infinity.offload(nn.Sequential(nn.Linear(4, 4)), swap_config(tmp_path))
    with pytest.raises(Exception, match=r"leave out fullgraph=True.*infinity\.gather"):
        compiled(torch.ones(1, 4), model[0].weight)
    with infinity.gather(model):
        compiled(torch.ones(1, 4), model[0].weight).backward()
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    infinity.engine_of(model).close()


FORKS = """
    import atexit, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch import nn
    import infinity, infinity.errors

    model = infinity.offload(nn.Linear(4, 4), {config!r})
    expected = model(torch.ones(1, 4))
    pid = os.fork()
    if pid == 0:
        optimizer = infinity.AdamW(model)
        for use in (lambda: model(torch.ones(1, 4)), lambda: model.state_dict()["weight"].clone(), optimizer.step):
            try:
                use()
            except infinity.errors.InfinityError as error:
                assert "use the model in the parent" in str(error), error
            else:
                sys.exit(8)
        infinity.engine_of(model).close()
        del model  # A child may also drop it.
        atexit._run_exitfuncs()  # Finalizers run here, as at the end of an interpreter.
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert any(name.endswith(".swap") for name in os.listdir({path!r})), os.listdir({path!r})
    assert torch.equal(model(torch.ones(1, 4)), expected)
    infinity.engine_of(model).close()
    print("the parent went on")
"""


def test_a_forked_child_leaves_the_parents_files(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    program = textwrap.dedent(FORKS).format(config=swap_config(swap), path=str(swap))
    ran = run_script(program + EXIT)
    assert ran.returncode == 0, ran.stderr
    assert "the parent went on" in ran.stdout
    assert "Traceback" not in ran.stderr, ran.stderr
