"""TRL's GRPO and RLOO, whose windows run layer-major and whose completions may come from a server:
equal to the bit to the plain trainers."""

from __future__ import annotations

import itertools
import threading
import time
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.hf import prepare_trainer
from infinity.integrations.sampler import Server, ServerSampler
from infinity.modules.handles.handle import Handle
from tests.support.sampling_server import SamplingServer, serving

from .test_trl import (
    CountsReads,
    common,
    datasets,
    history,
    in_memory,
    make_model,
    swap,
    texts,
    tokenizer,
    trl,
)


def score(completion_ids: list[list[int]], **unused: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(model: Any, directory: Path, kind: str = "GRPO", **options: Any) -> Any:
    own = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, "max_steps": 4}
    reference = options.pop("reference", None)
    args = getattr(trl, f"{kind}Config")(**common(directory, **(own | options)))
    beta, args.beta = args.beta, 0.0 if reference is not None else args.beta
    made = getattr(trl, f"{kind}Trainer")(
        model=model, args=args, reward_funcs=score, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(24, 0)}),
        eval_dataset=datasets.Dataset.from_dict({"prompt": texts(4, 3)}),
    )  # fmt: skip
    if reference is not None:  # TRL makes it from a directory.
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(reference, temperature=made.temperature)
        made.ref_model, made.beta = reference, beta
    return made


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
    "max_steps": 2,
}
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("lora", "nvme", {"eval_strategy": "steps"}),
    ("full", "nvme", {"num_iterations": 2, "max_steps": 5}),
    ("lora", "host", {"beta": 0.1, "num_iterations": 2}),
    ("full", "host", {"beta": 0.1, "steps_per_generation": 4, "gradient_checkpointing": False}),
    ("lora", "nvme", {"beta": 0.1, "steps_per_generation": 4, "entropy_coef": 0.1}),
    ("lora", "host", {"gradient_accumulation_steps": 1, "steps_per_generation": 3, "beta": 0.1}),
    ("lora", "host", {"use_adaptive_entropy": True, "entropy_target": 9.0}),
    ("lora", "nvme", {"kind": "RLOO", "beta": 0.1}),
    ("full", "host", {"kind": "RLOO", "num_iterations": 2}),
    ("lora", "nvme", CONTINUOUS),
]


