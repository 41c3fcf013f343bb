"""The HTML report: made of real runs, looked at with a real browser."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest
from conftest import SMALL
from rich.console import Console
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.config import parse
from bayflower.engines import prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.report import write_report
from bayflower.report.collect import group, read
from bayflower.report.svg import Chart, around, label, ticks
from bayflower.report.text import comparison_table, result_table, who_uses

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
METHODS = ("fedmap", "local", "pfedvmp", "fedbps", "fednp", "metavd")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of two methods, one of four more, with checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in (0, 1) if method in ("fedmap", "local") else (0,):
            given = {
                **SMALL,
                "dataset": "digits",
                "partition": "dirichlet",
                "num_clients": 4,
                "new_clients": 1,
                "rounds": 2,
                "evaluate_every": 1,
                "checkpoint_every": 1,
                "seed": seed,
                "keep": 0.15,
                "lr": 0.05,
            }
            run_to_result(prepare(parse(method, given), "fused"), folder / f"{method}-{seed}")
    return folder


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    assert write_report([runs], file) == 8
    return file


def test_a_line_names_no_clients_that_are_not_there():
    assert who_uses(9, 9) == "a posterior is used by all 9 clients"
    assert "withheld from the others because" in who_uses(4, 9)
    assert "0 of 9 clients, withheld from all because" in who_uses(0, 9)


def test_seeds_become_one_line(runs):
    groups = {one.title: one for one in group(read([runs]))}
    assert {title: len(one.runs) for title, one in groups.items()}["FedMAP"] == 2
    assert len(groups) == len(METHODS)
    points = groups["FedMAP"].curve(lambda record: record["train_loss"])
    losses = [
        json.loads((runs / f"fedmap-{seed}" / "result.json").read_text())["rounds"][0]["train_loss"]
        for seed in (0, 1)
    ]
    assert points[0] == (1, pytest.approx(sum(losses) / 2), min(losses), max(losses))


def test_every_figure_is_there_and_shows_something(html):
    text = html.read_text()
    headings = re.findall(r"<figure[^>]*><h4>(.*?)</h4>", text)
    for wanted in (
        "Accuracy over rounds",
        "Training loss over rounds",
        "Accuracy of each client",
        "Gain over local training: FedMAP",
        "Fairness: the spread over clients",
        "Reliability, top label: FedMAP",
        "Reliability, all classes: pFedVMP",
        "Clients that made the prior",
        "What is personal: FedBPS",
        "Dropout rates of each client: MetaVD",
        "Belief about the latent",
        "The latent belief at the end: FedNP",
        "Features as the network began: pFedVMP",
        "Features of the personal models: pFedVMP",
        "Bytes of a round",
        "Seconds of a round",
    ):
        assert wanted in headings, wanted
    assert any(heading.startswith("The partition: digits, dirichlet") for heading in headings)
    marks = [int(number) for number in re.findall(r'data-marks="(\d+)"', text)]
    assert len(marks) == len(headings)
    assert min(marks) > 0
    assert '<circle class="bubble' in text


def test_the_page_needs_nothing_else(html):
    text = html.read_text()
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_table_has_the_numbers_of_the_runs(runs, html):
    accuracy = [
        json.loads((runs / f"fedmap-{seed}" / "result.json").read_text())["final"]["personal"][
            "accuracy"
        ]
        for seed in (0, 1)
    ]
    row = re.search(
        r"<tr><td[^>]*>FedMAP</td><td[^>]*>[^<]*</td><td[^>]*>(.*?)</td>",
        html.read_text().partition("<h4>Personal models")[2],
    )
    assert row
    assert row[1].startswith(f"{50 * sum(accuracy):.1f} ± ")


def test_the_same_runs_give_the_same_page(runs, html, tmp_path):
    again = tmp_path / "again.html"
    write_report([runs], again)
    assert again.read_text() == html.read_text()


def test_states_that_are_not_there_are_a_line_not_an_error(runs, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(runs / "metavd-0" / "result.json", bare)
    result = json.loads((bare / "result.json").read_text())
    result["config"]["dataset"] = result["dataset"] = "elsewhere.npz"
    (bare / "result.json").write_text(json.dumps(result))
    write_report([bare], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "features and states are not shown" in text
    assert "Which classes they have is not known here" in text


def test_bad_input_is_one_line(runs, tmp_path):
    for folder, words in ((tmp_path / "none", "does not exist"), (tmp_path, "has no result.json")):
        with pytest.raises(ConfigError, match=words):
            write_report([folder], tmp_path / "r.html")
    broken = tmp_path / "broken"
    broken.mkdir()
    for text, words in (
        ('{"method": "fed', "cannot be read as JSON"),
        ("[]", "it is not an object"),
        ('{"method": "fedmap"}', "it lacks 'dataset'"),
    ):
        (broken / "result.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            write_report([broken], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="does not exist"):
        write_report([runs], tmp_path / "nowhere" / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_the_command(runs, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            "report",
            str(runs / "fedmap-0"),
            "--html",
            str(tmp_path / "r.html"),
            "--features",
            "none",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "1 run" in done.output
    assert "<h4>Features" not in (tmp_path / "r.html").read_text()


LOOK = """
const near = 1.5, box = s => s.getBoundingClientRect(), text = s => s.textContent.slice(0, 60);
const all = [...d.querySelectorAll("figure svg[data-marks]")];
const over = [...d.querySelectorAll("table")].filter(
  t => box(t).right > box(t.parentElement).right + near || t.scrollWidth > t.clientWidth + near);
