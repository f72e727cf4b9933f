"""What the pages of the documentation say is so: they build, their code runs, their words are ours."""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

import infinity
from infinity import checkpoint, errors
from infinity.config import SwapConfig
from infinity.tools.cli import app
from infinity.tools.plan import rehearsal
from tests.support.measuring import measure_briefly

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNNER = CliRunner()


class CodeBlock(NamedTuple):
    language: str
    about: str  # What stands behind the language.
    text: str

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]+)"', self.about)
        return found[1] if found else None


def blocks(page: str) -> list[CodeBlock]:
    text = (DOCS / page).read_text()
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [CodeBlock(*each) for each in found]


# -- The site --------------------------------------------------------------------------------------


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'infinity-offload[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'infinity-offload[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        place = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert (tmp_path / "site" / place).exists()
        assert f'href="{place}"' in first, "the navigation leads to every page"
    api = (tmp_path / "site" / "API.html").read_text()
    assert "Moves the model's parameters to the tiers" in api
    public = {f"infinity.{name}" for name in set(infinity.__all__) - {"checkpoint"}}
    public |= {f"infinity.checkpoint.{name}" for name in checkpoint.__all__}
    assert public <= set(re.findall(r"<h3[^>]*>\s*([\w.]+)", api))
    assert "<code>ignore</code>: name patterns" in api, "parameters are a list"
    assert "WeightSource" in api and "_find_encoded" not in api, "nothing private is shown"
    assert 'href="docs/' not in first
    for text in (api, first):
        assert not re.search(
            r'(?:src|href)="https?://(?!ui\.perfetto)[^"]*\.(?:js|css|woff2?)"', text
        )


def test_every_fence_and_table_of_a_page_is_read_as_one() -> None:
    """The build of the site ends for one that is not; this is the same check, without a build."""
    pytest.importorskip("mkdocs", reason="pip install 'infinity-offload[docs]'")
    sys.path.append(str(ROOT / "scripts"))
    from site_pages import PAGES, broken_parts

    for page in (*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)):
        assert not broken_parts(page.read_text()), page
    for text in (
        "```bash fails\nls\n```\n",
        "```\nls\n",
        "```bash\nls\n```text\n```\n",
        "| a |\n\n| b |\n",
    ):
        assert broken_parts(text), text
    assert not broken_parts('```toml title="a.toml"\na = 1\n```\n')


def test_no_empty_line_follows_another() -> None:
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        prose = re.sub(r"(?ms)^( *)```.*?^\1```$", "code", page.read_text())
        assert "\n\n\n" not in prose, page