@pytest.mark.parametrize(("kind", "place", "options"), RUNS)
def test_a_layer_major_run_is_that_of_the_plain_trainer(
    kind: str, place: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms, rewards, divergences and entropies of every step; every weight at the end."""

    def make(*, plain: bool, frozen: bool = False) -> Any:
        model = make_model(lora=kind == "lora" and not frozen, dropout=0.0)
        config = in_memory() if place == "host" or frozen else swap(tmp_path / "swap")
        return model if plain else infinity.offload(model, config)

    order = True if place == "nvme" else None  # The default looks at a first, plain window.
    has_kl = "beta" in options
    has_reference = kind == "full" and has_kl
    trainers = []
    for plain in (True, False):
        model = make(plain=plain)
        reference = make(plain=plain, frozen=True) if has_reference else None
        trainer = make_trainer(model, tmp_path / str(plain), reference=reference, **options)
        if not plain:
            prepare_trainer(trainer, layer_major=order)
        trainer.train()
        trainers.append(trainer)
    plain_rows, rows = map(history, trainers)
    assert rows == plain_rows
    assert sum("grad_norm" in row for row in rows) == trainer.args.max_steps
    assert any("eval_reward" in row for row in rows) == ("eval_strategy" in options)
    assert any("reward" in row for row in rows) and ("kl" in rows[0]) == has_kl
    assert trainer.is_asked_for
    last = trainer.state.log_history[-1]
    seconds = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    assert 0 < sum(seconds) <= last["train_runtime"]
    engine = infinity.engine_of(model)
    found = dict(trainer.model.named_parameters())
    found |= {name: engine.read_parameter(name) for name in engine.parameter_names()}
    for name, parameter in trainers[0].model.named_parameters():
        assert torch.equal(found[name], parameter), name
    for each in filter(None, (model, reference)):
        infinity.engine_of(each).close()


def test_a_step_reads_the_base_twice_and_once_more_to_score_what_was_generated(
    tmp_path: Path, trusted_tests: None
) -> None:
    """As counted by the engine: policy and reference of all parts pass each block together. A
    completion of one token reads the base once, too. The first window runs in the plain order."""
    sizes: dict[str, Any] = {"lora": True, "dropout": 0.0, "width": 128, "layers": 6}
    base = sum(p.numel() * 4 for n, p in make_model(**sizes).named_parameters() if ".layers." in n)
    config = swap(tmp_path / "swap")
    config["tiers"]["host"]["capacity"] = "1500KiB"
    config |= {"placement": {"parameters": ["nvme"]}, "schedule": {"prefetch": False}}
    model = infinity.offload(make_model(**sizes), config)
    trainer = make_trainer(
        model, tmp_path / "out", beta=0.1, gradient_accumulation_steps=4, num_iterations=2,
        max_completion_length=1, gradient_checkpointing=False,
    )  # fmt: skip
    counts: list[float] = [0.0]
    with infinity.engine_of(model) as engine:
        trainer.add_callback(CountsReads(engine, counts))
        prepare_trainer(trainer).train()
    plain, *_, generating, other = (
        (after - before) / base for before, after in itertools.pairwise(counts)
    )
    assert 1.9 <= other <= 2.1 and 3.8 <= generating <= 4.2, counts
    assert plain >= 4 * (2 + 1.9), counts


# -- A server that samples -------------------------------------------------------------------------

DIFFERENCE = "sampling/sampling_logp_difference/"


def server(**faults: Any) -> SamplingServer:
    """Of the base of `make_model(lora=True)`."""
    return SamplingServer(lambda: make_model(lora=False, dropout=0.0), **faults)


def make_lora(directory: Path | None = None) -> Any:
    model = make_model(lora=True, dropout=0.0)
    return model if directory is None else infinity.offload(model, swap(directory))


class NoRanks:
    """An engine for the plain trainer, whose sampler asks for it."""

    ranks = SimpleNamespace(collective_section=lambda _: nullcontext())


@pytest.mark.parametrize("is_sglang", [False, True])
def test_a_run_that_a_server_samples_for_is_that_of_the_plain_trainer(
    is_sglang: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapter is that of the step before, so sampler and trainer agree; each has a name of its
    own, and is unloaded and removed. No setting is left to the server's own defaults. The adapters
    of others stay, and are not taken for a base."""
    served, rows = server(is_sglang=is_sglang), []
    served.adapters["another's"] = None
    with served.running() as url:
        for plain in (False,) if is_sglang else (True, False):
            model = make_lora(None if plain else tmp_path / "swap")
            trainer = make_trainer(model, tmp_path / "out", beta=0.1, learning_rate=0.1)
            sampler = ServerSampler(url, directory=tmp_path / "served")
            if plain:
                sampler.attach(trainer)
                with monkeypatch.context() as patch:
                    patch.setattr("infinity.engine.registry.engine_of", lambda _: NoRanks)
                    trainer.train()
            else:
                prepare_trainer(trainer, sampler=sampler).train()
            rows.append(history(trainer))
    infinity.engine_of(model).close()
    assert rows[0] == rows[-1]
    assert [name.rpartition("-")[2] for name in served.loaded[-4:]] == ["0", "1", "2", "3"]
    assert len(set(served.loaded)) == len(served.loaded) == 4 * len(rows)
    assert [*served.adapters] == ["another's"] and not list((tmp_path / "served").iterdir())
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert served.requests[-1].items() >= sent.items()
    for row in rows[-1][:4]:
        assert 0 < row[DIFFERENCE + "mean"] <= row[DIFFERENCE + "max"] < 1e-5


def test_each_completion_has_its_seed_where_a_server_draws_by_seed_and_position(
    tmp_path: Path,
) -> None:
    """SGLang with --enable-deterministic-inference: the copies of one request are the same."""
    served = server(is_sglang=True, is_deterministic=True)
    with served.running() as url:
        model = make_lora(tmp_path / "swap")
        trainer = make_trainer(model, tmp_path / "out", max_steps=1)
        prepare_trainer(trainer, sampler=url).train()
        infinity.engine_of(model).close()
    asked = [body for body in served.requests if "seed" in body]
    assert len(asked) > trainer.num_generations
    assert len({body["seed"] for body in asked}) == len(asked)
    assert {body["n"] for body in asked} == {1}


def test_a_server_that_ignores_the_adapter_is_seen_in_the_metrics(tmp_path: Path) -> None:
    with server(ignores_adapters=True).running() as url:
        model = make_lora(tmp_path / "swap")
        trainer = make_trainer(model, tmp_path / "out", max_steps=1)
        prepare_trainer(trainer, sampler=url).train()
        infinity.engine_of(model).close()
    [row] = [row for row in history(trainer) if "loss" in row]
    assert row[DIFFERENCE + "mean"] > 0.01, row


def test_a_sampler_that_cannot_be_is_refused_before_the_model_is_offloaded(tmp_path: Path) -> None:
    model = make_lora()
    trainer = make_trainer(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="does not answer"):
        prepare_trainer(trainer, swap(tmp_path), sampler="http://127.0.0.1:1")
    with (
        server(names_tokens=False).running() as url,
        pytest.raises(ConfigError, match="gives no token ids .* `return_token_ids`"),
    ):
        prepare_trainer(trainer, swap(tmp_path), sampler=url)
    with server().running() as url:
        full = make_trainer(make_model(lora=False), tmp_path / "out")
        with pytest.raises(UnsupportedError, match="only an adapter is handed over"):
            prepare_trainer(full, swap(tmp_path), sampler=url)
        rloo = make_trainer(make_lora(), tmp_path / "out", kind="RLOO")
        with pytest.raises(UnsupportedError, match="expected TRL's GRPOTrainer"):
            prepare_trainer(rloo, swap(tmp_path), sampler=url)
        with pytest.raises(ConfigError, match="tiers.no: unknown key"):
            prepare_trainer(trainer, {"tiers": {"no": 1}}, sampler=url)
        model.peft_config["default"].init_lora_weights = "pissa_niter_2"
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if ".lora_B." in name).fill_(1.0)
        with pytest.raises(UnsupportedError, match=r"PEFT has changed the base.*'pissa_niter_2'"):
            prepare_trainer(trainer, swap(tmp_path), sampler=url)
    assert not trainer.use_vllm and "train" not in vars(trainer)
    assert not any(isinstance(p, Handle) for p in model.parameters())


