"""Hook of mkdocs: folders in the navigation, pages outside docs/, links that lead there, the API.

README.md is the first page, with its doors as cards on top. A link to a file that is no page of the
site becomes plain text: the reader of the site has no source tree. API.md is written from the
public names of the package. A fence that is not read as one, or a heading that is lost, ends the
build: Markdown shows both as text without a warning.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import infinity
from infinity import checkpoint
from infinity.config.deepspeed import to_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "io/README.md", "bench/README.md",
    "bench/results/README.md", "recipes/README.md", "notebooks/README.md",
)  # fmt: skip
FILES = ("bench/results/plots/*.png", "recipes/*/*.toml", "notebooks/*.ipynb", "examples/*.py")
TRAINERS = (
    "infinity.integrations.hf.prepare_trainer",
    "infinity.integrations.hf.prepare_accelerator",
    "infinity.integrations.loss_curve.LossCurveCallback",
    "infinity.observe.loss_curve.LossCurve",
)
MEMBERS = {
    "infinity.observe.loss_curve.LossCurve": "members: [add, show]",
    "infinity.checkpoint.WeightSource": 'inherited_members: true, members: null, filters: ["!^_"]',
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
# A line that superfences takes as the first one of a fence: a language, and options with values.
OPENING = re.compile(r"```[\w+-]*( [\w-]+=\"[^\"]*\")*")
TORN = re.compile(r"^\|.*\n\n(?=\|.*\n(?!\|[ :|-]+$))", re.MULTILINE)  # Of a table.
# A link to a program on a line for itself, for which the site shows the program.
PROGRAM = re.compile(r"^\[[\w.]+\]\(\.\./(examples/\w+\.py)\)$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
DOORS = re.compile(r"^## Doors\n\n((?:[* ] .*\n)+)", re.MULTILINE)


def place_of(name: str) -> str:
    """Returns the place on the site of a file of the repository, by its path in it."""
    if name == "README.md":
        return "index.md"
    return name.removeprefix("docs/")


def name_of(place: str) -> str:
    """Returns the path in the repository of a page, by its place on the site."""
    if place == "index.md":
        return "README.md"
    return place if place in PAGES else f"docs/{place}"


def home_of(package: ModuleType, name: str) -> str:
    """Returns the path at which griffe finds the source of a public name."""
    return f"{getattr(package, name).__module__}.{name}"


def broken_parts(text: str) -> list[str]:
    """Returns what is wrong with the fences and tables of a page, each with its line."""
    opened = 0
    lines = [text[: torn.end()].count("\n") for torn in TORN.finditer(text)]
    found = [f"line {number}: an empty line before a row of a table" for number in lines]
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            continue
        if opened:
            if line.strip() != "```":
                found.append(f"line {number}: the fence of line {opened} is still open")
            opened = 0
        else:
            opened = number
            if not OPENING.fullmatch(line):
                found.append(
                    f'line {number}: {line!r} begins no fence; expected ```name key="value"'
                )
    return found + [f"line {opened}: the fence has no end"] * bool(opened)


def landing_page(text: str) -> str:
    """Returns README.md as the first page: its doors are cards below the first words."""
    doors = DOORS.search(text)
    if doors is None:
        raise PluginError("README.md has no section 'Doors', which the landing page shows as cards")
    rest = text.replace(doors[0], "")
    before, heading, after = rest.partition("\n## ")
    cards = f'<div class="grid cards" markdown>\n\n{doors[1].strip()}\n\n</div>\n'
    return f"{before}\n{cards}{heading}{after}"


def api_page() -> str:
    """Returns the page of the public names, as directives of mkdocstrings."""
    names = [name for name in infinity.__all__ if name != "checkpoint"]
    errors = [name for name in names if name.endswith("Error") or name == "ParameterNotResident"]
    models = [name for name in names if name.islower() or name == "SwapConfig"]
    optimizers = [name for name in names if name not in {*errors, *models}]
    groups = {"Models": models, "Optimizers": optimizers, "Errors": errors}
    directives = {
        title: [(home_of(infinity, name), f"infinity.{name}") for name in group]
        for title, group in groups.items()
    }
    directives["Checkpoints"] = [
        (home_of(checkpoint, name), f"infinity.checkpoint.{name}") for name in checkpoint.__all__
    ]
    directives["Trainers"] = [(name, name) for name in TRAINERS]
    parts = ["# API", "Written from the docstrings. These names are public; others may change."]
    for title, entries in directives.items():
        parts.append(f"## {title}")
        for path, heading in entries:
            more = f", {MEMBERS[heading]}" if heading in MEMBERS else ""
            parts.append(f"::: {path}\n    options: {{heading: {heading}{more}}}")
    return "\n\n".join(parts) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces folders in the navigation by their pages, in the order of their names."""

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [filled(each) for each in entry]
        if isinstance(entry, dict):
            return {title: filled(each) for title, each in entry.items()}
        if entry.endswith("/"):
            return sorted(
                f"{entry}{path.name}" for path in Path(config.docs_dir, entry).glob("*.md")
            )
        return entry

    config.nav = filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and files from outside docs/."""
    found = [path.relative_to(ROOT).as_posix() for each in FILES for path in ROOT.glob(each)]
    for name in (*PAGES, *found):
        files.append(File.generated(config, place_of(name), abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "API.md", content=api_page()))
    return files


def on_page_markdown(text: str, page: Page, files: Files, **_: object) -> str:
    """Makes links between files of the repository links between places on the site."""
    own = page.file.src_uri
    if wrong := broken_parts(text):
        raise PluginError(f"{own}: {'; '.join(wrong)}")
    if own == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        text = landing_page(text)

    def linked(found: re.Match[str]) -> str:
        picture, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(name_of(own)), target))
        place = place_of(name)
        if files.get_file_from_path(place) is None:
            return words
        near = posixpath.relpath(place, posixpath.dirname(own) or ".")
        return f"{picture}[{words}]({near}{anchor})"

    text = PROGRAM.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", text)
    if own == "DEEPSPEED.md":
        text = f"{text}\n{to_markdown()}"
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(linked, part) for part in parts)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Ends the build if a heading of the page is not one on the site."""
    wanted = len(HEADING.findall(FENCE.sub("", page.markdown or "")))
    if len(re.findall(r"<h[1-6]\b", html)) < wanted:
        raise PluginError(f"{page.file.src_uri}: a heading of the page is shown as text")
    return html