def test_every_page_stands_behind_one_of_five_doors() -> None:
    """The tabs of the site and the sections of CONTENTS.md have the same pages."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]

    def pages_of(entry: object) -> set[str]:
        if isinstance(entry, dict):
            return set().union(*map(pages_of, entry.values()))
        if isinstance(entry, list):
            return set().union(*map(pages_of, entry))
        folder = str(entry)
        found = (DOCS / folder).glob("*.md") if folder.endswith("/") else [Path(folder)]
        return {f"{folder}{each.name}" if folder.endswith("/") else folder for each in found}

    tabs = {title: pages_of(inner) for door in nav for title, inner in door.items()}
    assert tabs.pop("Home") == {"index.md"}
    parts = re.split(r"^## (.*)\n", (DOCS / "CONTENTS.md").read_text(), flags=re.MULTILINE)[1:]
    doors = {
        title: {link.removeprefix("../") for link in re.findall(r"\]\(([^)#]*)", part)}
        for title, part in zip(parts[::2], parts[1::2], strict=True)
    }
    tabs["Start"].remove("CONTENTS.md")
    tabs["Reference"].remove("API.md")  # Written by the build.
    assert doors == tabs
    assert len(doors) == 5


def test_the_readme_fits_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    assert len(set(re.findall(r"\]\(([^)#]*\.md)", text))) <= 8, "links to a few pages"


def test_no_page_repeats_a_sentence_of_another() -> None:
    """Twelve words in a row stand on one page; code and the index are left out."""
    found: dict[tuple[str, ...], Path] = {}
    for page in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        words = re.findall(r"[\w'`.-]*\w[\w'`.-]*", text.lower())
        for phrase in zip(*(words[start:] for start in range(12)), strict=False):
            other = found.setdefault(phrase, page)
            assert other == page, f"{page.name} repeats {other.name}: {' '.join(phrase)}"


# -- The tutorial ----------------------------------------------------------------------------------


def run_line(line: str, *, may_fail: bool) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "infinity":
        done = RUNNER.invoke(app, arguments)
        assert (done.exit_code != 0) == may_fail, f"{line}\n{done.output}"
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return
    assert program == "python", line
    argv, sys.argv = sys.argv, arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv = argv


def test_the_tutorial_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measure_briefly(monkeypatch)
    monkeypatch.setattr(rehearsal, "_LONG_S", 0.2)  # A step of few tokens tells enough.
    shutil.copytree(
        ROOT / "examples",
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("run", "__pycache__"),
    )
    names: dict[str, object] = {}
    for block in blocks("TUTORIAL.md"):
        if block.title is not None:
            Path(block.title).write_text(block.text)
        elif block.language == "bash":
            for line in block.text.splitlines():
                run_line(line, may_fail="# is refused" in line)
        elif block.language == "python":
            exec(compile(block.text, "TUTORIAL.md", "exec"), names)
    budget = SwapConfig.load(tmp_path / "adapter.toml").tiers.host.capacity
    base = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors"))
    assert budget.nbytes and base > budget.nbytes, "the base is larger than the memory"
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [float(re.findall(r'"loss": ([\d.]+)', line)[0]) for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "plan.html").exists() and (tmp_path / "step.html").exists()
    assert "trained parameters" in capsys.readouterr().out


# -- Files on the pages ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "howto").glob("*.md")))
def test_the_files_of_a_how_to_are_accepted(page: str) -> None:
    for block in blocks(f"howto/{page}"):
        if block.language == "toml":
            table = {"tiers": {}} | tomllib.loads(block.text)
            table["tiers"].setdefault("host", {"capacity": "1GiB"})
            SwapConfig.load(table)


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
)
def test_commands_on_a_page_have_the_options_that_they_show(page: str) -> None:
    for line in re.findall(r"^(?: {4})?infinity (\w.*)$", (DOCS / page).read_text(), re.MULTILINE):
        words = shlex.split(line.split("   ")[0].split(" #")[0], comments=True)
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        help_text = help_of(
            tuple(word for word in words if re.fullmatch(r"[a-z][a-z-]*", word))[:2]
        )
        assert all(option in help_text for option in options), f"{page}: infinity {line}"


@functools.cache
def help_of(words: tuple[str, ...]) -> str:
    """The help of the longest command that the words name."""
    for count in range(len(words), 0, -1):
        done = RUNNER.invoke(app, [*words[:count], "--help"], env={"COLUMNS": "300"})
        if done.exit_code == 0:
            return done.output
    raise AssertionError(f"there is no command {words}")


# -- Messages --------------------------------------------------------------------------------------

OTHERS = {  # Messages of the build, and of other programs.
    "expected a C++20 compiler to build from source; found none",
    "module 'infinity' has no attribute 'offload'",
}


@functools.cache
def literals() -> tuple[str, ...]:
    """The texts in the package, with "\\0" where a value is filled in."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("{}", "\0")
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    paths = (ROOT / "infinity").rglob("*.py")
    return tuple(text for path in paths for text in walk(ast.parse(path.read_text())))


MESSAGES = re.findall(r"^### `([^`]+)`$", (DOCS / "TROUBLESHOOTING.md").read_text(), re.MULTILINE)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 30
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_package_has(message: str) -> None:
    if message in OTHERS or message in vars(errors):
        return
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")))
    assert any(pattern.search(text) for text in literals()), "no error has these words"


# -- Owners ----------------------------------------------------------------------------------------

OWNERS = re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", (DOCS / "ARCHITECTURE.md").read_text())


def test_the_architecture_names_owners() -> None:
    assert len(OWNERS) > 40
    assert len(set(OWNERS)) == len(OWNERS)


@pytest.mark.parametrize(("name", "file"), OWNERS)
def test_an_owner_of_state_is_a_class_of_its_file(name: str, file: str) -> None:
    tree = ast.parse((ROOT / "infinity" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