def test_a_server_that_dies_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """With the bits of a run that nothing has interrupted. Neither run leaves an adapter there."""
    rows: list[Any] = []
    options = {"save_strategy": "steps", "save_steps": 2}
    whole, again = server(), server(dies_after=6)
    for served, resume in ((whole, None), (again, None), (again, True)):
        with served.running() as url:
            model = make_lora(tmp_path / f"swap-{served is whole}")
            trainer = make_trainer(model, tmp_path / str(served is whole), **options)
            prepare_trainer(trainer, sampler=url, layer_major=True)
            if served.dies_after is None:
                trainer.train(resume_from_checkpoint=resume)
                rows.append(history(trainer)[:4])
            else:
                with pytest.raises(ConfigError, match="does not answer.* from its last checkpoint"):
                    trainer.train()
                served.dies_after = None
            infinity.engine_of(model).close()
        assert served.loaded and not served.adapters
    assert rows[0] == rows[1] and len(rows[0]) == 4


TOKENS = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}}


@pytest.mark.parametrize(
    ("method", "content", "said"),
    [
        ("models", {"data": [1]}, "one of data is 1; expected a table"),
        ("models", {"data": "x"}, "data is 'x'; expected a list"),
        ("models", "[" * 4000, "nested too deeply"),
        ("load_adapter", {"data": [1]}, "one of data is 1; expected a table"),
        ("sample", {"choices": ["s"]}, "one of choices is 's'"),
        ("sample", {"choices": [{"logprobs": {"token_logprobs": [-1.0], "tokens": ["token_id:a"]}}]},
         "gives no token ids"),
        ("sample", {"choices": [TOKENS | {"token_ids": [5, -6]}]}, "a token id is -6"),
        ("sample", '{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [NaN]}}]}',
         "a log-probability is nan"),
        ("log_probs", {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1}}]}]},
         "it has no '6'"),
        ("log_probs", {"choices": [{"logprobs": {"token_logprobs": [None, "x"]}}]},
         "a log-probability is 'x'"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_refused(method: str, content: Any, said: str) -> None:
    arguments: dict[str, Any] = {
        "models": (), "load_adapter": ("m", "a", Path("a")), "sample": ("m", [5], 1),
        "log_probs": ("m", [5, 6]),
    }  # fmt: skip
    with serving(lambda *_: (200, content)) as url, pytest.raises(ConfigError, match=said):
        getattr(Server(url), method)(*arguments[method])


def test_an_address_or_a_key_that_cannot_be_is_refused_and_the_key_stays_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for url in ("http://[::1", "http://", "http:///v1", "http://host:port"):
        with pytest.raises(ConfigError, match="is no address of a server"):
            Server(url)
    monkeypatch.setenv("KEY", "secret\n")
    with pytest.raises(ConfigError, match="--key KEY: expected one line") as caught:
        Server("http://127.0.0.1:1", key="KEY")
    assert "secret" not in str(caught.value)
    requests: list[Any] = []
    monkeypatch.setenv("KEY", "secret")
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, **_: requests.append(request))
    with pytest.raises(TypeError):  # There is no answer.
        Server("http://127.0.0.1:1", key="KEY").models()
    [request] = requests
    assert request.get_header("Authorization") == "Bearer secret"
    assert "Authorization" not in request.headers, "a redirect would carry it elsewhere"


