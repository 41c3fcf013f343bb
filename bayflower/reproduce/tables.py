"""Published tables as data. A file in `papers/` is one paper; a table is rows × columns of cells,
each a run and a number of it.

What a file says under `usual` holds for every table that does not say it itself. A cell's settings
are the table's, then its column's, its row's, and those of the form (`quick` or `full`) that its
method has. Its method is named by its row or column; where neither names one, the method does not
exist here and the cell says "not yet". In the form `full` a row takes the values that `bayflower
tune --table` chose for it, where `papers/tuned` has a file for the table. Where nothing is stated,
`pinned.toml` counts: defaults of earlier versions, with which the runs were made.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..methods import get

PAPERS = Path(__file__).parent / "papers"
PINNED = Path(__file__).parent / "pinned.toml"
FORMS = ("full", "quick")
OURS = "ours"  # the kind of a table that no paper has
# the folder of chosen values in that of the papers; the entry that is no row
TUNED, ABOUT = "tuned", "about"
PUBLISHED = re.compile(r"([-+]?\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?")
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """Which number of a run a cell shows: `key` of the final block `view`, times `scale`."""

    # a block of `final`; last: the last round's entry; run: of the run as a whole; toy: of the toy
    # problem
    view: str
    key: str
    unit: str
    scale: float = 1.0
    client: str = ""  # the key for a row that is one client
    better: str = "high"  # high or low
    absent: float | None = None  # the number of a run that has no such key
    compare: bool = True  # whether the paper's number is the same quantity
    digits: int = 2


@dataclass(frozen=True)
class TableLine:
    """A row or a column."""

    name: str
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    metric: str = ""
    client: int | None = None  # a row that is one client
    at: float | None = None  # a column that is a point of the curve, as a share of the rounds
    extra: bool = False  # a column that the paper does not have
    missing: str = ""  # why a method cannot be run here, beyond "not yet"
    # of a row: values chosen by `bayflower tune --table`, for the form full
    tuned: dict[str, Any] = field(default_factory=dict)
    published: tuple[str, ...] = ()  # of a row: what the paper prints, "" where it has nothing


@dataclass(frozen=True)
class Claim:
    """A claim that a table decides: the row `row` is better than the row `against`."""

    text: str
    row: str
    against: str
    columns: tuple[str, ...] = ()  # () = all


@dataclass(frozen=True)
class Spec:
    """What one run is: a runner, a method, and the stated settings without the seed."""

    runner: str  # engine or toy
    method: str
    settings: tuple[tuple[str, Any], ...]

    def values(self) -> dict[str, Any]:
        """Return the settings by name, with those that are pinned for the method."""
        start = pinned(self.method) if self.runner == "engine" else {}
        return {**start, **dict(self.settings)}


@dataclass(frozen=True)
class Cell:
    """One cell: where it is, what is printed there, and which run gives ours; without a run the
    method does not exist here.
    """

    row: TableLine
    column: TableLine
    metric: Metric
    published: str
    spec: Spec | None

    @property
    def mean(self) -> float | None:
        """Return the published number."""
        found = PUBLISHED.fullmatch(self.published)
        return float(found[1]) if found else None


@dataclass(frozen=True)
class Table:
    """A published table or figure, or a sweep of our own."""

    id: str
    title: str
    caption: str
    source: str
    metrics: dict[str, Metric]
    metric: str
    columns: tuple[TableLine, ...]
    rows: tuple[TableLine, ...]
    quick: dict[str, Any]
    full: dict[str, Any]
    paper: dict[str, Any]
    settings: dict[str, Any]
    kind: str = "table"  # table, figure or ours
    runner: str = "engine"
    data: str = ""
    errata: str = ""
    tuned_by: str = ""  # the table whose search chose the values of rows, if it is another
    tuning: str = ""  # how the rows' values were chosen
    picture: str = ""  # a file of the repository that draws what the numbers cannot
    claims: tuple[Claim, ...] = ()  # what its rows decide, for `verdict`

    def form(self, name: str) -> dict[str, Any]:
        """Return the settings of a form, and its `seeds`."""
        if name not in FORMS:
            raise ConfigError(f"form must be one of {', '.join(FORMS)}, got {name!r}")
        return self.quick if name == "quick" else self.full

    def cells(
        self,
        form: str,
        changes: Settings | None = None,
        tuned: Mapping[str, Settings] | None = None,
    ) -> Iterator[Cell]:
        """Yield every cell in reading order; `changes` come last,
        `tuned` holds settings by method.
        """
        for row in self.rows:
            for column, published in zip(self.columns, row.published, strict=True):
                method = row.method or column.method
                metric = self.metrics[row.metric or column.metric or self.metric]
                if row.client is not None:
                    metric = dataclasses.replace(metric, key=metric.client)
                spec = (
                    self._spec(
                        method, row, column, form, changes or {}, (tuned or {}).get(method, {})
                    )
                    if method
                    else None
                )
                yield Cell(row, column, metric, published, spec)

    def _spec(
        self,
        method: str,
        row: TableLine,
        column: TableLine,
        form: str,
        changes: Settings,
        tuned: Settings,
    ) -> Spec:
        chosen = row.tuned if form == "full" else {}
        stated = {**self.settings, **column.settings, **row.settings, **chosen, **tuned}
        fits = settings_of(method) if self.runner == "engine" else {"rounds"}
        for key, value in {**self.form(form), **changes}.items():
            if key in fits:
                stated[key] = value
        return Spec(self.runner, method, tuple(sorted(stated.items())))


@cache
def settings_of(method: str) -> frozenset[str]:
    """Return the names of a method's settings, and `images`, which stands for `keep`."""
    from ..config import groups

    return frozenset(
        {
            "images",
            *(item.name for kind in groups(method).values() for item in dataclasses.fields(kind)),
        }
    )