const cut = [...d.querySelectorAll("td, th, dd, dt, li, p, h4, figcaption")].filter(
  t => t.scrollWidth > t.clientWidth + near && getComputedStyle(t).display != "inline");
const outside = all.flatMap(s => [...s.querySelectorAll("text")].filter(t =>
  box(t).left < box(s).left - near || box(t).right > box(s).right + near ||
  box(t).top < box(s).top - near || box(t).bottom > box(s).bottom + near));
const ticks = all.flatMap(s => {
  const some = [...s.querySelectorAll("text.tick[text-anchor=middle], text.name")].map(box);
  return some.flatMap((a, i) => some.slice(i + 1).filter(b => a.left < b.right - near &&
    b.left < a.right - near && a.top < b.bottom - 4 && b.top < a.bottom - 4)); });
const seen = {figures: all.length,
  drawn: all.filter(s => box(s).width > 100 && box(s).height > 40).length,
  wide: d.documentElement.scrollWidth, tables: over.map(text), cut: cut.map(text),
  labels: outside.map(text), touching: ticks.length,
  ink: getComputedStyle(d.querySelector("svg .mark.s0, svg .bar.s0")).fill};
"""


def looked_at(html, folder, width: int) -> dict:
    """Return what a real browser sees of a page in a window of this width."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(f"""<body><iframe id="f" src="{html.as_uri()}"
    style="width:{width}px;height:900px;border:0"></iframe><script>
    document.getElementById("f").onload = function () {{
      const d = this.contentDocument;
      {LOOK}
      document.body.innerText = JSON.stringify(seen);
    }};</script></body>""")
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(re.search(r"\{.*\}", done.stdout)[0]))


@pytest.fixture(scope="module")
def hard(runs, tmp_path_factory):
    """A page that is hard to lay out: two classes, sites and settings with long names, four groups
    of one method, a single client, several data sets.
    """
    folder = tmp_path_factory.mktemp("hard")
    rng = np.random.default_rng(0)
    y = np.arange(160) % 2
    x = rng.normal(size=(160, 4)) + y[:, None]
    np.savez(folder / "wards.npz", x=x, y=y, client=np.arange(160) // 40)
    given = {**SMALL, "dataset": str(folder / "wards.npz"), "partition": "natural", "rounds": 1}
    given |= {"num_clients": 4, "new_clients": 0, "keep": 1.0, "calibration": "shrunk"}
    for method, more in (("fedmap", {}), ("local", {}), ("local", {"num_clients": 1})):
        name = folder / f"{method}-{len(more)}"
        run_to_result(prepare(parse(method, {**given, **more}), "fused"), name)
        result = json.loads((name / "result.json").read_text())
        for one in result["clients"]:
            one["name"] = f"University Hospital of Internal Medicine number {one['client']}, Basel"
        result["classes"] = ["no readmission within thirty days", "readmission"]
        (name / "result.json").write_text(json.dumps(result))
        for seed in (1, 2) if method == "fedmap" else ():
            result["seed"] = result["config"]["seed"] = seed
            write(folder / f"seed-{seed}", result)
    for place in range(3):
        changed = copy.deepcopy(result)
        changed["method"] = changed["config"]["method"] = "fedmap"
        changed["config"] |= {"lr": 0.1 / (place + 1), "batch_size": 8 * place + 8, "rounds": 1}
        changed["config"] |= {"momentum": 0.1 * place, "weight_decay": 0.0001 * place}
        write(folder / f"other-{place}", changed)
    shutil.copytree(runs / "local-0", folder / "digits")
    file = tmp_path_factory.mktemp("page") / "hard.html"
    write_report([folder], file)
    return file


def write(folder, result) -> None:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine; apt-get install chromium"
)
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", [pytest.param("html", marks=pytest.mark.slow), "hard"])
def test_a_real_browser_shows_it(which, request, tmp_path, width):
    """Every figure is drawn with a size, no table is wider than its place, no label is cut or lies
    on another, nothing sticks out at the side, and the console is silent.
    """
    html = request.getfixturevalue(which)
    seen = looked_at(html, tmp_path, width)
    assert seen["figures"] == len(re.findall(r"data-marks=", html.read_text()))
    assert seen["drawn"] == seen["figures"]
    assert seen["wide"] <= width
    assert seen["ink"] == "rgb(0, 114, 178)"
    assert (seen["tables"], seen["cut"], seen["labels"], seen["touching"]) == ([], [], [], 0)


def test_a_clients_text_is_no_markup(runs):
    """A data set's name may come from a client: it is shown as it is, and closes no tag."""
    result = json.loads(next(runs.rglob("result.json")).read_text())
    text = "[/b] [link=https://evil.example]click[/link]"
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(result_table({**result, "dataset": text}))
    assert text in console.export_text()


