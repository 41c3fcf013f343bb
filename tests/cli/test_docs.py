"""The documents do what they say: every `bayflower` line of a bash block and every Python block is
run, page by page, in order.

The convention. In ```bash blocks, lines that start with "bayflower " are run as they stand, with
this environment's Python (README.md in the default run with less work, see LESS); other lines
(make, pip) are what CI does on a clean checkout. ```python
blocks are run in a namespace of their own, in the same folder as the commands of their page. A
Python block whose first line is a comment with a path is a file of the example in
docs/add-a-method.md: its test, the contract's promises and the engines' agreement are run on it.
```sh blocks are run by tests/flower/test_flower.py, tests/deploy/test_deploy_processes.py and
tests/cli/test_examples.py, because they start Flower's own programs; ```diff blocks by
tests/cli/test_examples.py. Plain blocks are pictures, printed output, or
commands that need hours or several machines; these are parsed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from inspect import signature
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import test_contract
import test_engines
from prefork import bayflower

from bayflower import clients, methods, strategies
from bayflower.rounds.solo import one_thread
from bayflower.testing.promises import Promises

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
EXAMPLE = "docs/add-a-method.md"
# less work for the commands of README.md in the default run; `make slow` has every page as it
# stands
LESS = {
    "--rounds 30 ": "--rounds 2 ",
    "models --all": "models/client-1 --client 1",
    "local --rounds 2 ": "local --rounds 1 --clients 3 --set keep=0.2 ",
    "--rounds 2 --clients 4 ": "--rounds 1 --clients 3 --set keep=0.2 ",
    "run fedmap --rounds 3 ": "run fedmap --rounds 1 --clients 3 --set keep=0.2 ",
    "run fedmap --rounds 2 --set": "run fedmap --rounds 1 --clients 3 --set keep=0.2 --set",
    "rounds=10)": "rounds=2)",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ((?:bayflower|tests|fedavgm)/[\w/]+\.(?:py|toml))(.*)\n")
OUTSIDE = "fedavgm/"  # files of a package of its own, which tests/cli/test_outside.py runs
STEM = "fedlast"
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "dtype": "float64"}
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, text) of the fenced blocks of a page."""
    return BLOCK.findall((ROOT / page).read_text())


