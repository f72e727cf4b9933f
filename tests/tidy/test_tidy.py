"""Limits of the house: sizes, unique names, cited invariants, documents that name what exists.

The limits of a class's attributes and of a constructor's arguments came late: `EXCEEDING` lists the
classes that exceed them, with their numbers. It may only shrink.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import infinity

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "infinity"
NATIVE = ("io/", "csrc/")  # Paths in documents are relative to the package, but for these.
MAX_FILE_LINES = 700  # Aim for 300.
MAX_FUNCTION_LINES = 70
MAX_ATTRIBUTES = 16
MAX_CONSTRUCTOR_ARGUMENTS = 8
EXCEEDING = json.loads((Path(__file__).parent / "exceeding.json").read_text())


class Source(NamedTuple):
    name: str  # Relative to the package.
    text: str
    tree: ast.Module


@functools.cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found.append(Source(str(path.relative_to(PACKAGE)), text, ast.parse(text)))
    return tuple(found)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(qualified name, lines) of each function below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield prefix + child.name, child.end_lineno - child.lineno + 1
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(child, f"{prefix}{child.name}." if is_named else prefix)


def refuse_excess(sizes: dict[str, int], limit: int) -> None:
    over = {name: size for name, size in sizes.items() if size > limit}
    assert not over, f"divide these, none may have more than {limit} lines: {over}"


def test_no_file_is_longer_than_the_limit() -> None:
    sizes = {source.name: len(source.text.splitlines()) for source in sources()}
    refuse_excess(sizes, MAX_FILE_LINES)


def test_no_function_is_longer_than_the_limit() -> None:
    sizes: dict[str, int] = {}
    for source in sources():
        for name, lines in functions(source.tree):
            key = f"{source.name}: {name}"  # Overloads and setters share a name.
            sizes[key] = max(lines, sizes.get(key, 0))
    refuse_excess(sizes, MAX_FUNCTION_LINES)


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.name)
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared, f"give these classes names of their own: {shared}"


def test_a_new_tensor_names_its_device() -> None:
    """Otherwise it is where `torch.set_default_device` of the program says, and not on the host."""
    makers = {
        "empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye",
        "linspace", "rand", "randn", "randint", "randperm",
    }  # fmt: skip
    names = {f"torch.{maker}" for maker in makers}
    missing = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        for node in (() if source.name.startswith("tools/") else ast.walk(source.tree))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in names
        and not {"device", "out"} & {keyword.arg for keyword in node.keywords}
    ]
    assert not missing, f'give these device="cpu", or the device that they are for: {missing}'


def classes() -> Iterator[ast.ClassDef]:
    for source in sources():
        yield from (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))


def num_attributes(of: ast.ClassDef) -> int:
    """Counts the names that the methods of a class assign on `self`."""
    names = set()
    for node in ast.walk(of):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return len(names)


def num_constructor_arguments(of: ast.ClassDef) -> int:
    """Counts the arguments of a written `__init__`. Records whose `__init__` is generated are data."""
    for node in of.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
    return 0


@pytest.mark.parametrize(
    ("what", "count", "limit"),
    [
        ("attributes", num_attributes, MAX_ATTRIBUTES),
        ("constructor_arguments", num_constructor_arguments, MAX_CONSTRUCTOR_ARGUMENTS),
    ],
)
def test_a_class_holds_and_asks_for_little(what, count, limit) -> None:
    over = {node.name: number for node in classes() if (number := count(node)) > limit}
    allowed = EXCEEDING[what]
    grown = {name: number for name, number in over.items() if number > allowed.get(name, 0)}
    assert not grown, f"divide these, none may have more than {limit} {what}: {grown}"
    shrunk = {name: over.get(name) for name in allowed if over.get(name) != allowed[name]}
    assert not shrunk, f"exceeding.json may only shrink: give these their numbers of now: {shrunk}"


def imported_modules(source: Source, known: set[str]) -> Iterator[str]:
    """Modules of the package that a module imports, wherever: at its top, for type checkers, or
    inside a function. A package imports its lazy names inside `if TYPE_CHECKING`, which no module
    needs to have first."""
    is_package = source.name.endswith("__init__.py")
    for node in source.tree.body if is_package else ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_have_no_circle() -> None:
    """The standard library sorts the modules by their imports, and names a circle if there is one."""
    named = {
        "infinity."
        + source.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source
        for source in sources()
    }
    graph = {
        name: {other for other in imported_modules(source, set(named)) if other in named} - {name}
        for name, source in named.items()
    }
    assert sum(map(len, graph.values())) > 1000
    graphlib.TopologicalSorter(graph).prepare()


# -- Invariants ------------------------------------------------------------------------------------


@functools.cache
def invariants() -> dict[str, str]:
    """The "kept by" column of each invariant, by its number."""
    text = (ROOT / "docs" / "INVARIANTS.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| INV-")]
    return {row[1].strip(): row[3] for row in rows}


def located(name: str) -> Path:
    return (ROOT if name.startswith(NATIVE) else PACKAGE) / name


def keepers(number: str) -> list[Path]:
    """Files of the column; a folder stands for the files in it."""
    found = []
    for name in re.findall(r"`([\w/]+(?:/|\.py|\.cpp|\.h))`", invariants()[number]):
        path = located(name)
        assert path.exists(), f"{number} names {name}, which does not exist"
        found += [
            file
            for file in (path.rglob("*") if path.is_dir() else [path])
            if file.suffix in (".py", ".cpp", ".h")
        ]
    return found


def cited_in(text: str) -> set[str]:
    return set(re.findall(r"\bINV-\d+\b", text))


def test_there_are_invariants() -> None:
    assert len(invariants()) > 20


@pytest.mark.parametrize("number", list(invariants()))
def test_an_invariant_is_cited_by_the_code_that_keeps_it(number: str) -> None:
    files = keepers(number)
    assert not files or any(number in cited_in(file.read_text()) for file in files)


def test_a_citation_names_an_invariant() -> None:
    texts = {source.name: source.text for source in sources()}
    for folder in (*(ROOT / part for part in NATIVE), ROOT / "tests"):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                texts[str(path.relative_to(ROOT))] = path.read_text()
    unknown = {
        name: found for name, text in texts.items() if (found := cited_in(text) - set(invariants()))
    }
    assert not unknown


# -- Documents -------------------------------------------------------------------------------------

TOUR = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", (ROOT / "docs" / "TOUR.md").read_text())


def is_defined(tree: ast.Module, dotted: str) -> bool:
    body: list[ast.stmt] = tree.body
    for part in dotted.split("."):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part:
                body = node.body
                break
        else:
            return False
    return True


def test_the_tour_names_functions() -> None:
    assert len(TOUR) > 20


def test_folders_of_the_tour_exist() -> None:
    folders = re.findall(r"`([\w/]+/)`", (ROOT / "docs" / "TOUR.md").read_text())
    assert len(folders) > 5
    assert [folder for folder in folders if not located(folder).is_dir()] == []


@pytest.mark.parametrize(("file", "function"), TOUR)
def test_every_name_in_the_tour_exists(file: str, function: str) -> None:
    tree = ast.parse(located(file).read_text())
    assert not function or is_defined(tree, function)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "io").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} points to {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} points to {target}#{anchor}"


# -- Names -----------------------------------------------------------------------------------------


# Home-made words that gave way to the field's (docs/STYLE.md).
OLD_WORDS = (
    "anatomy", "berth", "bundles", "called off", "conductor", "dissect", "gbps", "inbox", "let go", "lets go",
    "machinery", "matchmaker", "moor", "parcel", "parked", "parks", "strand", "strands", "used last", "wholes",
)  # fmt: skip


def test_old_words_do_not_come_back() -> None:
    word = re.compile(rf"(?<![a-z])({'|'.join(OLD_WORDS)})(?![a-z])", re.IGNORECASE)
    texts = {source.name: source.text for source in sources()}
    texts |= {page.name: page.read_text() for page in pages() if page.name != "CHANGELOG.md"}
    found = {name: word.findall(text) for name, text in texts.items() if word.search(text)}
    assert not found


# Words that say nothing about the thing that they name: "given" what, a "piece" of what.
VAGUE_WORDS = {"berth", "given", "piece", "pieces", "room", "rooms", "whole", "wholes"}


def names_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, line) of what a module names: variables, attributes, arguments, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_names_are_of_things() -> None:
    found = defaultdict(list)
    for source in sources():
        for name, line in names_in(source.tree):
            words = set(re.findall(r"[a-z]+", re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()))
            if name == "each" or words & VAGUE_WORDS:
                found[source.name].append((name, line))
    assert not found, f"name the thing: {dict(found)}"


def bound_names(nodes: list[ast.stmt]) -> set[str]:
    """Names that a module binds at its top, also for type checkers alone."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.If):
            names |= bound_names(node.body) | bound_names(node.orelse)
    return names


