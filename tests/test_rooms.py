"""Every file is in its room: rooms import downwards only, there is no circle, and only the adapters
import flwr.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path

import pytest

from bayflower import methods
from bayflower.contract import ClientHalf, ServerHalf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bayflower"
# from the ground up: a room may import itself and the rooms before it
ROOMS = (
    "errors",
    "settings",
    "tree",
    "metrics",
    "shown",
    "tasks",
    "calibration",
    "stacked",
    "networks",
    "maths",
    "work",
    "contract",
    "strategies",
    "clients",
    "plugins",
    "baselines",
    "methods",
    "data",
    "recipes",
    "config",
    "wire",
    "files",
    "privacy",
    "rounds",
    "fused",
    "personal",
    "policy",
    "flower",
    "engines",
    "testing",
    "study",
    "report",
    "api",
    "deploy",
    "reproduce",
    "bench",
    "natural",
    "cli",
    "server_app",
    "client_app",
    "__init__",
    "__main__",
)
RESERVED: set[str] = set()  # rooms for what comes next
UPWARDS = {  # arrows that point up on purpose, imported on demand: the public names
    ("strategies/__init__.py", "flower"),
    ("clients/__init__.py", "flower"),
}
# who may import flwr
FLWR = (
    *("flower/", "server_app.py", "client_app.py"),
    *("deploy/superlink.py", "deploy/supernode.py"),
)


@functools.cache  # most tests look at the same files
def nodes(text: str) -> list[ast.AST]:
    """Return the calls, constants and import statements of a module, wherever they stand."""
    kinds = (ast.Call, ast.Constant, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a module, wherever they stand."""
    return [node for node in nodes(text) if isinstance(node, ast.Import | ast.ImportFrom)]


def arrows(package: Path) -> list[tuple[str, int, str, str]]:
    """Return (file, line, module it imports, name it takes) of every import inside the package,
    wherever in a file.
    """
    found = []
    modules = {module_of(path, package) for path in package.rglob("*.py")}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts[:-1]
        for node in imports(path.read_text()):
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").split(".")[0] == "bayflower"
            ):
                base = list(inside)[: len(inside) - node.level + 1] if node.level else []
                base += [
                    part for part in (node.module or "").split(".") if part and part != "bayflower"
                ]
                for name in node.names:
                    full = ".".join([*base, name.name])
                    target = full if full in modules else ".".join(base)
                    found.append((str(path.relative_to(package)), node.lineno, target, name.name))
    return found


def module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[0] or "__init__"


def wrong_way(package: Path) -> list[str]:
    """Return the imports that point upwards."""
    found = []
    for file, line, target, name in arrows(package):
        here, there = file.removesuffix(".py").split("/")[0], room_of(target)
        # a constant of the package, which is loaded first
        if (there, name) == ("__init__", "__version__"):
            continue
        if ROOMS.index(there) > ROOMS.index(here) and (file, there) not in UPWARDS:
            found.append(f"{file}:{line} imports {target or 'bayflower'}")
    return found


def circles(package: Path) -> list[set[str]]:
    """Return the sets of modules that import each other in a circle, by what each can reach."""
    graph: dict[str, set[str]] = {}
    for file, _, target, _ in arrows(package):
        own = module_of(package / file, package)
        if target and target != own:
            graph.setdefault(own, set()).add(target)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in graph.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reached = {module: reach(module) for module in graph}
    found = {
        frozenset(other for other in reached[module] if module in reached.get(other, set()))
        for module in graph
    }
    return [set(group) for group in found if group]


def test_every_room_is_in_the_list():
    rooms = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms <= set(ROOMS)
    assert set(ROOMS) - rooms <= RESERVED


def test_rooms_import_downwards():
    assert wrong_way(PACKAGE) == []


def test_no_modules_import_each_other_in_a_circle():
    # the two arrows that point up on purpose would close circles through the lists of public names
    assert [group for group in circles(PACKAGE) if not {"strategies", "clients"} & group] == []


def test_only_the_adapters_import_flwr():
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in imports(path.read_text()):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            if any(name.split(".")[0] == "flwr" for name in names):
                importing.add(str(path.relative_to(PACKAGE)))
    assert importing  # the rule is about something
    assert [file for file in importing if not file.startswith(FLWR)] == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("maths/exact.py", "from ..flower import records", "maths/exact.py:"),
        ("tree.py", "from .contract import Work", "tree.py:"),
        ("files/store.py", "def late():\n    from ..fused.run import run_fused", "files/store.py:"),
    ],
)
def test_an_arrow_that_is_turned_round_is_found(tmp_path, file, line, fault):
    copy = tmp_path / "bayflower"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    (copy / file).write_text((copy / file).read_text() + "\n" + line + "\n")
    assert [one for one in wrong_way(copy) if one.startswith(fault)]


def test_a_circle_is_found(tmp_path):
    copy = tmp_path / "bayflower"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    assert not any("tree" in group for group in circles(copy))
    (copy / "tree.py").write_text((copy / "tree.py").read_text() + "\nfrom .contract import Work\n")
    assert any({"tree", "contract"} <= group for group in circles(copy))


# where methods may be named: their halves, the table, citations, tables of papers, benchmarks
MAY_NAME = (
    "strategies/",
    "clients/",
    "methods.py",
    "baselines.py",
    "cli/cite.py",
    "cli/citations.py",
    "reproduce/",
    "bench/",
    "natural/rivals.py",
)


def named(package: Path) -> list[str]:
    """Return where code outside the halves names a method, or asks a half what it can do."""
    words = {word.lower() for row in methods.ROWS for word in (row.name, row.stem, row.title)}
    words -= {"local"}  # an everyday word: a phase, a folder
    found = []
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package))
        for node in nodes(path.read_text()):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in ("getattr", "hasattr"):
                asked = ast.unparse(node.args[0]).split(".")[-1]
                if asked in ("half", "server", "client", "unstacked") or "half" in asked:
                    found.append(f"{where} asks a half: {ast.unparse(node)}")
            if file.startswith(MAY_NAME):
                continue
            if isinstance(node, ast.Constant) and str(node.value).lower() in words:
                found.append(f"{where} names {node.value}")
            if isinstance(node, ast.ImportFrom):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                halves = {"strategies", "clients"} & set(parts)
                stems = {row.stem for row in methods.ROWS}
                if halves and stems & set(parts):
                    found.append(f"{where} imports {ast.unparse(node)}")
    return found


def test_no_method_is_named_outside_its_halves_and_no_half_is_asked_what_it_can_do():
    assert named(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        'if "fedmap" == name: pass',
        "from ..strategies.fednp import EXTRA",
        "from ..clients import metavd",
        'own = getattr(half, "admit", None)',
    ],
)
def test_a_method_named_elsewhere_is_found(tmp_path, line):
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "somewhere.py").write_text(line + "\n")
    assert len(named(tmp_path)) == 1


def test_the_contract_page_lists_every_hook():
    """Every public name of both halves is in the table of docs/contract.md, and no other."""
    text = (ROOT / "docs" / "contract.md").read_text()
    rows = text[text.index("## Every hook") : text.index("## How each method fits")].splitlines()
    cells = [row.split("|") for row in rows if row.startswith("| ")][1:]
    for half, column in ((ServerHalf, 2), (ClientHalf, 3)):
        listed = re.findall(r"`(\w+)`", " ".join(cell[column] for cell in cells))
        kinds = [kind for kind in half.__mro__ if kind.__module__.startswith("bayflower.")]
        known = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__)}
        known = {name for name in known if not name.startswith("_")}
        assert len(listed) == len(set(listed))
        assert set(listed) == known