def commands(block: str) -> list[str]:
    """Return the commands of a bash block that are ours to run, each on one line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("bayflower ")]


def files(page: str, outside: bool = False) -> dict[str, str]:
    """Return the blocks that are files of an example, by path: those of this package, or those of a
    package of its own.
    """
    return {
        found[1]: text
        for _, text in blocks(page)
        if (found := FILE.match(text)) and found[1].startswith(OUTSIDE) == outside
    }


def run_command(line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    done = bayflower(*words, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_and_python_blocks_run(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, {})


@pytest.mark.slow  # .ci/run has it by name
def test_the_readme_runs_with_less_work(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    assert all(more in text for more in LESS)
    run_page("README.md", tmp_path, monkeypatch, LESS)


def run_page(page: str, tmp_path: Path, monkeypatch, less: dict[str, str]) -> None:
    """Run the commands and the Python blocks of a page, in order."""
    monkeypatch.chdir(tmp_path)
    # their recipes are run in test_tools.py, where what reaches them is checked
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for number, (language, text) in enumerate(blocks(page)):
        for more, little in less.items():
            text = text.replace(more, little)
        if language == "bash":
            for line in commands(text):
                run_command(line, tmp_path)
        elif language == "python" and not FILE.match(text):
            with one_thread(), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "data: .*left out", UserWarning
                )  # a reader sees it
                exec(compile(text, f"{page}, block {number}", "exec"), {"__name__": "__main__"})


def test_the_convention_finds_what_it_should():
    found = {page: [language for language, _ in blocks(page)] for page in PAGES}
    assert {"bash", "python"} <= set(found["README.md"])
    assert all(
        language in ("", "bash", "diff", "python", "sh", "toml")
        for languages in found.values()
        for language in languages
    ), found
    assert sum(len(commands(text)) for _, text in blocks("README.md")) >= 5
    assert set(files(EXAMPLE)) == {
        f"bayflower/strategies/{STEM}.py",
        f"bayflower/clients/{STEM}.py",
        "bayflower/methods.py",
        f"tests/methods/test_{STEM}.py",
    }
    assert set(files(EXAMPLE, outside=True)) == {
        *("fedavgm/fedavgm.py", "fedavgm/test_fedavgm.py", "fedavgm/pyproject.toml")
    }


def spelled_out(text: str) -> list[list[str]]:
    """Return the words of every `bayflower` command in a block, wherever in a line it stands."""
    text = text.replace("\\\n", " ")
    found = (
        shlex.split(part.split("#")[0].split(" & ")[0])
        for line in text.splitlines()
        for part in re.findall(r"\bbayflower .*", line)
    )
    return [words[1:] for words in found]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page):
    """Commands and options exist and take those values: those of bash blocks, which only `make
    slow` runs, and those of plain blocks, which need hours, a GPU or several machines.
    """
    from typer.main import get_command

    from bayflower.cli import app

    for language, text in blocks(page):
        shown = spelled_out(text) if not language else []
        if language == "bash":
            shown = [shlex.split(line, comments=True)[1:] for line in commands(text)]
        for words in shown:
            command, rest = get_command(app), words
            context = command.make_context("bayflower", [], resilient_parsing=True)
            while hasattr(command, "commands"):
                command, rest = command.commands[rest[0]], rest[1:]
            command.make_context(" ".join(words), list(rest), parent=context)


def test_the_parser_of_plain_blocks_can_fail():
    assert spelled_out("for k in 1 2; do bayflower reproduce a --part $k/2 & done; wait") == [
        ["reproduce", "a", "--part", "$k/2"]
    ]
    assert spelled_out("RAY_ADDRESS=a:1 bayflower run fedmap  # words") == [["run", "fedmap"]]
    assert commands("bayflower run a \\\n --rounds 2\nmake x\n") == ["bayflower run a   --rounds 2"]


def test_every_command_that_is_named_exists():
    """`bayflower WORD` in running text: WORD is a command."""
    from bayflower.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    for page in PAGES:
        named = set(re.findall(r"`bayflower ([a-z]+)", (ROOT / page).read_text()))
        assert named <= known, f"{page}: {sorted(named - known)}"


# -- the method of docs/add-a-method.md ----------------------------------------------------------
def place(folder: Path, monkeypatch, change=lambda path, text: text) -> None:
    """Put the example's files where the package finds them, and its row into the table."""
    for path, text in files(EXAMPLE).items():
        if path == "bayflower/methods.py":
            row = eval(text, {"Method": methods.Method})
            monkeypatch.setitem(methods.METHODS, row.name, row)
            monkeypatch.setattr(methods, "ROWS", (*methods.ROWS, row))
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(change(path, text))
    for package in (strategies, clients):
        name = package.__name__.split(".")[1]
        monkeypatch.setattr(
            package, "__path__", [*package.__path__, str(folder / "bayflower" / name)]
        )
    importlib.invalidate_caches()