def exported_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def module_file(dotted: str) -> Path:
    path = ROOT.joinpath(*dotted.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_a_module_has_the_names_that_it_exports() -> None:
    checked = 0
    for source in sources():
        exported = exported_names(source.tree)
        bound = bound_names(source.tree.body)
        if "__getattr__" in bound:  # Names that are imported when they are used.
            continue
        absent = set(exported) - bound
        assert not absent, f"{source.name} exports {absent}, and has no such name"
        checked += len(exported)
    assert checked > 10


def test_every_name_of_the_package_is_bound_in_its_module() -> None:
    lazy = set(infinity.__all__) - {"checkpoint"}  # A package, imported as it is.
    bound = {
        name
        for home in (
            "infinity.api",
            "infinity.config",
            "infinity.errors",
            "infinity.tools.pretrained",
            "infinity.tools.logprobs",
            "infinity.tools.mlp_slices",
        )
        for name in bound_names(ast.parse(module_file(home).read_text()).body)
    }
    assert lazy <= bound, lazy - bound


def test_the_version_has_one_source() -> None:
    assert re.search(
        r'^dynamic = \["version"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", infinity.__version__)


def test_what_a_package_leaves_out_is_named_from_the_root() -> None:
    """A pattern without a leading slash leaves out every folder of that name, in wheels too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["sdist"]["exclude"]
    assert all(pattern.startswith("/") for pattern in settings["sdist"]["exclude"])
