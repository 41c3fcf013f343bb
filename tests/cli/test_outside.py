"""A method of another package: the one of docs/add-a-method.md as a real distribution. It is found
by its entry point, keeps the contract, and is in every command; a broken one harms no other.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_docs import EXAMPLE, ROOT, files
from test_tools import said

import bayflower
from bayflower import methods, plugins
from bayflower.cli import cite
from bayflower.config import TAKEN, parse
from bayflower.engines import prepare, run_under_flower
from bayflower.errors import ConfigError
from bayflower.flower.bundle import APP_KEYS
from bayflower.reproduce.tune import ranges
from bayflower.testing import Bench, MethodContract

NAME = "fedavgm"
WORK = {
    "num_clients": 2,
    "keep": 0.1,
    "rounds": 2,
    "local_epochs": 1,
    "device": "cpu",
    "calibration": "off",
}


def distribution(folder: Path, modules: dict[str, str], project: str) -> Path:
    """Write an installed distribution: modules, and a .dist-info with the entry points of its
    pyproject.toml.
    """
    about = tomllib.loads(project)["project"]
    info = folder / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    points = about["entry-points"][plugins.GROUP].items()
    text = "".join(f"{name} = {value}\n" for name, value in points)
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{text}")
    for name, code in modules.items():
        (folder / name).write_text(code)
    return folder


def example(folder: Path) -> Path:
    """Write the distribution of the page."""
    found = {path.split("/")[1]: text for path, text in files(EXAMPLE, outside=True).items()}
    return distribution(folder, found, found["pyproject.toml"])


@pytest.fixture
def clean():
    """Methods, path and modules are afterwards what they were."""
    table, path = methods.METHODS, sys.path.copy()
    rows, seen, faults = dict(table.rows), set(table.seen), dict(table.faults)
    yield
    table.rows, table.seen, table.faults = rows, seen, faults
    sys.path[:] = path
    for name in (NAME, *BROKEN):
        sys.modules.pop(name, None)


@pytest.fixture
def outside(clean, tmp_path_factory):
    """The folder of the page's distribution, on the path."""
    folder = example(tmp_path_factory.mktemp("site"))
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("outside")
class TestContract(MethodContract):
    """What the page's test file has: one class, and every promise is tested."""

    method = NAME


def test_the_suite_finds_a_broken_promise(outside, monkeypatch):
    """The class has every promise; one that the method breaks fails."""
    tests = [name for name in dir(MethodContract) if name.startswith("test_")]
    assert len(tests) >= 24
    bench, suite = Bench(NAME, "mlp"), TestContract()
    suite.test_no_reply_changes_nothing(bench)
    suite.test_one_update_is_returned(bench)
    suite.test_order_and_trees_change_no_bit(bench)
    half = type(bench.server)
    monkeypatch.setattr(half, "finalise", lambda self, state, total: state)
    with pytest.raises(AssertionError):
        suite.test_one_update_is_returned(bench)
    monkeypatch.undo()
    monkeypatch.setattr(half, "averages_models", True)
    with pytest.raises(AssertionError):
        suite.test_a_server_that_averages_models_keeps_their_mean_and_nothing_else(bench)


def test_it_is_in_every_command(outside, monkeypatch, capsys, tmp_path):
    assert NAME not in sys.modules  # nothing is imported before it is asked for
    monkeypatch.chdir(tmp_path)
    assert "FedAvg with momentum on the" in said(monkeypatch, capsys, "methods")
    listed = json.loads(said(monkeypatch, capsys, "methods", "--json"))
    assert listed[-1]["server"] == "fedavgm:Server"
    assert listed[-1]["client"] == "bayflower.clients.fedavg:Client"
    assert "server_momentum" in said(monkeypatch, capsys, "settings", NAME)
    cited = said(monkeypatch, capsys, "cite", NAME)
    assert "@misc{hsu2019fedavgm," in cited
    assert cited.count("{") == cited.count("}")
    assert ranges(NAME, {})["server_momentum"] == [0.0, 0.7, 0.9]
    words = [f"--set={key}={value}" for key, value in WORK.items()]
    said(monkeypatch, capsys, "compare", NAME, "fedavg", "--set=server_momentum=0", *words)
    results = [
        json.loads(Path(f"runs/compare/{name}/seed-0/result.json").read_text())
        for name in (NAME, "fedavg")
    ]
    # without momentum it is FedAvg: the same numbers
    assert results[0]["final"] == results[1]["final"]
    assert results[0]["config"]["server_momentum"] == 0
    table = said(monkeypatch, capsys, "results", "runs/compare")
    assert "FedAvgM" in table
    said(monkeypatch, capsys, "report", "runs/compare", "--html", "r.html", "--features", "none")
    assert "FedAvgM" in Path("r.html").read_text()