def forget() -> None:
    """Let the example's modules be gone."""
    for package in (strategies, clients):
        sys.modules.pop(f"{package.__name__}.{STEM}", None)
        vars(package).pop(STEM, None)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example method, registered."""
    place(tmp_path, monkeypatch)
    yield STEM
    forget()


def run_its_test(folder: Path) -> None:
    """Run every test function of the example's test file."""
    path = folder / "tests" / "methods" / f"test_{STEM}.py"
    space: dict = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec"), space)
    tests = [value for name, value in space.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_example_passes_its_own_test(example, tmp_path):
    run_its_test(tmp_path)


def test_the_example_keeps_every_promise_of_the_contract(example, tmp_path):
    bench, promises = test_contract.bench_of(example, "mlp"), Promises()
    names = [name for name in vars(Promises) if name.startswith("test_")]
    assert len(names) >= 11
    for name in names:
        test = getattr(promises, name)
        more = {"tmp_path": tmp_path / "store"} if "tmp_path" in signature(test).parameters else {}
        test(bench, **more)


def test_the_example_runs_on_both_engines_with_the_same_numbers(example):
    """Two rounds on digits."""
    loop, fused = test_engines.outcomes(example, rounds=2, **SGD)
    test_engines.compare(loop, fused, tolerance=1e-9)
    assert len(fused.server_state.memory) > 1


def test_the_example_follows_the_rules_for_halves(example):
    for path, text in files(EXAMPLE).items():
        if path.startswith(("bayflower/strategies", "bayflower/clients")):
            assert "Departs:" in text
            assert re.search(r"paper +here", text)
            assert "flwr" not in text


def test_the_example_broken_on_purpose_fails_its_test(tmp_path, monkeypatch):
    """Absent clients are left out of the mean."""

    def broken(path: str, text: str) -> str:
        if path != f"bayflower/strategies/{STEM}.py":
            return text
        assert text.count("memory = {**state.memory, **new}") == 1
        return text.replace("memory = {**state.memory, **new}", "memory = new")

    place(tmp_path, monkeypatch, broken)
    try:
        with pytest.raises(AssertionError):
            run_its_test(tmp_path)
    finally:
        forget()


@pytest.mark.flower
def test_the_example_added_to_the_package_passes_the_suites_on_every_engine(tmp_path):
    """Two files, a row and a test in a copy of the package, and a line in two documents: nothing
    else is changed, and the tests of the repository pass.
    """
    for name in ("bayflower", "tests", "docs"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    line = f"`{STEM}`: bayflower/strategies/{STEM}.py, bayflower/clients/{STEM}.py\n"
    for name in ("README.md", "docs/methods.md"):
        with (tmp_path / name).open("a") as page:
            page.write(line)
    for path, text in files(EXAMPLE).items():
        if path == "bayflower/methods.py":
            table = (tmp_path / path).read_text()
            row = "".join(f"    {line}\n" for line in text.splitlines()[1:])
            assert table.count("\n)\nDEFAULT") == 1
            (tmp_path / path).write_text(
                table.replace("\n)\nDEFAULT", f"\n{row.rstrip()},\n)\nDEFAULT")
            )
        else:
            (tmp_path / path).write_text(text)
    env = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    suites = ["contract", "contract_runs", "engines", "protocol", "resume"]
    known = [f"tests/engines/test_{name}.py" for name in suites]
    said = call("pytest", "-q", "-p", "no:cacheprovider", *known, "-k", STEM, "-m", "not gpu")
    assert int(re.search(r"(\d+) passed", said)[1]) >= 20
    call("pytest", "-q", "-p", "no:cacheprovider", f"tests/methods/test_{STEM}.py")
    rules = ["tests/test_repo.py", "tests/test_rooms.py", "tests/test_site.py"]
    about = "folders or equations or halves or names or run_config or readme or method or rooms"
    said = call("pytest", "-q", "-p", "no:cacheprovider", *rules, "-k", about)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 60
    known = ["tests/cli/test_tools.py", "tests/cli/test_presets.py", "tests/cli/test_tune.py"]
    call("pytest", "-q", "-p", "no:cacheprovider", *known, "-k", f"cited or citations or {STEM}")
    work = "--rounds 2 --clients 2 --dataset synthetic --set local_epochs=1 --set device=cpu --json"
    results = {}
    for engine in ("loop", "ray", "deployment"):
        out = str(tmp_path / engine)
        call("bayflower", "run", STEM, "--engine", engine, "--out", out, *shlex.split(work))
        results[engine] = json.loads((tmp_path / engine / "result.json").read_text())
    for engine in ("ray", "deployment"):
        assert results[engine]["final"] == results["loop"]["final"]
        assert results[engine]["rounds"][-1]["remembered"] == 2.0