def test_a_refusal_names_the_address() -> None:
    with (
        serving(lambda *_: (404, "no such model")) as url,
        pytest.raises(ConfigError, match=f"{url}/v1/completions answers 404 no such model"),
    ):
        Server(url).sample("m", [5], 1)


def sampler_of(url: str, directory: Path) -> ServerSampler:
    sampler = ServerSampler(url)
    sampler.attach(make_trainer(make_lora(), directory))
    return sampler


def test_completions_that_the_trainer_cannot_have_asked_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary has 32 tokens, and a completion 4."""
    with server().running() as url:
        sampler = sampler_of(url, tmp_path)
        for ids, said in (([64], "id 64; .* of a vocabulary of 32"), ([1] * 5, "gives 5 tokens")):
            found = (ids, [-1.0] * len(ids))
            monkeypatch.setattr(Server, "sample", lambda *_, found=found, **__: [found])
            with pytest.raises(ConfigError, match=said):
                sampler.generate([[5]])


def test_an_error_of_a_request_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def sample(_: Server, model: str, prompt: list[int], *rest: Any, **options: Any) -> Any:
        if prompt == [5]:
            begun.wait(60)
            raise ConfigError("it does not answer")
        begun.set()
        ended.wait(60)

    with server().running() as url:
        sampler = sampler_of(url, tmp_path)
        monkeypatch.setattr(Server, "sample", sample)
        began_s = time.monotonic()
        with pytest.raises(ConfigError, match="it does not answer"):
            sampler.generate([[5], [6]])
        assert time.monotonic() - began_s < 30
        ended.set()