def test_it_is_a_flower_strategy_and_has_its_own_test(outside):
    strategies = importlib.import_module("bayflower.strategies")
    made = strategies.FedAvgM(server_momentum=0.25)
    vars(strategies).pop("FedAvgM")
    assert made.method == NAME
    space: dict = {"__name__": "test_fedavgm"}
    exec(compile((outside / "test_fedavgm.py").read_text(), "page", "exec"), space)
    space["test_momentum_is_that_of_the_paper"]()
    assert space["TestContract"].method == NAME


def test_the_page_s_test_fails_on_broken_code(outside):
    code = (outside / "fedavgm.py").read_text()
    assert code.count("mean[n] + pull[n]") == 1
    (outside / "fedavgm.py").write_text(code.replace("mean[n] + pull[n]", "mean[n] - pull[n]"))
    space: dict = {"__name__": "test_fedavgm"}
    exec(compile((outside / "test_fedavgm.py").read_text(), "page", "exec"), space)
    with pytest.raises(AssertionError):
        space["test_momentum_is_that_of_the_paper"]()


def test_processes_are_told_where_a_module_is(clean, tmp_path, monkeypatch):
    """A module that BAYFLOWER_METHODS names, in the folder of the user, is found and handed on."""
    (tmp_path / "fedavgm.py").write_text(files(EXAMPLE, outside=True)["fedavgm/fedavgm.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, NAME)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert parse(NAME, {}).options.server_momentum == 0.9
    told = methods.handed_on([NAME])
    assert told[plugins.VARIABLE] == NAME
    assert told["PYTHONPATH"].split(os.pathsep) == ["/somewhere", str(tmp_path)]
    monkeypatch.setenv(plugins.VARIABLE, f"{NAME},nowhere")
    assert methods.get("fedavg").name == "fedavg"
    with pytest.raises(ConfigError, match=r"BAYFLOWER_METHODS cannot be used: module nowhere can"):
        methods.get("mine")


def test_what_a_notebook_defines_stays_in_its_process(clean):
    code = "import bayflower\nfrom bayflower.strategies.fedavg import Server\n"
    code += "from bayflower.clients.fedavg import Client\n"
    code += "row = bayflower.register('in-a-cell', Server, Client)\n"
    space = {"__name__": "__main__"}
    exec(code, space)
    exec(code, space)  # the cell is run again
    assert space["row"].title == "InACell"
    assert cite.entry_of(space["row"])[1] == "in-a-cell"
    prepared = prepare(parse("in-a-cell", WORK), "ray")
    with pytest.raises(ConfigError, match=r"registered in a script or notebook, .* in_a_cell\.py"):
        run_under_flower([prepared], {}, Path("x"), 0, False, lambda _: None)


GOOD = """import bayflower
from bayflower.strategies.fedavg import Server
from bayflower.clients.fedavg import Client
"""
BROKEN = {
    "missing": ("broken", None, r"module missing cannot be imported \(ModuleNotFoundError"),
    "raises": ("broken", "1 / 0", r"module raises .*ZeroDivisionError: division by zero\)"),
    "leaves": ("broken", "raise SystemExit(3)", r"module leaves .*SystemExit: 3\)"),
    "silent": ("broken", "pass", r"module silent calls no bayflower.register\('broken', …\)"),
    "taken": ("fedmap", "pass", r"a built-in method has this name; it must be renamed"),
    "titled": (
        "broken",
        GOOD + "bayflower.register('broken', Server, Client, title='FedMAP')",
        r"method 'broken' has the title of method 'fedmap'; choose another title",
    ),
    "hookless": (
        "broken",
        GOOD + "from bayflower.contract import ServerHalf\nclass Half(ServerHalf): pass\n"
        "bayflower.register('broken', Half, Client)",
        r"the server half of method 'broken': hookless:Half lacks broadcast, expects, finalise, "
        r"init, statistic, state_type, broadcast_type; docs/contract.md",
    ),
    "no_half": (
        "broken",
        GOOD + "bayflower.register('broken', Client, Client)",
        r"the server half of method 'broken': must be a class that extends bayflower.contract.Serv",
    ),
    "no_default": (
        "broken",
        GOOD + "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Own:\n"
        "    rate: float\nbayflower.register('broken', Server, Client, Own)",
        r"no_default:Own needs a default for each of: rate",
    ),
}


@pytest.mark.parametrize("module", BROKEN)
def test_a_broken_package_says_why_and_harms_no_other(module, clean, tmp_path, monkeypatch, capsys):
    name, code, why = BROKEN[module]
    project = f'[project]\nname = "a-{module}"\nversion = "2.0"\n'
    project += f'[project.entry-points."{plugins.GROUP}"]\n{name} = "{module}"\n'
    distribution(tmp_path, {} if code is None else {f"{module}.py": code}, project)
    sys.path.append(str(tmp_path))
    importlib.invalidate_caches()
    assert methods.get("fedmap").outside is None
    assert parse("fedavg", {}).method == "fedavg"
    if name != "fedmap":
        with pytest.raises(ConfigError, match=why):
            methods.get(name)
    assert "personal MAP models" in said(monkeypatch, capsys, "methods")
    (line,) = methods.METHODS.problems()
    assert re.search(why, line)
    assert line.startswith(f"method {name!r} of package a-{module} 2.0 cannot be used: ")
    assert line.endswith(f"; repair it, or remove it with: pip uninstall a-{module}")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "My Method"}, "small letters, digits and hyphens"),
        ({"name": "fedmap"}, "has the name of a method of bayflower; choose another"),
        ({"title": "a b"}, "must be the name of a class"),
        ({"bibtex": "Hsu 2019"}, "bibtex of method 'mine' must begin with"),
        ({"server": "nowhere:Half"}, "'nowhere:Half' cannot be imported .ModuleNotFoundError"),
        ({"server": "bayflower.strategies.fedavg:Halb"}, "cannot be imported .KeyError: 'Halb'"),
    ],
)
def test_wrong_arguments_are_refused(given, why, clean):
    half = "bayflower.strategies.fedavg:Server"
    words = {"name": "mine", "server": half, "client": "bayflower.clients.fedavg:Client", **given}
    with pytest.raises(ConfigError, match=why):
        parse(bayflower.register(**words).name, {})


