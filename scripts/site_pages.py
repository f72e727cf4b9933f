"""Hook of mkdocs: folders in the navigation, pages outside docs/, and links that lead there.

README.md is the first page. A link to a file that is no page of the site becomes plain text: the
reader of the site has no source tree.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "io/README.md", "bench/README.md")
PICTURES = "bench/results/plots/*.png"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces folders and "*" in the navigation by pages, in the order of their names."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    unnamed = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    unnamed = [name for name in unnamed if name not in named]

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [page for each in entry for page in (unnamed if each == "*" else [filled(each)])]
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
    """Adds the pages and pictures from outside docs/."""
    pictures = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(PICTURES)]
    for name in (*PAGES, *pictures):
        files.append(File.generated(config, place_of(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(text: str, page: Page, files: Files, **_: object) -> str:
    """Makes links between files of the repository links between places on the site."""
    own = page.file.src_uri

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

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(linked, part) for part in parts)