@cache
def all_pinned() -> dict[str, dict[str, Any]]:
    """Return what `pinned.toml` says, by method."""
    return tomllib.loads(PINNED.read_text())


def pinned(method: str) -> dict[str, Any]:
    """Return the values that tables use for a method where they state none, defaults of earlier
    versions: those of its halves less what its row of the table of methods sets, and its own.
    """
    row, everything = get(method), all_pinned()
    values = everything.get(row.stem, {})
    halves = {name: value for name, value in values.items() if name not in row.defaults}
    return {**halves, **everything.get(method, {})}


@cache
def load_tables(folder: Path = PAPERS) -> dict[str, Table]:
    """Return every table by its id, in the order of the files."""
    found: dict[str, Table] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            content = tomllib.loads(path.read_text())
            metrics = {name: Metric(**values) for name, values in content["metrics"].items()}
            for own in content["table"]:
                values = {**content.get("usual", {}), **own}
                table = make_table(
                    values,
                    metrics,
                    content["source"],
                    folder / TUNED / f"{values.get('tuned_by') or values['id']}.toml",
                )
                if table.id in found:
                    raise ValueError(f"two tables are called {table.id}")
                found[table.id] = table
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a valid file of tables ({error}); docs/evidence.md describes them"
            ) from None
    return found


def make_table(
    values: dict[str, Any], metrics: dict[str, Metric], source: str, tuned: Path
) -> Table:
    """Return a table from its section of a file and the values in the file `tuned`, if there is
    one, checked.
    """
    content = tomllib.loads(tuned.read_text()) if tuned.exists() else {}
    chosen = {name: entry["values"] for name, entry in content.items() if name != ABOUT}
    if (
        strange := set()
        if values.get("tuned_by")
        else set(chosen) - {row["name"] for row in values["rows"]}
    ):
        raise ValueError(
            f"{tuned} has values for {sorted(strange)[0]!r}, which is no row of {values['id']}"
        )
    # our own tables have no published numbers
    blank = {"published": [""] * len(values["columns"])} if values.get("kind") == OURS else {}
    rows = tuple(
        TableLine(
            **{
                **row,
                "published": tuple({**blank, **row}["published"]),
                "tuned": chosen.get(row["name"], {}),
            }
        )
        for row in values["rows"]
    )
    values = {"tuning": content.get(ABOUT, {}).get("words", ""), **values}
    columns = tuple(TableLine(**column) for column in values["columns"])
    claims = tuple(
        Claim(**{**claim, "columns": tuple(claim.get("columns", ()))})
        for claim in values.get("claims", ())
    )
    table = Table(
        **{
            "settings": {},
            **values,
            "rows": rows,
            "columns": columns,
            "claims": claims,
            "metrics": metrics,
            "source": source,
        }
    )
    for row in rows:
        if len(row.published) != len(columns):
            raise ValueError(
                f"{table.id}, {row.name}: {len(row.published)} numbers for {len(columns)} columns"
            )
        for text in row.published:
            if text and not PUBLISHED.fullmatch(text):
                raise ValueError(f"{table.id}, {row.name}: {text!r} is not a number")
    names = [{line.name for line in lines} for lines in (rows, columns)]
    for claim in claims:
        if strange := {claim.row, claim.against} - names[0] or set(claim.columns) - names[1]:
            raise ValueError(f"{table.id} has a claim on {sorted(strange)[0]!r}, which it lacks")
    if "seeds" not in table.quick or "seeds" not in table.full:
        raise ValueError(f"{table.id} does not say how many seeds quick and full have")
    return table


def find(name: str) -> Table:
    """Return the table called `name`; "pfedvmp table 2" and "pfedvmp-2" are the same."""
    tables = load_tables()
    plain = (
        re.sub(r"[ _]+", "-", name.strip().lower())
        .replace("-table-", "-")
        .replace("-fig-", "-figure-")
    )
    if plain not in tables:
        close = difflib.get_close_matches(plain, tables, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else "`bayflower reproduce --list` shows all"
        )
        raise ConfigError(f"table {name!r} is not known; {hint}")
    return tables[plain]
