"""Several threads use one offloaded model: their passes come one after the other, with the bits of
plain PyTorch."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import infinity
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsWriter
from infinity.engine.registry import ENGINES, engines
from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.autograd import hooks
from infinity.modules.autograd.grads import ParamGrads
from infinity.modules.autograd.threads import Turns, is_backward_elsewhere, is_in_module
from tests.support.offloading import offloaded, swap_config

WIDTH = 96
TIGHT = {"host_nbytes": "600KiB"}
NUM_THREADS, NUM_CALLS = 3, 8


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 200), nn.GELU(), nn.Linear(200, WIDTH)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class InThreads(Blocks):
    """Runs its blocks in threads of its own, as nn.DataParallel runs replicas."""

    def forward(self, x: Tensor) -> Tensor:
        is_graded = torch.is_grad_enabled()

        def run(block: nn.Module) -> Tensor:
            with torch.set_grad_enabled(is_graded):
                return block(x)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return torch.stack(list(pool.map(run, self.blocks))).sum(0)


def batch(number: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + number)


def by_parts(model: nn.Module, x: Tensor) -> Tensor:
    """A loop that calls the parts of the model."""
    return Blocks.forward(model, x)  # type: ignore[arg-type]


def in_threads(call: Callable[[int], Any]) -> dict[int, Any]:
    """Returns call(number) for every number, computed in threads. None of them may hang."""
    found: dict[int, Any] = {}

    def body(thread: int) -> None:
        for number in range(thread, NUM_THREADS * NUM_CALLS, NUM_THREADS):
            found[number] = call(number)

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(found) == NUM_THREADS * NUM_CALLS
    return found


@pytest.mark.parametrize(
    ("kind", "call", "host"),
    [
        (Blocks, nn.Module.__call__, TIGHT),
        (Blocks, nn.Module.__call__, {}),
        (Blocks, by_parts, {}),
        (InThreads, nn.Module.__call__, {}),
    ],
    ids=["tight", "ample", "parts", "threads inside"],
)
def test_threads_evaluate_a_model(
    swap_directory: Path,
    kind: type[nn.Module],
    call: Callable[[nn.Module, Tensor], Tensor],
    host: dict[str, Any],
) -> None:
    @torch.no_grad()
    def output(model: nn.Module, number: int) -> Tensor:
        return call(model, batch(number))

    expected = kind()
    with offloaded(kind(), swap_config(swap_directory, **host)) as model:
        for number, found in in_threads(lambda number: output(model, number)).items():
            assert torch.equal(found, output(expected, number)), number


@pytest.mark.parametrize("kind", [Blocks, InThreads])
def test_a_batch_is_divided_over_threads(swap_directory: Path, kind: type[nn.Module]) -> None:
    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for step in range(3):
            parts = in_threads(lambda n, step=step: model(batch(n) / (1 + step)).square().mean())
            loss = torch.stack([parts[number] for number in sorted(parts)]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    plain = kind()
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), 1e-3, fused=True))
    with offloaded(kind(), swap_config(swap_directory)) as model:
        found = losses(model, infinity.AdamW(model, lr=1e-3))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)  # Gradients come in any order.


@contextmanager
def nothing() -> Iterator[None]:
    yield


class Generators(nn.Module):
    """Runs generators until it is told to end: each is the innermost frame, and then has no caller."""

    def forward(self, has_ended: threading.Event) -> None:
        while not has_ended.is_set():
            with nothing():
                gc.collect(0)


def test_a_thread_that_runs_a_module_is_seen_to_run_one_at_any_moment() -> None:
    """Each look is at one moment of the other thread, whose calls, generators and collections of
    garbage go on between two looks."""
    has_ended, interval_s = threading.Event(), sys.getswitchinterval()
    thread = threading.Thread(target=Generators(), args=(has_ended,), daemon=True)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        while not is_in_module(thread.ident):
            pass
        assert all(is_in_module(thread.ident) for _ in range(200_000))
    finally:
        sys.setswitchinterval(interval_s)
        has_ended.set()
        thread.join()
    assert not is_in_module(thread.ident)


class Calls(nn.Module):
    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def test_a_turn_that_was_interrupted_is_not_that_of_a_later_call() -> None:
    turns = Turns(threading.RLock())

    def interrupted() -> None:
        turns.take()
        raise KeyboardInterrupt

    for _ in range(20):  # The frame of a call often has the address of one that has ended.
        with pytest.raises(KeyboardInterrupt):
            Calls()(interrupted)
        assert not Calls()(lambda: turns.is_taken)


def test_backwards_of_threads_come_one_after_the_other(swap_directory: Path) -> None:
    """No gradient is lost that two of them add to one parameter."""
    log, are_ready = [], threading.Barrier(2)

    def pause(gradient: Tensor) -> None:
        log.append(threading.get_ident())
        time.sleep(0.05)

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(pause)

    def backward(loss: Tensor) -> None:
        are_ready.wait(60)
        loss.backward()

    def losses(model: nn.Module) -> list[Tensor]:
        return [model(batch(number)).square().mean() for number in range(2)]

    plain = Blocks()
    for loss in losses(plain):
        loss.backward()
    with offloaded(Blocks(), swap_config(swap_directory)) as model, ThreadPoolExecutor(2) as pool:
        for number in (0, 5):
            model.blocks[number][1].register_forward_hook(watch)
        list(pool.map(backward, losses(model)))
        assert log[0] == log[1] != log[2] == log[3]
        for name, parameter in plain.named_parameters():
            assert torch.equal(infinity.engine_of(model).read_gradient(name), parameter.grad)


def test_a_forward_ends_while_another_thread_looks_for_failed_ones(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(Blocks(), swap_config(swap_directory)) as model:
        engine = infinity.engine_of(model)
        running = engine._model_passes._hooks[0]._running
        running[1] = []
        monkeypatch.setattr(hooks, "is_in_module", lambda thread: bool(running.pop(thread)))
        engine.reset()
        assert not running


def test_an_export_is_of_one_step(
    swap_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other threads wait for it."""
    write = SafetensorsWriter.write
    with offloaded(Blocks(), swap_config(swap_directory)) as model, ThreadPoolExecutor(1) as pool:
        optimizer = infinity.AdamW(model, lr=1e-3)

        def train() -> None:
            model(batch(0)).sum().backward()
            optimizer.step()

        def write_beside(*arguments: Any) -> None:
            write(*arguments)
            if not steps:
                steps.append(pool.submit(train))
                wait(steps, 0.5)

        steps: list[Future[None]] = []
        monkeypatch.setattr(SafetensorsWriter, "write", write_beside)
        (file,) = infinity.checkpoint.export_safetensors(model, tmp_path)
        steps[0].result(60)
    plain, found = Blocks().state_dict(), load_file(file)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_a_gradient_is_read_that_another_thread_drops(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Blocks()
    plain(batch(0)).sum().backward()
    with offloaded(Blocks(), swap_config(swap_directory)) as model, ThreadPoolExecutor(1) as pool:
        optimizer = infinity.AdamW(model)
        model(batch(0)).sum().backward()
        weight, read = model.blocks[0][0].weight, ParamGrads.read

        def read_beside(*arguments: Any) -> Tensor | None:
            wait([pool.submit(optimizer.zero_grad)], 0.2)
            return read(*arguments)

        gradient = weight.grad
        monkeypatch.setattr(ParamGrads, "read", read_beside)
        assert torch.equal(gradient.clone(), plain.blocks[0][0].weight.grad)


def test_engines_are_found_while_another_thread_offloads_models(swap_directory: Path) -> None:
    since = []

    def trace(*arguments: Any) -> Any:  # At any line of the look, as another thread does.
        since.append(nn.Identity())
        ENGINES[since[-1]] = weakref.ref(engine)
        return trace

    with offloaded(Blocks(), swap_config(swap_directory)) as model:
        engine, before = infinity.engine_of(model), sys.gettrace()
        sys.settrace(trace)
        try:
            assert engine in engines()
        finally:
            sys.settrace(before)
    assert since


@contextmanager
def gathered_elsewhere(model: nn.Module, seconds: float) -> Iterator[threading.Event]:
    """Another thread is inside `infinity.gather`, and leaves it after a time. Yields what it sets."""
    has_begun, is_over = threading.Event(), threading.Event()

    def look() -> None:
        with infinity.gather(model):
            has_begun.set()
            time.sleep(seconds)
            is_over.set()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        assert has_begun.wait(60)
        yield is_over
        looking.result(60)


def test_a_backward_waits_for_a_thread_that_looks_at_gradients(swap_directory: Path) -> None:
    plain = Blocks()
    plain(batch(0)).sum().backward()
    plain(batch(0)).sum().backward()
    with offloaded(Blocks(), swap_config(swap_directory)) as model:
        model(batch(0)).sum().backward()
        loss = model(batch(0)).sum()
        with gathered_elsewhere(model, 0.3) as is_over:
            loss.backward()
            assert is_over.is_set()
        for name, parameter in plain.named_parameters():
            assert torch.equal(infinity.engine_of(model).read_gradient(name), parameter.grad)


def test_a_step_waits_for_a_thread_that_reads_weights(swap_directory: Path) -> None:
    with offloaded(Blocks(), swap_config(swap_directory)) as model:
        optimizer = infinity.AdamW(model)
        model(batch(0)).sum().backward()
        with gathered_elsewhere(model, 0.2) as is_over:
            optimizer.step()
            assert is_over.is_set()


def test_a_thread_that_a_micro_batch_starts_calls_no_block(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule suspends the thread of the micro-batch alone; gradients would be missing."""
    monkeypatch.setattr(sys.modules[__name__], "NUM_THREADS", 1)
    model = InThreads()
    with (
        offloaded(model, swap_config(swap_directory)),
        pytest.raises(UnsupportedError, match="own"),
    ):
        infinity.forward_backward(model, lambda x: model(x).square().mean(), [batch(0)])


def test_backwards_that_have_failed_keep_no_other_thread_waiting(swap_directory: Path) -> None:
    meeting = threading.Barrier(2, timeout=60)

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    def meet(gradient: Tensor) -> None:
        meeting.wait()

    with offloaded(Blocks(), swap_config(swap_directory)) as model, ThreadPoolExecutor(2) as pool:

        def body(number: int) -> None:
            hidden = model.blocks[0](batch(number).requires_grad_())
            output = model.blocks[1](hidden)
            meeting.wait()
            handle = hidden.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward(retain_graph=True)
            handle.remove()
            meeting.wait()
            again = output * 1
            again.register_hook(meet)  # Both run a backward before either begins the blocks'.
            again.sum().backward()

        for found in [pool.submit(body, number) for number in (0, 1)]:
            found.result(60)


def test_an_export_inside_a_sweep_is_refused(swap_directory: Path) -> None:
    """The sweep would wait for it, and it for the sweep."""

    def loss(x: Tensor) -> Tensor:
        infinity.checkpoint.export_safetensors(model, swap_directory.with_name("export"))
        return model(x).sum()

    with (
        offloaded(Blocks(), swap_config(swap_directory)) as model,
        pytest.raises(InfinityError, match="after that call"),
    ):
        infinity.forward_backward(model, loss, [batch(0), batch(1)])


def test_a_backward_waits_for_the_sweep_of_another_thread(swap_directory: Path) -> None:
    """The gradients of both are added in one order."""
    plain = Blocks()
    loss = plain(batch(3)).sum()
    for number in (0, 1):
        (plain(batch(number)).square().mean() / 2).backward()
    loss.backward()
    with offloaded(Blocks(), swap_config(swap_directory)) as model, ThreadPoolExecutor(1) as pool:
        loss, backwards = pool.submit(lambda: model(batch(3)).sum()).result(60), []

        def sweep_loss(x: Tensor) -> Tensor:
            if not backwards:
                backwards.append(pool.submit(loss.backward))
            wait(backwards, timeout=0.3)
            return model(x).square().mean() / 2

        infinity.forward_backward(model, sweep_loss, [batch(0), batch(1)])
        backwards[0].result(60)
        for name, parameter in plain.named_parameters():
            assert torch.equal(infinity.engine_of(model).read_gradient(name), parameter.grad), name


def test_a_state_dict_beside_the_pass_of_another_thread_keeps_its_values(
    swap_directory: Path,
) -> None:
    """The block shows compute parameters meanwhile, whose memory leaves with the pass."""
    states: list[dict[str, Tensor]] = []

    def look(*unused: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            states.append(pool.submit(model.state_dict).result(60))
            states.append(pool.submit(model.state_dict, keep_vars=True).result(60))

    expected = Blocks().state_dict()
    with offloaded(Blocks(), swap_config(swap_directory, **TIGHT)) as model:
        handle = model.blocks[2][1].register_forward_hook(look)
        with torch.no_grad():
            model(batch(0))
        handle.remove()
        with torch.no_grad():
            model(batch(0))
        for state in states:
            assert all(torch.equal(value.clone(), expected[k]) for k, value in state.items())


@pytest.mark.parametrize("updates", ["deferred", "at_step"])
@pytest.mark.parametrize("is_layer_major", [False, True])
def test_a_thread_evaluates_while_another_one_trains(
    swap_directory: Path, updates: str, is_layer_major: bool
) -> None:
    """It sees the weights between two steps, and changes no bit of the training."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if is_layer_major and model is not plain:
            infinity.forward_backward(
                model, lambda x: model(x).square().mean() / 2, [batch(number), batch(number + 1)]
            )
        else:
            for x in (batch(number), batch(number + 1)):
                (model(x).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluation(model: nn.Module) -> Tensor:
        return model(batch(1))

    plain = Blocks()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3, fused=True)
    expected = [evaluation(plain)]
    for number in range(8):
        step(plain, optimizer, number)
        expected.append(evaluation(plain))
    seen: list[Tensor] = []
    has_ended = threading.Event()
    config = swap_config(swap_directory, host_nbytes="2MiB", updates=updates)
    with offloaded(Blocks(), config) as model:

        def evaluate() -> None:
            while not has_ended.is_set():
                seen.append(evaluation(model))

        thread = threading.Thread(target=evaluate, daemon=True)
        thread.start()
        offloaded_optimizer = infinity.AdamW(model, lr=1e-3)
        for number in range(8):
            step(model, offloaded_optimizer, number)
        has_ended.set()
        thread.join(60)
        assert not thread.is_alive() and seen
        assert torch.equal(evaluation(model), expected[-1])
    for output in seen:
        assert any(torch.equal(output, one) for one in expected)


def test_an_interrupted_forward_leaves_the_model_to_other_threads(swap_directory: Path) -> None:
    """Neither a forward that no hook ends nor a failed backward makes another thread wait."""

    class Interrupts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            raise ZeroDivisionError

    expected = Blocks()(batch(0))
    with offloaded(Blocks(), swap_config(swap_directory)) as model:
        model.blocks[3].insert(1, Interrupts())
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        del model.blocks[3][1]
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(model, batch(0)).result(60), expected)
        hook = model.blocks[3].register_forward_hook(lambda m, args, y: Fails.apply(y))
        with pytest.raises(ZeroDivisionError):
            model(batch(0)).sum().backward()
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(model, batch(0)).result(60), expected)
        optimizer = infinity.AdamW(model)
        model(batch(0)).sum().backward()
        optimizer.step()


def test_no_garbage_is_collected_while_stacks_of_threads_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython 3.11 holds a lock in that call that its collector takes, too."""
    plain, collected = sys._current_frames, []

    def current_frames() -> Any:
        collected.append(gc.isenabled())
        return plain()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    assert gc.isenabled() and not is_backward_elsewhere([0])
    assert collected and not any(collected) and gc.isenabled()
