"""An OpenAI-compatible server over a plain transformers model, in a thread: what GRPO samples from."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file


@contextlib.contextmanager
def serving(answer: Callable[[str, Any], tuple[int, Any] | None]) -> Iterator[str]:
    """Serves in threads, one request at a time. Yields the address.

    answer: returns code and content (text, or what JSON writes) for a path and what was posted;
        None breaks the connection
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if "ndjson" in self.headers["Content-Type"]:
                self._reply([json.loads(line) for line in content.splitlines()])
            else:
                self._reply(json.loads(content))

        def _reply(self, body: Any) -> None:
            with lock:
                found = answer(self.path, body)
            if found is None:
                self.close_connection = True
                return
            code, content = found
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class SamplingServer:
    """Answers as vLLM does, or as SGLang (`is_sglang`), each request alone.

    ignores_adapters: it samples from the base whatever it was told to load
    names_tokens: it says which tokens it has sampled
    is_deterministic: of SGLang: all completions of a request are drawn from the same seed
    dies_after: requests for completions that it answers; then the connection breaks
    """

    def __init__(self, make_base: Callable[[], Any], **faults: Any) -> None:
        self.make_base, self.base = make_base, make_base().eval()
        self.adapters: dict[str, Any] = {}
        self.loaded: list[str] = []
        self.ignores_adapters = faults.get("ignores_adapters", False)
        self.names_tokens = faults.get("names_tokens", True)
        self.dies_after = faults.get("dies_after")
        self.is_sglang = faults.get("is_sglang", False)
        self.is_deterministic = faults.get("is_deterministic", False)
        self.requests: list[dict[str, Any]] = []

    def running(self) -> contextlib.AbstractContextManager[str]:
        """Serves in a thread. Yields the address."""
        return serving(self.answer)

    def answer(self, path: str, body: Any) -> tuple[int, Any] | None:
        if path == "/v1/models":
            owner = {"owned_by": "sglang" if self.is_sglang else "vllm"}
            adapters = [{"id": name, "parent": "base"} | owner for name in self.adapters]
            return 200, {"data": [{"id": "base", "parent": None} | owner, *adapters]}
        if path == "/server_info" and self.is_sglang:
            return 200, {"enable_deterministic_inference": self.is_deterministic}
        root = "" if self.is_sglang else "/v1"
        name = body.get("lora_name", "")
        if path == f"{root}/load_lora_adapter":
            if name in self.adapters:
                return 400, f"The lora adapter '{name}' has already been loaded."
            self.adapters[name] = _adapted(self.make_base(), Path(body["lora_path"]))
            self.loaded.append(name)
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if path == f"{root}/unload_lora_adapter":
            found = self.adapters.pop(name, None)
            return (404, "not found") if found is None else (200, "Success")
        if path != "/v1/completions":
            return 404, "not found"
        self.requests.append(body)
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            return None
        return 200, {"choices": self._complete(body)}

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        name = body["model"]
        if self.is_sglang:  # It has its base under any name without a colon.
            name = name.partition(":")[2] or "base"
        model = self.base if name == "base" else self.adapters[name]
        if self.ignores_adapters:
            model = self.base
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        choices = []
        for index in range(body["n"]):
            if self.is_deterministic:
                generator.manual_seed(body.get("seed", 0))
            ids, values = copy.copy(body["prompt"]), []
            while len(values) < body["max_tokens"] and (not values or ids[-1] != 1):
                logits = model(torch.tensor([ids])).logits[0, -1] / body.get("temperature", 1.0)
                chances = logits.log_softmax(-1)
                ids.append(int(torch.multinomial(chances.exp(), 1, generator=generator)))
                values.append(float(chances[ids[-1]]))
            choice = {"index": index, "text": "?", "logprobs": {"token_logprobs": values}}
            if self.names_tokens:
                choice["token_ids"] = ids[len(body["prompt"]) :]
            choices.append(choice)
        return choices


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight")


def _adapted(base: Any, directory: Path) -> Any:
    """Returns the base with an adapter. A pair of factors for each expert, which a server stacks
    for its kernels, becomes what PEFT packs."""
    saved = load_file(directory / "adapter_model.safetensors")
    assert not any(".experts.base_layer." in name for name in saved), "vLLM refuses PEFT's layout"
    config = json.loads((directory / "adapter_config.json").read_text())
    pairs: dict[tuple[str, str, str], list[torch.Tensor]] = {}
    for name in sorted(saved):  # Fewer than ten experts.
        if match := _EXPERT.fullmatch(name):
            pairs.setdefault((match[1], match[3], match[4]), []).append(saved.pop(name))
    for (module, what, side), parts in pairs.items():
        if what == "up":  # Its A is that of `gate`.
            continue
        if (what, side) == ("gate", "B"):
            parts = [*map(torch.cat, zip(parts, pairs[module, "up", "B"], strict=True))]
        inner = module if what == "down" else f"{module}.base_layer"
        packed = torch.cat(parts) if side == "A" else torch.stack(parts, -1).flatten(1)
        saved[f"{inner}.lora_{side}.weight"] = packed
    if pairs:
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        config["target_modules"] = [n for n in config["target_modules"] if n[0] not in "gud"]
    with tempfile.TemporaryDirectory() as place:
        save_file(saved, Path(place, "adapter_model.safetensors"))
        Path(place, "adapter_config.json").write_text(json.dumps(config))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(base, place).eval()