def test_charts():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.912, 0.934) == pytest.approx([0.915, 0.92, 0.925, 0.93])
    assert [label(value) for value in (0, 0.5, 12345, -2.5, 1e-7)] == [
        "0",
        "0.5",
        "1.2e4",
        "−2.5",
        "1.0e−7",
    ]
    assert around([3.0, 3.0], most=3.1) == (pytest.approx(2.82), 3.1)
    for span in ((4.0, 4.0), (3.999, 3.999 + 4e-16), (3.9991, 3.9993), (-1.2345, -1.2344), (0, 0)):
        flat = Chart("flat", (0, 1), span)
        marks = [label(value) for value in ticks(*flat.y_range)]
        assert len(set(marks)) == len(marks) > 1
        assert all(flat.top <= flat.y(value) <= flat.bottom for value in ticks(*flat.y_range))
        assert flat.y_range[0] <= span[0] <= span[1] <= flat.y_range[1]
    chart = Chart("a <name>", (0, 10), (0, 1), x_title="x & y")
    chart.axes().line([(0, 0.0), (10, 1.0)], 0, "title")
    text = chart.svg()
    assert "a &lt;name&gt;" in text
    assert "x &amp; y" in text
    assert (chart.x(0), chart.x(10), chart.y(0) > chart.y(1)) == (chart.left, chart.right, True)


def test_a_comparison_of_large_numbers_fits_eighty_columns():
    block = dict.fromkeys(("rmse", "mae", "crps", "width_90"), 123456.78)
    block |= {"nll": 9.3456, "coverage_50": 0.5, "coverage_90": 1.0}
    rounds = [{"bytes_up": 987.6e3, "bytes_down": 987.6e3, "seconds": 999.9}]
    result = {"dataset": "cost", "num_clients": 7, "rounds": rounds, "seed": 0, "method": "fedmap"}
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_table([result | {"final": {"personal": block}}]))
    said = console.file.getvalue()
    assert all(text in said for text in ("123457", "987.6 kB", "in 90 %"))
    assert "…" not in said
