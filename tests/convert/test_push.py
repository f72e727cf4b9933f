"""`--push`: what is uploaded to the Hugging Face hub, and what is refused before anything is computed.

The hub is a server in this process, which takes every file as a part of the commit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_command
from tests.support.sampling_server import serving
from tests.train.jobs import CONFIG, write_job

from .test_merge import adapt
from .test_serving import base_at


class Hub:
    """Repositories by name, with the content of their files. `role` is that of the token."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.role = "write"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/whoami-v2":
            access = {"accessToken": {"role": self.role}}
            return 200, {"name": "me", "orgs": [{"name": "lab"}], "auth": access}
        if path == "/api/repos/create":
            name = f"{body.get('organization', 'me')}/{body['name']}"
            assert body.get("private") is True or body.get("visibility") == "private"
            self.files[name] = {}
            return 200, {"url": f"https://huggingface.co/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name, _, what = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if what == "preupload":
            rows = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in body["files"]]  # fmt: skip
            return 200, {"files": rows}
        if what == "commit":
            for row in body:
                if row["key"] == "file":
                    content = base64.b64decode(row["value"]["content"])
                    self.files[name][row["value"]["path"]] = content
            commit = {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1"}
            return 200, {"success": True, **commit}
        return 404, {"error": path}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, str]]:
    hub = Hub()
    with serving(lambda path, body: hub.answer(path, body)) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_tests")
        yield hub, url


def files_of(directory: Path, keep: Callable[[str], bool] = lambda _: True) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file() and keep(p.name)}


def test_a_merge_and_an_adapter_for_a_server_are_uploaded(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    base_at(tmp_path / "base", "llama")
    adapt(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    merged = run_command(
        "merge", tmp_path / "base", tmp_path / "adapter", "-o", tmp_path / "merged",
        "--push", "lab/merged",
    )  # fmt: skip
    assert merged.exit_code == 0 and "pushed to" in merged.stderr, merged.output
    served = run_command(
        "export-adapter", tmp_path / "adapter", "--for", "vllm", "--base", tmp_path / "base",
        "--no-sheet", "-o", tmp_path / "served", "--push", "me/served",
    )  # fmt: skip
    assert served.exit_code == 0, served.output
    assert hub[0].files == {
        "lab/merged": files_of(tmp_path / "merged"),
        "me/served": files_of(tmp_path / "served"),
    }


def test_the_export_of_a_run_is_uploaded(hub: tuple[Hub, str], tmp_path: Path) -> None:
    """Without what the run says of itself, and without its checkpoints."""
    checkpoint = '[checkpoint]\ndirectory = "output/checkpoints"\n'
    write_job(tmp_path, CONFIG + "steps = 2\n" + checkpoint)
    done = run_command("train", tmp_path / "job.toml", "--push", "me/run")
    assert done.exit_code == 0, done.output
    own = ("infinity-run.json", "summary.json", "metrics.jsonl", "shards.json")
    expected = files_of(tmp_path / "output", lambda name: name not in own and name[0] != ".")
    assert hub[0].files == {"me/run": expected} and "model.safetensors" in expected
    assert (tmp_path / "output" / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("name", "role", "token", "said"),
    [
        ("me/run", "write", None, "hf auth login"),
        ("me/run", "read", "hf_of_tests", "with the role read"),
        ("them/run", "write", "hf_of_tests", "got one of me, lab"),
        ("me/no name", "write", "hf_of_tests", "Repo id must"),
    ],
)
def test_a_push_that_would_be_refused_is_refused_before_the_first_step(
    name: str, role: str, token: str | None, said: str, hub: tuple[Hub, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hub[0].role = role
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    write_job(tmp_path, CONFIG + "steps = 2\n")
    done = run_command("train", tmp_path / "job.toml", "--push", name)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output
    assert not hub[0].files and not (tmp_path / "output").exists()


def test_a_push_that_fails_says_where_the_result_is(hub: tuple[Hub, str], tmp_path: Path) -> None:
    base_at(tmp_path / "base", "llama")
    adapt(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"])
    answer = hub[0].answer
    hub[0].answer = lambda path, body: (403, {}) if "create" in path else answer(path, body)  # type: ignore[method-assign]
    done = run_command(
        "merge", tmp_path / "base", tmp_path / "adapter", "-o", tmp_path / "out", "--push", "me/m"
    )
    assert done.exit_code == 2 and f"hf upload me/m {tmp_path / 'out'}" in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())
