"""Published tables: what they say, and the runs that their cells name."""

from __future__ import annotations

import pytest

from bayflower.config import parse
from bayflower.errors import ConfigError
from bayflower.methods import METHODS
from bayflower.reproduce import find, load_tables
from bayflower.reproduce.cache import engine_values, key_of
from bayflower.reproduce.tables import PAPERS

ASKED = {
    "fedmap": ("1", "2", "3", "4", "figure-1"),
    "fednp": ("1", "2", "4", "5", "6", "figure-1", "figure-3", "figure-5"),
    "pfedvmp": ("1", "2", "3", "5", "6", "7", "figure-2", "figure-3", "figure-4"),
    "metavd": (
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "10",
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
        "17",
        "figure-2",
        "figure-3",
        "figure-4",
        "figure-5",
        "figure-drop",
    ),
    "fedbps": ("1", "2", "3", "figure-3"),
    "decide": ("metavd", "fedmap", "pfedvmp", "fedbps", "fednp"),
    "ours": (
        "fedmap-20x2",
        "fedmap-20x5",
        "fedmap-50x5",
        "fedmap-100x5",
        "fedmap-weights",
        "pfedvmp-methods",
        "pfedvmp-long",
        "pfedvmp-centroids",
        "pfedvmp-emnist47",
    ),
}
# copied by hand from the papers' numbers: (table, row, column, what is printed)
BY_HAND = [
    ("fedmap-1", "client 8", "FedMAP", "76.08"),
    ("fedmap-1", "Average", "Individual", "75.20"),
    ("fedmap-2", "Webcam", "FedProx", "40.22"),
    ("fedmap-3", "client 10", "FedAvg", "62.53"),
    ("fedmap-4", "client 7", "FedBN", "54.96"),
    ("fednp-1", "FedNP (ours)", "CIFAR-100", "65.03 ± 0.2"),
    ("fednp-1", "FedLA", "TinyImageNet", "50.23 ± 0.2"),
    ("fednp-4", "FedPA", "rate 0.01, 10 rounds", "97.85 ± 3.44"),
    ("fednp-5", "MOON", "100 clients", "52.88 ± 0.3"),
    ("fednp-6", "Quad-FedNP-10000", "time per update", "721"),
    ("pfedvmp-1", "pFedVMP", "Cifar100-20c Dir0.3", "56.75"),
    ("pfedvmp-1", "QLSD-FT", "EMNIST-50c Dir0.1", "91.56"),
    ("pfedvmp-2", "Dir(0.3)", "pFedVMP-avg", "76.97"),
    ("pfedvmp-3", "FedROD", "EMNIST-50c std", "3.21"),
    ("pfedvmp-5", "Test accuracy", "GPFL", "82.63"),
    ("pfedvmp-6", "Cifar100-20c-Dir0.3", "640", "57.19"),
    ("pfedvmp-7", "Cifar10-50c Dir(0.3)", "70", "80.25"),
    ("metavd-1", "Reptile+MetaVD (ours)", "C10 α̂=0.1 OOD", "82.07"),
    ("metavd-3", "MAML", "MCE %", "46.57"),
    ("metavd-8", "pFedGP", "α̂=0.1 Δ", "+4.99"),
    ("metavd-12", "PerFedAvg+MetaVD (ours)", "α̂=0.1 MCE", "3.63"),
    ("metavd-4", "FedAvg+FT", "s=0.1 OOD", "86.95"),
    ("metavd-5", "MAML+MetaVD (ours)", "(c) OOD", "85.02"),
    ("metavd-13", "Reptile", "α̂=0.5 Δ", "+0.01"),
    ("metavd-14", "PerFedAvg (HF-MAML)", "α̂=5.0 Δ", "-10.33"),
    ("metavd-15", "FedAvg", "α̂=0.1 OOD", "52.98"),
    ("metavd-17", "MAML+MetaVD+DP", "α̂=0.5 Spars.", "77.88"),
    ("fedbps-1", "FedAvg", "MNIST", "98.49"),
    ("fedbps-2", "p = 70 %", "FMNIST", "92.52"),
    ("fedbps-3", "p = 30 %", "ResNet56", "71.75"),
]


