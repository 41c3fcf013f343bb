"""The repository keeps its own rules: who imports flwr, folder = table, equations cited = equations
tested, sizes, no pickle.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from bayflower import methods
from bayflower.config import groups

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bayflower"
SHARED = {"__init__.py", "addon.py"}  # addon: what the client halves of MetaVD and SNIP extend
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Return the top-level packages a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def own_tests(stem: str) -> list[Path]:
    """Return a method's own test files: test_STEM.py and test_STEM_SUBJECT.py."""
    folder = ROOT / "tests" / "methods"
    first = folder / f"test_{stem}.py"
    return [first, *sorted(folder.glob(f"test_{stem}_*.py"))] if first.exists() else []


def test_folders_and_table_agree():
    stems = {row.stem for row in methods.ROWS}
    for folder in ("strategies", "clients"):
        assert {
            path.stem for path in (PACKAGE / folder).glob("*.py") if path.name not in SHARED
        } == stems
    for stem in stems:
        assert own_tests(stem), f"method {stem} has no test file"
    assert len({row.name for row in methods.ROWS}) == len(methods.ROWS)


@pytest.mark.parametrize("stem", sorted({row.stem for row in methods.ROWS}))
def test_equations_cited_are_tested(stem):
    cited = set()
    for folder in ("strategies", "clients"):
        cited |= set(re.findall(r"\[eq\. \d+\]", (PACKAGE / folder / f"{stem}.py").read_text()))
    text = "".join(path.read_text() for path in own_tests(stem))
    tested = set(re.findall(r"\[eq\. \d+\]", text))
    assert cited <= tested, f"cited but not tested: {sorted(cited - tested)}"


@pytest.mark.parametrize("stem", sorted({row.stem for row in methods.ROWS}))
@pytest.mark.parametrize("folder", ["strategies", "clients"])
def test_halves_have_symbols_and_departures(folder, stem):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / f"{stem}.py").read_text()))
    assert text and "Departs:" in text and re.search(r"paper +here", text)  # noqa: PT018


def public(body: list[ast.stmt]):
    """Yield the public classes, functions and methods of a module or class body."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


# parts of a torch Module or Function: torch says what they are
TORCHS = {"forward", "backward", "setup_context", "vmap"}


def test_everything_public_says_what_it_is():
    silent = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in public(ast.parse(path.read_text()).body)
        if ast.get_docstring(node) is None and node.name not in TORCHS
    ]
    assert silent == []


def test_setting_names_are_unique_in_every_run():
    for name in methods.METHODS:
        names = [
            "method",
            *(field.name for kind in groups(name).values() for field in dataclasses.fields(kind)),
        ]
        assert len(names) == len(set(names)), name


def test_the_run_config_of_flwr_run_is_generated():
    """Flower refuses a run-config key that pyproject.toml does not list; other settings are in
    `set`.
    """
    from bayflower.flower.bundle import USUAL, config_table

    text = (ROOT / "pyproject.toml").read_text()
    assert text.endswith(config_table(method="fedmap"))
    listed = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    known = {
        field.name
        for name in methods.METHODS
        for kind in groups(name).values()
        for field in dataclasses.fields(kind)
    }
    assert set(USUAL) <= known & set(listed)


def test_files_can_be_read_in_one_sitting():
    long = {
        str(path.relative_to(ROOT)): n
        for path in ROOT.glob("**/*.py")
        if ".venv" not in path.parts and (n := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_no_pickle_and_no_utils():
    for path in [*SOURCES, *ROOT.glob("benchmarks/*.py"), *ROOT.glob("experiments/*.py")]:
        assert not imports(path) & {
            "pickle",
            "cloudpickle",
            "dill",
            "joblib",
            "shelve",
            "marshal",
        }, path
        text = path.read_text()
        assert not re.search(r"allow_pickle\s*=\s*True|torch\.load\(|torch\.save\(", text), path
        assert path.name != "utils.py"


def test_pinned_versions_can_be_installed_on_the_oldest_python():
    """A version that wants Python 3.11.5 leaves people on 3.11.2 (Debian 12) with an installation
    that fails.
    """
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "requires-python"
    ].removeprefix(">=")
    found = {one.metadata["Name"].lower().replace("_", "-"): one for one in distributions()}
    checked = [one for name, one in found.items() if pinned.get(name) == one.version]
    assert len(checked) > 50
    refused = {
        one.metadata["Name"]: needs
        for one in checked
        if (needs := one.metadata.get("Requires-Python"))
        and not SpecifierSet(needs).contains(f"{oldest}.0")
    }
    assert refused == {}


def test_errata_of_fedmap_are_all_named():
    text = "".join(
        (PACKAGE / name).read_text() for name in ("strategies/fedmap.py", "clients/fedmap.py")
    )
    assert {f"E-M{i}" for i in range(1, 10)} <= set(re.findall(r"E-M\d", text))


def test_readme_table_is_the_table():
    readme = (ROOT / "README.md").read_text()
    for row in methods.ROWS:
        assert f"`{row.name}`" in readme, row.name
        assert f"bayflower/strategies/{row.stem}.py" in readme
        assert f"bayflower/clients/{row.stem}.py" in readme


def test_documents_point_at_files_that_exist():
    ignored = (ROOT / ".gitignore").read_text().splitlines()  # working folders
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} → {target}"
        for target in re.findall(
            r"`((?:bayflower|docs|tests|benchmarks|experiments)/[\w./-]+)`", page.read_text()
        ):
            if f"/{target}/" not in ignored:
                assert (ROOT / target).exists(), f"{page.name} → {target}"
