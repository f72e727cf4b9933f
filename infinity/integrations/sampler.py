"""Completions for TRL's GRPO trainer from an OpenAI-compatible server, and its log-probabilities.

`ServerSampler` takes the place of TRL's `VLLMGeneration`, which sends all weights to a server of
TRL's own. This one hands over the adapter as a file. TRL compares the log-probabilities of sampler
and trainer, weighs tokens by their ratio, and logs mean and maximum of the difference.

Sources: vLLM 0.33.0, `vllm/entrypoints/serve/lora` and `openai/completion`; SGLang 0.5.23,
`docs/advanced_features/lora`; TRL 1.16, `trl/generation/vllm_generation.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from infinity import bounded
from infinity.bounded import MalformedError, field, integer, list_of, table_of
from infinity.errors import ConfigError, UnsupportedError, listed, refusing, reporting
from infinity.integrations.server_layouts import LOADERS, over_its_base, plan_layout
from infinity.modules.reading.adapters import has_changed_base

_TIMEOUT_S, _GREETING_S = 600, 30
_TOP = 100  # Tokens that a server without the log-probabilities of prompts gives at each position.
_TOO_LARGE = 1e30  # Of a log-probability.
_AT_ONCE = 64  # Requests to a server, which batches them.
_ID = re.compile(r"token_id:(\d{1,18})")  # A token that vLLM writes as its id.
_ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^\s/:?#\[\]]+)(:\d{1,5})?(/[!-~]*)?")

Method = Literal["echo", "prompt_logprobs", "next token"]
Sampled: TypeAlias = tuple[list[int], list[float]]  # Token ids, and the log-probability of each.


_EXPECTED = "expected an OpenAI-compatible server, such as vLLM or SGLang"
_readable = refusing(
    "the server's answer cannot be read", MalformedError, remedy=f"; {_EXPECTED}, at this address"
)


class Server:
    """An OpenAI-compatible server. `method` is how it gives log-probabilities of prompts, known
    after the first one: "echo" of completions, vLLM's "prompt_logprobs", or as the "next token" of
    every prefix, of those tokens only that are among the likeliest."""

    def __init__(self, url: str, *, key: str | None = None, then: str = "") -> None:
        """key: the name of the environment variable that holds the bearer token. then: what comes
        after the start of a server that does not answer, for messages."""
        if not _ADDRESS.fullmatch(url):
            raise ConfigError(f"{url!r} is no address of a server; expected http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.method: Method | None = None
        self._then = then
        self._token: str | None = None
        if key is not None:
            if key not in os.environ:
                raise ConfigError(f"--key {key}: there is no environment variable of this name")
            self._token = os.environ[key]
            if not (self._token.isascii() and self._token.isprintable()):
                raise ConfigError(f"--key {key}: expected one line of printable ASCII in it")

    @_readable
    def models(self, *, is_base: bool = False) -> list[str]:
        """Returns the names that the server lists; of `is_base`, those that are no adapters: vLLM
        and SGLang name the base of an adapter as its parent."""
        models = self._listed()
        return [str(m["id"]) for m in models if "id" in m and not (is_base and m.get("parent"))]

    def only_model(self, remedy: str, *, is_base: bool = False) -> str:
        """Returns the name of the one model, or of the one base, of a server. Raises ConfigError
        with `remedy` where there is another number of them."""
        names = self.models(is_base=is_base)
        if len(names) != 1:
            raise ConfigError(f"{self.url} has {listed(names) or 'no model'}; {remedy}")
        return names[0]

    @_readable
    def log_probs(self, model: str, prompt: Sequence[int]) -> list[float | None]:
        """Returns the log-probabilities of all tokens but the first. Raises ConfigError if the
        server cannot be reached, or gives none."""
        calls, refusals = (self._echo, self._prompt_log_probs, self._next_tokens), []
        for method, ask in zip(get_args(Method), calls, strict=True):
            if self.method in (None, method):
                try:
                    found = ask(model, prompt)
                except _RefusedError as error:
                    refusals.append(f"{method}: {error}")
                    continue
                if found is not None:
                    self.method = method
                    return found
        said = f" ({'; '.join(refusals)})" if refusals else ""
        raise ConfigError(
            f"{self.url} gives no log-probabilities of {model!r}{said}; expected a server with "
            "/v1/completions that takes token ids, and logprobs"
        )

    @_readable
    def sample(
        self, model: str, prompt: Sequence[int], count: int, **options: Any
    ) -> list[Sampled]:
        """Returns completions of a prompt, with the last token (end of text) where one has ended.
        Raises ConfigError for a server that does not say which tokens it has sampled: the tokens of
        its text may be others.

        options: of the request, such as `max_tokens`, `temperature` and `seed`
        """
        body = {"n": count, "logprobs": 1, "return_token_ids": True} | options
        choices = self._choices(model, prompt, return_tokens_as_token_ids=True, **body)
        found = [sampled for choice in choices if (sampled := _sampled(choice)) is not None]
        if len(found) != count:
            raise ConfigError(
                f"{self.url} gives no token ids with their log-probabilities of {model!r}; "
                "expected a server whose /v1/completions takes `return_token_ids` and `logprobs` "
                "(vLLM since 0.10.2)"
            )
        return found

    @cached_property
    @_readable
    def kind(self) -> Literal["vllm", "sglang"]:
        """The server of which this is one, by the owner that it gives its models."""
        owners = {str(model.get("owned_by")) for model in self._listed()}
        return "sglang" if "sglang" in owners else "vllm"

    @cached_property
    @_readable
    def repeats_itself(self) -> bool:
        """Whether all completions of one request are the same, so that each must be a request with
        a seed of its own: SGLang with --enable-deterministic-inference draws by seed and position.
        True for an SGLang that does not say."""
        if self.kind == "sglang":
            with contextlib.suppress(_RefusedError):
                found = self._ask("server_info").get("enable_deterministic_inference")
                return found is not False
        return self.kind == "sglang"

    def load_adapter(self, base: str, name: str, directory: Path) -> str:
        """Makes the server read an adapter under this name. Returns the name of the model with it.
        Raises ConfigError."""
        try:
            self._send(self._load_path, {"lora_name": name, "lora_path": str(directory)})
        except _RefusedError as error:
            raise ConfigError(
                f"{self.url} does not load the adapter {directory} ({error}); expected vLLM with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or SGLang with "
                "--enable-lora, that reads this directory"
            ) from None
        return f"{base}:{name}" if self.kind == "sglang" else name

    def unload_adapter(self, name: str) -> None:
        """Makes the server forget an adapter that it was told to load."""
        with contextlib.suppress(_RefusedError):
            path = self._load_path.replace("load", "unload")
            self._send(path, {"lora_name": name}, timeout_s=_GREETING_S)

    @property
    def _load_path(self) -> str:
        return "load_lora_adapter" if self.kind == "sglang" else "v1/load_lora_adapter"

    def _listed(self) -> list[dict[str, Any]]:
        try:
            return _tables(self._ask("v1/models"), "data")
        except _RefusedError as error:
            raise ConfigError(f"{error}; {_EXPECTED}, and --key where it asks for one") from None

    def _echo(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        choice = self._complete(model, prompt, echo=True, logprobs=1)
        values = _list(choice, "logprobs", "token_logprobs")[: len(prompt)]
        return [_log_prob(v) for v in values[1:]] if len(values) == len(prompt) else None

    def _prompt_log_probs(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        rows = _list(self._complete(model, prompt, prompt_logprobs=0), "prompt_logprobs")
        if len(rows) != len(prompt):
            return None
        pairs = zip(rows[1:], map(str, prompt[1:]), strict=True)
        said = [table_of(field(table_of(row, "a row"), token), token) for row, token in pairs]
        return [_log_prob(field(one, "logprob")) for one in said]

    def _next_tokens(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        found = []
        for end in range(1, len(prompt)):
            choice = self._complete(model, prompt[:end], logprobs=_TOP, n_probs=_TOP)
            rows = _tables(choice, "logprobs", "content")
            if not rows or "id" not in rows[0]:  # The text of a token does not say which it is.
                return None
            rows = _tables(rows[0], "top_logprobs")
            top = {str(row.get("id")): _log_prob(row.get("logprob")) for row in rows}
            found.append(top.get(str(prompt[end])))
        return found

    def _complete(self, model: str, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        choices = self._choices(model, prompt, max_tokens=1, temperature=0, **options)
        return choices[0] if choices else {}

    def _choices(self, model: str, prompt: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        found = self._ask("v1/completions", {"model": model, "prompt": list(prompt), **options})
        return _tables(found, "choices")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = self._send(path, body, timeout_s=_GREETING_S if body is None else _TIMEOUT_S)
        return table_of(bounded.parse_json(content, is_strict=False), path)

    def _send(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> bytes:
        where, data = f"{self.url}/{path}", None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(where, data, {"Content-Type": "application/json"})
        if self._token is not None:  # Not for the target of a redirect.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                content: bytes = response.read(bounded.MAX_JSON_NBYTES)
                return content
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise _RefusedError(f"{where} answers {error.code} {said}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(
                f"{where} does not answer: {error}. Start the server, or give the address at which "
                f"it listens{self._then}"
            ) from None


class _RefusedError(ConfigError):
    """The server answered a request with an error."""


def _list(table: dict[str, Any], *keys: str) -> list[Any]:
    for key in keys[:-1]:
        table = table_of(table.get(key) or {}, key)
    return list_of(table.get(keys[-1]) or [], keys[-1])


def _tables(table: dict[str, Any], *keys: str) -> list[dict[str, Any]]:
    return [table_of(one, f"one of {keys[-1]}") for one in _list(table, *keys)]


def _log_prob(value: Any) -> Any:
    if value is None or (type(value) in (int, float) and abs(value) < _TOO_LARGE):
        return value
    raise MalformedError(f"a log-probability is {value!r:.40}; expected a finite number")


def _sampled(choice: dict[str, Any]) -> Sampled | None:
    """Returns the tokens of a choice, or None where it does not say which they are."""
    values = [_log_prob(value) for value in _list(choice, "logprobs", "token_logprobs")]
    ids = _list(choice, "token_ids") or _list(choice, "response_token_ids")
    if not ids:
        matches = [_ID.fullmatch(str(token)) for token in _list(choice, "logprobs", "tokens")]
        ids = [int(match[1]) for match in matches if match]
    if not ids or len(ids) != len(values) or None in values:
        return None
    return [integer(token, "a token id") for token in ids], values


class ServerSampler:
    """A server that samples for TRL's GRPO trainer, by `prepare_trainer(trainer, sampler=...)`.

    url: of an OpenAI-compatible server of the base, which is asked at once. Raises ConfigError if
        it does not answer or gives no token ids
    directory: where adapters lie while the server has them, on a file system that both see;
        `sampler` in the output directory of the trainer where it is None
    model: the name of the base there; None where the server has one model
    key: the name of the environment variable that holds the bearer token
    """

    def __init__(
        self, url: str, *, directory: str | os.PathLike[str] | None = None,
        model: str | None = None, key: str | None = None,
    ) -> None:  # fmt: skip
        then = "; a run that needs it goes on from its last checkpoint"
        self._server = Server(url, key=key, then=then)
        # Adapters of others may be there, or one that a run which has died left behind.
        self._base = model or self._server.only_model("name the base with `model`", is_base=True)
        self._directory = None if directory is None else Path(directory).absolute()
        self._model = self._base
        self._known: Any = None  # Of `over_its_base`, once an adapter was written.
        self._server.sample(self._base, [1], 1, max_tokens=1)

    def check(self, trainer: Any) -> None:
        """Raises UnsupportedError for another trainer than a GRPO trainer, and for a model without
        an adapter."""
        from infinity.integrations.rollouts import GRPO, generates

        if not generates(trainer, {GRPO}):
            raise UnsupportedError(
                f"sampler: expected TRL's GRPOTrainer, which takes log-probabilities of a sampler, "
                f"got {type(trainer).__name__}; leave `sampler` out"
            )
        if not hasattr(trainer.model, "peft_config"):
            raise UnsupportedError(
                "sampler: only an adapter is handed over to a server, and this model has none; "
                "give `peft_config` to infinity.from_pretrained, or leave `sampler` out"
            )
        if has_changed_base(trainer.model, name := trainer.model.active_adapter):
            start = trainer.model.peft_config[name].init_lora_weights
            raise UnsupportedError(
                "sampler: PEFT has changed the base's weights for the adapter (init_lora_weights = "
                f"{start!r}), and the server has those from before; begin with other values, or "
                "leave `sampler` out"
            )

    def attach(self, trainer: Any) -> None:
        """Makes a trainer that `check` has accepted sample here. The server forgets the last
        adapter when training ends, in whatever way; that of a process that was killed, at the first
        step of the next one on its host with the same output directory."""
        self._trainer, plain = trainer, trainer.train
        output = Path(trainer.args.output_dir).absolute()
        self._place = self._directory or output / "sampler"
        # Runs may share a directory of adapters, and hosts the names of their directories.
        owner = hashlib.sha256(os.uname().nodename.encode() + bytes(output)).hexdigest()[:8]
        self._prefix = f"infinity-{owner}"

        def train(*args: Any, **options: Any) -> Any:
            try:
                return plain(*args, **options)
            finally:
                trainer._last_loaded_step = -1  # noqa: SLF001
                if trainer.accelerator.is_main_process:
                    with contextlib.suppress(ConfigError):
                        self._forget()

        trainer.train, trainer.use_vllm, trainer.vllm_mode = train, True, "server"
        trainer.vllm_generation, trainer._last_loaded_step = self, -1  # noqa: SLF001

    def sync_weights(self) -> None:
        """Writes the adapter and lets the server read it in place of the one before. TRL calls this
        before it generates, if a step was made since. All ranks call it; the first one writes."""
        from accelerate.utils import broadcast_object_list

        from infinity.engine.registry import engine_of

        trainer, adapter = self._trainer, self._trainer.model.active_adapter
        with engine_of(trainer.model).ranks.collective_section("hand over an adapter"):
            if trainer.accelerator.is_main_process:
                self._forget()
                # Servers keep prefixes by this name, so no other adapter may ever have it.
                unique = f"{secrets.token_hex(4)}-{trainer.state.global_step}"
                name = f"{self._prefix}-{os.getpid()}-{unique}"
                place = self._place / name
                saved = place / "peft"
                with reporting("write the adapter", place):
                    trainer.model.save_pretrained(
                        saved, selected_adapters=[adapter], save_embedding_layers=False
                    )
                    written = saved if adapter == "default" else saved / adapter
                    self._write(written, place)
                    shutil.rmtree(saved)
                self._model = self._server.load_adapter(self._base, name, place)
        self._model = broadcast_object_list([self._model])[0]

    def _write(self, saved: Path, place: Path) -> None:
        """Writes an adapter that PEFT has just saved as the server reads it. Raises
        UnsupportedError for what it does not load, before the first step."""
        from peft import load_peft_weights, set_peft_model_state_dict

        if self._known is None:
            self._known = over_its_base(saved, self._trainer.model)
        else:
            set_peft_model_state_dict(self._known[0], load_peft_weights(str(saved), device="cpu"))
        if self._known is None:
            shutil.copytree(saved, place, dirs_exist_ok=True)
        else:
            plan_layout(LOADERS[self._server.kind], saved, *self._known)(place)

    def _forget(self) -> None:
        """Lets the server unload adapters of this process, and of those with this output directory
        that are gone, and removes their files."""
        for place in self._place.glob(f"{self._prefix}-*-*-*"):
            pid = place.name.split("-")[2]
            if pid != str(os.getpid()) and Path("/proc", pid).exists():
                continue
            shutil.rmtree(place, ignore_errors=True)
            self._server.unload_adapter(place.name)

    def generate(self, prompts: Sequence[list[int]], images: Any = None, **_: Any) -> Any:
        """Returns what TRL's `VLLMGeneration.generate` does: prompts, completions, and of each of
        their tokens a list of its log-probability. Equal prompts in a row are one request, where a
        server draws each of its completions anew."""
        import torch

        if images is not None and any(images):
            raise UnsupportedError("sampler: prompts with images are not sent to a server")
        groups = [(list(ids), len(list(rows))) for ids, rows in itertools.groupby(prompts)]
        if self._server.repeats_itself:
            groups = [(list(ids), 1) for ids in prompts]
        seeds = torch.randint(1 << 31, (len(groups),), device="cpu").tolist()
        options = self._options()
        vocab_size = self._trainer.model.config.get_text_config().vocab_size

        def sample(task: tuple[tuple[list[int], int], int]) -> list[Sampled]:
            return self._server.sample(self._model, *task[0], seed=task[1], **options)

        # Its threads end with the process: an error does not wait for other requests.
        with ThreadPool(min(_AT_ONCE, len(groups) or 1)) as pool:
            parts = list(pool.imap(sample, zip(groups, seeds, strict=True)))
        completions, values = zip(*itertools.chain(*parts), strict=True)
        longest, largest = max(map(len, completions)), max(map(max, completions))
        if longest > options["max_tokens"] or largest >= vocab_size:
            raise ConfigError(
                f"{self._server.url} gives {longest} tokens and id {largest}; expected at most "
                f"{options['max_tokens']} of a vocabulary of {vocab_size}: serve the trained base"
            )
        return list(prompts), list(completions), [[[v] for v in row] for row in values], None

    def _options(self) -> dict[str, Any]:
        trainer = self._trainer
        # All of them: a server takes absent ones from the model's generation_config.json.
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options: dict[str, Any] = {name: getattr(trainer, name) for name in names}
        options["min_p"] = options["min_p"] or 0.0
        options["top_k"] = options["top_k"] or -1  # "All" to SGLang, too, which refuses 0.
        more = trainer.args.generation_kwargs or {}
        return {"max_tokens": trainer.max_completion_length, **options, **more}