def test_a_setting_that_every_run_has_is_refused(clean):
    from dataclasses import make_dataclass

    server, client = "bayflower.strategies.fedavg:Server", "bayflower.clients.fedavg:Client"
    for name in ("lr", "out"):
        kind = make_dataclass("Own", [(name, float, 1.0)], frozen=True)
        bayflower.register("mine", server, client, kind)
        with pytest.raises(ConfigError, match=f"has a setting '{name}', which every run has"):
            parse("mine", {})
    assert set(APP_KEYS) <= set(TAKEN)


def test_looking_at_bayflower_imports_neither_torch_nor_flwr(tmp_path):
    """Nor do its names, and the list of methods of a package whose halves are named by texts."""
    code = (
        "import sys, bayflower\nbayflower.register('mine', 'a:Server', 'a:Client')\n"
        "from bayflower import methods\nassert 'mine' in list(methods.METHODS)\n"
        "assert not {'torch', 'flwr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# -- Flower's programs, and a real installation ----------------------------------------------------
def run_engines(env: dict[str, str], folder: Path, engines: tuple[str, ...]) -> None:
    """Run the method on each engine; raise unless all have the bits of the loop."""
    results = {}
    for engine in ("loop", *engines):
        words = [f"--set={key}={value}" for key, value in WORK.items()]
        words += ["--out", str(folder / engine)]
        done = subprocess.run(
            [sys.executable, "-m", "bayflower", "run", NAME, "--engine", engine, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        results[engine] = json.loads((folder / engine / "result.json").read_text())
    for engine in engines:
        assert results[engine]["final"] == results["loop"]["final"]


@pytest.mark.flower
@pytest.mark.parametrize("way", ["entry point", "variable"])
def test_ray_and_deployment_find_it_and_have_the_bits_of_the_loop(way, tmp_path):
    if way == "entry point":
        env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{example(tmp_path / 'site')}"}
    else:  # a module in the folder where the command is given
        (tmp_path / "fedavgm.py").write_text(files(EXAMPLE, outside=True)["fedavgm/fedavgm.py"])
        env = {"PYTHONPATH": str(ROOT), plugins.VARIABLE: NAME}
    run_engines(env, tmp_path, ("ray", "deployment"))


@pytest.mark.slow
def test_it_can_be_installed_and_tested_with_pip_and_pytest(tmp_path):
    """A package of the page's files, installed by pip; its test file runs as it stands."""
    (tmp_path / "package").mkdir()
    for path, text in files(EXAMPLE, outside=True).items():
        (tmp_path / "package" / path.split("/")[1]).write_text(text)
    site = tmp_path / "site"
    words = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, "-m", *words, str(site), str(tmp_path / "package")], check=True)
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "PATH": os.environ["PATH"]}
    (tmp_path / "tests").mkdir()
    text = files(EXAMPLE, outside=True)["fedavgm/test_fedavgm.py"]
    (tmp_path / "tests" / "test_fedavgm.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    run_engines(env, tmp_path, ())
