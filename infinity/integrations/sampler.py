"""Completions for TRL's GRPO trainer from an OpenAI-compatible server, and its log-probabilities.

`ServerSampler` takes the place of TRL's `VLLMGeneration`, which sends all weights to a server of
TRL's own. This one hands over the adapter as a file. TRL compares the log-probabilities of sampler
and trainer, weighs tokens by their ratio, and logs mean and maximum of the difference.

Sources: vLLM 0.33.0, `vllm/entrypoints/serve/lora` and `openai/completion`; SGLang 0.5.23,
`docs/advanced_features/lora`; TRL 1.16, `trl/generation/vllm_generation.py`.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

from infinity.bounded import MAX_JSON_NBYTES
from infinity.errors import ConfigError, UnsupportedError, listed, reporting

_TIMEOUT_S, _GREETING_TIMEOUT_S = 600, 30
_TOP = 100  # Tokens that a server without the log-probabilities of prompts gives at each position.
_AT_ONCE = 64  # Requests to a server, which batches them.
_PREFIX = "token_id:"  # Of a token that vLLM writes as its id.

Method = Literal["echo", "prompt_logprobs", "next token"]
Sampled: TypeAlias = tuple[list[int], list[float]]  # Token ids, and the log-probability of each.


class Server:
    """An OpenAI-compatible server. `method` is how it gives log-probabilities of prompts, known
    after the first one: "echo" of completions, vLLM's "prompt_logprobs", or as the "next token" of
    every prefix, of those tokens only that are among the likeliest."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """key: the name of the environment variable that holds the bearer token."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server; expected http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.method: Method | None = None
        self._loads: tuple[str, bool] | None = None  # The path, and whether names get the base's.
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            if key not in os.environ:
                raise ConfigError(f"--key {key}: there is no environment variable of this name")
            self._headers["Authorization"] = f"Bearer {os.environ[key]}"

    def models(self) -> list[str]:
        """Returns the names that the server lists."""
        found = self._ask("v1/models", timeout_s=_GREETING_TIMEOUT_S)
        return [str(model["id"]) for model in found.get("data", []) if "id" in model]

    def only_model(self, remedy: str, *, but: str | None = None) -> str:
        """Returns the name of the model of a server that has one, `but` those with this beginning.
        Raises ConfigError with `remedy` for another."""
        names = [name for name in self.models() if but is None or not name.startswith(but)]
        if len(names) != 1:
            raise ConfigError(f"{self.url} has {listed(names) or 'no model'}; {remedy}")
        return names[0]

    def log_probs(self, model: str, prompt: Sequence[int]) -> list[float | None]:
        """Returns the log-probabilities of all tokens but the first. Raises ConfigError if the
        server cannot be reached, or gives none."""
        methods: dict[Method, Callable[[str, Sequence[int]], list[float | None] | None]] = {
            "echo": self._echo,
            "prompt_logprobs": self._prompt_log_probs,
            "next token": self._next_tokens,
        }
        refusals = []
        for method, ask in methods.items():
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

    def load_adapter(self, base: str, name: str, directory: Path) -> str:
        """Makes the server read an adapter under this name. Returns the name of the model with it.
        Raises ConfigError."""
        body = {"lora_name": name, "lora_path": str(directory)}
        known = (("v1/load_lora_adapter", False), ("load_lora_adapter", True))  # vLLM, SGLang.
        refusals = []
        for path, has_base in known if self._loads is None else (self._loads,):
            try:
                self._send(path, body)
            except _RefusedError as error:
                refusals.append(f"{path}: {error}")
                continue
            self._loads = path, has_base
            return f"{base}:{name}" if has_base else name
        raise ConfigError(
            f"{self.url} does not load the adapter {directory} ({'; '.join(refusals)}); expected "
            "vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or SGLang with "
            "--enable-lora, that reads this directory"
        )

    def unload_adapter(self, name: str) -> None:
        """Makes the server forget an adapter, if it has one of this name."""
        for path in ("v1/unload_lora_adapter", "unload_lora_adapter"):
            try:
                self._send(path, {"lora_name": name})
            except _RefusedError:
                continue
            return

    def _echo(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        choice = self._complete(model, prompt, echo=True, logprobs=1)
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return values[1 : len(prompt)] if len(values) >= len(prompt) else None

    def _prompt_log_probs(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        rows = self._complete(model, prompt, prompt_logprobs=0).get("prompt_logprobs") or []
        if len(rows) != len(prompt):
            return None
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], prompt[1:], strict=True)]

    def _next_tokens(self, model: str, prompt: Sequence[int]) -> list[float | None] | None:
        found = []
        for end in range(1, len(prompt)):
            choice = self._complete(model, prompt[:end], logprobs=_TOP, n_probs=_TOP)
            rows = (choice.get("logprobs") or {}).get("content") or []
            if not rows or "id" not in rows[0]:  # The text of a token does not say which it is.
                return None
            top = {row["id"]: row["logprob"] for row in rows[0].get("top_logprobs", [])}
            found.append(top.get(prompt[end]))
        return found

    def _complete(self, model: str, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        choices = self._choices(model, prompt, max_tokens=1, temperature=0, **options)
        return choices[0] if choices else {}

    def _choices(self, model: str, prompt: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        found = self._ask("v1/completions", {"model": model, "prompt": list(prompt), **options})
        return found.get("choices") or []

    def _ask(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, Any]:
        content = self._send(path, body, timeout_s=timeout_s)
        try:
            found = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{self.url}/{path} gives no JSON: {error}") from None
        return found if isinstance(found, dict) else {}

    def _send(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                content: bytes = response.read(MAX_JSON_NBYTES)
                return content
        except urllib.error.HTTPError as error:
            raise _RefusedError(
                f"{error.code} {error.read(500).decode(errors='replace')}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{self.url}/{path} does not answer: {error}. Start the server (again); a run that "
                "needs it goes on from its last checkpoint"
            ) from None


class _RefusedError(ConfigError):
    """The server answered a request with an error."""


def _sampled(choice: dict[str, Any]) -> Sampled | None:
    """Returns the tokens of a choice, or None where it does not say which they are."""
    said = choice.get("logprobs") or {}
    values, written = said.get("token_logprobs") or [], said.get("tokens") or []
    ids = choice.get("token_ids") or choice.get("response_token_ids")
    if not ids and all(str(token).startswith(_PREFIX) for token in written):
        ids = [token.removeprefix(_PREFIX) for token in written]
    if not ids or len(ids) != len(values) or None in values:
        return None
    return [int(token) for token in ids], [float(value) for value in values]


class ServerSampler:
    """What `prepare_trainer(trainer, sampler=...)` takes: a server that samples for TRL's GRPO
    trainer.

    url: of an OpenAI-compatible server of the base, which is asked at once. Raises ConfigError if
        it does not answer or gives no token ids
    directory: where adapters lie while the server has them, on a file system that both see;
        `sampler` in the output directory of the trainer where it is None
    model: the name of the base there; None where the server has one model
    key: the name of the environment variable that holds the bearer token
    """

    def __init__(
        self,
        url: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        model: str | None = None,
        key: str | None = None,
    ) -> None:
        self._server = Server(url, key=key)
        # A run that has died may have left an adapter there.
        remedy = "name the base with `model`"
        self._base = model or self._server.only_model(remedy, but="infinity-")
        self._directory = None if directory is None else Path(directory).absolute()
        self._model = self._base
        self._server.sample(self._base, [1], 1, max_tokens=1)

    def attach(self, trainer: Any) -> None:
        """Makes a GRPO trainer sample here. Raises UnsupportedError for another trainer, and for a
        model without an adapter."""
        if not any(cls.__name__ == "GRPOTrainer" for cls in type(trainer).__mro__):
            raise UnsupportedError(
                f"sampler: expected TRL's GRPOTrainer, which takes log-probabilities of a sampler, "
                f"got {type(trainer).__name__}; leave `sampler` out"
            )
        if not hasattr(trainer.model, "peft_config"):
            raise UnsupportedError(
                "sampler: only an adapter is handed over to a server, and this model has none; "
                "give `peft_config` to infinity.from_pretrained, or leave `sampler` out"
            )
        self._trainer = trainer
        if self._directory is None:
            self._directory = Path(trainer.args.output_dir).absolute() / "sampler"
        vars(trainer).update(
            use_vllm=True, vllm_mode="server", vllm_generation=self, _last_loaded_step=-1
        )

    def sync_weights(self) -> None:
        """Writes the adapter and lets the server read it in place of the one before. TRL calls this
        before it generates, if a step was made since. All ranks call it; the first one writes."""
        from accelerate.utils import broadcast_object_list

        from infinity.engine.registry import engine_of

        trainer, directory = self._trainer, self._directory
        assert directory is not None
        mark = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
        name, adapter = f"infinity-{mark}-{trainer.state.global_step}", trainer.model.active_adapter
        with engine_of(trainer.model).ranks.collective_section("hand over an adapter"):
            if trainer.accelerator.is_main_process:
                for before in directory.glob(f"infinity-{mark}-*"):  # Also of a run that has died.
                    self._server.unload_adapter(before.name)
                    shutil.rmtree(before, ignore_errors=True)
                place = directory / name
                with reporting("write the adapter", place):
                    trainer.model.save_pretrained(
                        place, selected_adapters=[adapter], save_embedding_layers=False
                    )
                written = place if adapter == "default" else place / adapter
                self._model = self._server.load_adapter(self._base, name, written)
        self._model = broadcast_object_list([self._model])[0]

    def generate(self, prompts: Sequence[list[int]], images: Any = None, **_: Any) -> Any:
        """Returns what TRL's `VLLMGeneration.generate` does: prompts, completions, and of each of
        their tokens a list of its log-probability. Equal prompts in a row are one request."""
        import torch

        if images is not None and any(images):
            raise UnsupportedError("sampler: prompts with images are not sent to a server")
        groups = [(list(ids), len(list(rows))) for ids, rows in itertools.groupby(prompts)]
        seeds = torch.randint(1 << 31, (len(groups),)).tolist()
        options = self._options()

        def sample(group: tuple[list[int], int], seed: int) -> list[Sampled]:
            return self._server.sample(self._model, *group, seed=seed, **options)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = [one for several in pool.map(sample, groups, seeds) for one in several]
        logprobs = [[[value] for value in values] for _, values in found]
        return list(prompts), [ids for ids, _ in found], logprobs, None

    def _options(self) -> dict[str, Any]:
        trainer = self._trainer
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options = {name: getattr(trainer, name) for name in names}
        usual = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": None}
        options = {k: v for k, v in options.items() if k not in usual or usual[k] != v}
        more = trainer.args.generation_kwargs or {}
        return {"max_tokens": trainer.max_completion_length, **options, **more}