def test_a_file_says_once_what_is_usual(tmp_path):
    """A form under `usual` is that of every table but of one with its own."""
    lines = (PAPERS / "fedbps.toml").read_text().splitlines()
    usual = next(line for line in lines[lines.index("[usual]") :] if line.startswith("quick"))
    (tmp_path / "ours.toml").write_text(
        "\n".join("quick = { rounds = 7, seeds = 2 }" if line == usual else line for line in lines)
    )
    quick = {name: table.quick for name, table in load_tables(tmp_path).items()}
    assert quick.pop("fedbps-3") == find("fedbps-3").quick
    assert set(quick) == {"fedbps-1", "fedbps-2", "fedbps-figure-3"}
    assert all(form == {"rounds": 7, "seeds": 2} for form in quick.values())
    (tmp_path / "ours.toml").write_text("\n".join(line for line in lines if line != usual))
    with pytest.raises(ConfigError, match=r"ours\.toml is not a valid file of tables"):
        load_tables.__wrapped__(tmp_path)


def test_every_table_and_figure_that_is_asked_for_is_there():
    wanted = {f"{paper}-{name}" for paper, names in ASKED.items() for name in names}
    assert set(load_tables()) == wanted


@pytest.mark.parametrize(("table", "row", "column", "printed"), BY_HAND)
def test_published_numbers_are_the_papers(table, row, column, printed):
    (cell,) = [
        one for one in find(table).cells("full") if (one.row.name, one.column.name) == (row, column)
    ]
    assert cell.published == printed
    assert cell.mean == float(printed.split(" ")[0])


def test_no_cell_of_a_published_table_lacks_its_number():
    for table in load_tables().values():
        for cell in table.cells("full"):
            invented = (
                table.kind in ("figure", "ours")
                or cell.column.extra
                or "(not in the paper)" in cell.row.name
            )
            assert bool(cell.published) != invented, (table.id, cell.row.name, cell.column.name)


def test_rows_are_complete():
    rows = {
        name: len(find(name).rows)
        for name in ("pfedvmp-1", "metavd-1", "metavd-16", "fednp-1", "fedbps-2", "fedmap-3")
    }
    assert rows == {
        "pfedvmp-1": 15,
        "metavd-1": 12,
        "metavd-16": 10,
        "fednp-1": 9,
        "fedbps-2": 4,
        "fedmap-3": 11,
    }
    cells = [cell for table in load_tables().values() for cell in table.cells("full")]
    absent = {cell.row.name for cell in cells if cell.spec is None} - {"Test accuracy"}
    assert absent == set()


@pytest.mark.parametrize("form", ["quick", "full"])
def test_every_cell_can_be_parsed(form):
    for table in load_tables().values():
        for spec in {cell.spec for cell in table.cells(form) if cell.spec}:
            assert spec.method in METHODS
            if spec.runner == "engine":
                parse(spec.method, engine_values(spec, 0, "", "cpu"))


def test_every_setting_of_a_form_reaches_some_run():
    for table in load_tables().values():
        for form in ("quick", "full"):
            reached = {key for cell in table.cells(form) if cell.spec for key in cell.spec.values()}
            assert set(table.form(form)) - {"seeds"} <= reached, (table.id, form)


@pytest.mark.parametrize("form", ["full", "quick"])
def test_no_two_columns_show_the_same_number_of_the_same_run(form):
    for table in load_tables().values():
        shown = [
            (one.row, key_of(one.spec, 0), one.column.metric, one.column.at)
            for one in table.cells(form)
            if one.spec is not None
        ]
        assert len(shown) == len({repr(one) for one in shown}), table.id


def test_names_that_are_not_known_have_a_hint():
    assert find("FedMAP Table 1").id == "fedmap-1"
    with pytest.raises(ConfigError, match="did you mean"):
        find("pfedvmp-11")


def test_compare_has_every_column_that_decides_a_choice():
    import io

    from rich.console import Console

    from bayflower.report.text import comparison_table

    metrics = {
        "accuracy": 0.5,
        "balanced_accuracy_mean": 0.41,
        "worst_client_accuracy": 0.12,
        "nll": 1.234,
        "ece": 0.031,
        "ece_allclass": 0.0042,
        "fairness_cv": 0.077,
    }
    one = {
        "method": "pfedvmp-avg",
        "dataset": "digits",
        "num_clients": 3,
        "seed": 0,
        "final": {"personal": metrics},
        "rounds": [{"bytes_up": 123_400, "bytes_down": 234_500_000, "seconds": 1501.5}],
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table([one]))
    text = console.export_text()
    for shown in (
        "50.00",
        "41.00",
        "12.00",
        "1.234",
        "3.10",
        "0.42",
        "0.077",
        "123.4 kB",
        "234.5 MB",
        "1501.5",
        "pfedvmp-avg",
    ):
        assert shown in text, shown
