"""What a comparison says, in numbers and in words: which method is best here, by how much and how
surely, who gains and who loses. The terminal, programs (`--json`) and the report use the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import methods
from ..errors import ConfigError
from .collect import Group, same_data
from .paired import Difference, Site, holm, paired, seeds_for

SURE = 0.05  # p-values below this, adjusted for the number of comparisons, are beyond noise
POINT = 0.01  # the difference for which the number of seeds is named
NAMED = 6  # clients that a sentence names


class Metric(NamedTuple):
    """A number of each client: its words, the factor for people, and whether more is better."""

    words: str
    unit: str
    factor: float
    digits: int
    sign: int


METRICS = {
    "accuracy": Metric("accuracy", "points", 100, 1, 1),
    "balanced_accuracy": Metric("balanced accuracy", "points", 100, 1, 1),
    "nll": Metric("−log p", "nats", 1, 3, -1),
    "ece": Metric("calibration error", "points", 100, 1, -1),
    "auroc": Metric("AUROC", "points", 100, 1, 1),
    "sensitivity": Metric("sensitivity", "points", 100, 1, 1),
    "specificity": Metric("specificity", "points", 100, 1, 1),
    "rmse": Metric("RMSE", "units of the target", 1, 3, -1),
    "mae": Metric("MAE", "units of the target", 1, 3, -1),
    "crps": Metric("CRPS", "units of the target", 1, 3, -1),
    "deviance": Metric("deviance", "nats", 1, 3, -1),
    "c_index": Metric("C-index", "C-index", 1, 3, 1),
    "c_index_uno": Metric("Uno's C-index", "C-index", 1, 3, 1),
    "integrated_brier": Metric("integrated Brier score", "Brier score", 1, 3, -1),
    "macro_auroc": Metric("macro AUROC", "points", 100, 1, 1),
    "macro_auprc": Metric("macro AUPRC", "points", 100, 1, 1),
    "micro_auroc": Metric("micro AUROC", "points", 100, 1, 1),
    "micro_auprc": Metric("micro AUPRC", "points", 100, 1, 1),
}
# the first that runs have is what they are compared by
LEADING = ("accuracy", "rmse", "c_index", "macro_auroc", "nll")


class Compared(NamedTuple):
    """One method less another, on the same clients with the same seeds."""

    title: str
    base: str
    difference: Difference
    p: float | None  # adjusted for the number of comparisons (Holm)
    beyond: bool  # whether the difference is beyond noise

    def better(self, sign: int) -> bool:
        """Return whether the method is better beyond noise."""
        return self.beyond and sign * self.difference.mean > 0


class Verdict(NamedTuple):
    """What the runs of some methods on the same data say."""

    dataset: str
    metric: str
    means: dict[str, float]  # mean over seeds of the mean over clients, by method, best first
    spreads: dict[str, float | None]  # standard deviation over seeds
    seeds: dict[str, int]
    names: dict[str, str]  # of the clients by identity
    lasting: bool  # whether the clients are sites, the same ones in every seed
    alone: str | None  # the method that shares nothing, if it was run
    against: tuple[Compared, ...]  # every other method less that one
    rivals: tuple[Compared, ...]  # the best method less every other
    words: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((f"{self.metric} on {self.dataset}:", *self.words))

    def as_json(self) -> dict[str, Any]:
        """Return the verdict in JSON types."""

        def row(one: Compared) -> dict[str, Any]:
            found = one.difference
            return {
                "method": one.title,
                "minus": one.base,
                **{key: value for key, value in found._asdict().items() if key != "sites"},
                "p_holm": one.p,
                "beyond_noise": one.beyond,
                "seeds_for_one_point": seeds_for(found, POINT),
                "seeds_for_one_point_these_clients": seeds_for(found, POINT, beyond=False),
                "clients_of": [
                    {**site._asdict(), "name": self.names[site.id]} for site in found.sites
                ],
            }

        return {
            "dataset": self.dataset,
            "metric": self.metric,
            "means": self.means,
            "standard_deviations": self.spreads,
            "seeds": self.seeds,
            "against_local_training": [row(one) for one in self.against],
            "best_against_others": [row(one) for one in self.rivals],
            "words": list(self.words),
        }


def leading(groups: Sequence[Group], metric: str = "auto") -> str:
    """Return the metric by which runs are compared: auto is accuracy, or RMSE of numbers."""
    if metric != "auto":
        return metric
    block = groups[0].first["final"]["personal"]
    return next((one for one in (*LEADING, *METRICS) if one in block), "accuracy")


def verdicts(
    groups: Sequence[Group], metric: str = "auto", view: str = "personal"
) -> list[Verdict]:
    """Return a verdict for each set of groups that share their data; `view` says which models on
    which clients: a block of result.json's "final".
    """
    if metric not in ("auto", *METRICS):
        raise ConfigError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    sets: list[list[Group]] = []
    for one in groups:
        home = next((some for some in sets if same_data(some[0], one)), None)
        if home is None:
            sets.append([one])
        else:
            home.append(one)
    return [verdict(some, metric, view) for some in sets]


def verdict(groups: Sequence[Group], metric: str = "auto", view: str = "personal") -> Verdict:
    """Return what groups on the same data say."""
    metric = leading(groups, metric)
    sign = METRICS[metric].sign
    numbers = {group.title: group.by_client(metric, view) for group in groups}
    numbers = {title: values for title, values in numbers.items() if values}
    means = {title: seed_means(values) for title, values in numbers.items()}
    order = sorted(means, key=lambda title: -sign * statistics.fmean(means[title]))
    lonely = {group.title for group in groups if shares_nothing(group)}
    alone = next((title for title in order if title in lonely), None)  # the best of them
    others = [title for title in order if title not in lonely]
    against = compared([(title, alone) for title in others], numbers) if alone else ()
    rivals = compared([(order[0], title) for title in order[1:]], numbers) if order else ()
    every = [one for group in groups for run in group.runs for one in run.clients.values()]
    found = Verdict(
        str(groups[0].first["dataset"]),
        metric,
        {title: statistics.fmean(means[title]) for title in order},
        {t: statistics.stdev(means[t]) if len(means[t]) > 1 else None for t in order},
        {title: len(means[title]) for title in order},
        {client: name for group in groups for client, name in group.named.items()},
        bool(every) and all(one.lasting for one in every),
        alone,
        against,
        rivals,
        (),
    )
    return found._replace(words=tuple(words(found)))


def shares_nothing(group: Group) -> bool:
    """Return whether a group is local training."""
    row = methods.METHODS.get(group.method)
    return row is not None and bool(row.server.shares_nothing)


def seed_means(values: dict[tuple[int, str], float]) -> list[float]:
    """Return the mean over clients of each seed."""
    seeds = sorted({seed for seed, _ in values})
    return [statistics.fmean(v for (s, _), v in values.items() if s == seed) for seed in seeds]


def compared(
    pairs: Sequence[tuple[str, str]], numbers: dict[str, dict[tuple[int, str], float]]
) -> tuple[Compared, ...]:
    """Return the differences of some pairs; p-values are adjusted for the number of pairs."""
    found = []
    for one, other in pairs:
        mine, theirs = numbers[one], numbers[other]
        both = {key: mine[key] - theirs[key] for key in mine if key in theirs}
        if both:
            found.append((one, other, paired(both)))
    adjusted = holm([difference.p for _, _, difference in found])
    return tuple(
        Compared(*some, p, p is not None and p < SURE)
        for some, p in zip(found, adjusted, strict=True)
    )


# -- words ---------------------------------------------------------------------------------------
def words(found: Verdict) -> list[str]:
    """Return the verdict in sentences."""
    if not found.means:
        return ["No client was tested, so there is nothing to compare."]
    lines = [*headline(found), best(found), *over_alone(found)]
    return [*lines, *what_intervals_are(found), *more_seeds(found)]


def headline(found: Verdict) -> list[str]:
    """Return whether any method beats local training."""
    if found.alone is None:
        return ["Local training was not run: what sharing brings is not known (add local)."]
    wins = [one.title for one in found.against if one.better(METRICS[found.metric].sign)]
    if not found.against:
        return []
    seed = " on this seed" if all(one.difference.seeds == 1 for one in found.against) else ""
    if not wins:
        return [f"No method beats local training beyond noise{seed}."]
    verb = "beats" if len(wins) == 1 else "beat"
    return [f"{listed(wins)} {verb} local training beyond noise{seed}."]


def best(found: Verdict) -> str:
    """Return which method has the best mean, and from which others it is told apart."""
    metric, title = METRICS[found.metric], next(iter(found.means))
    text = f"Best here: {title}, {metric.words} {shown(found, found.means[title])}"
    text += "" if found.spreads[title] is None else f" ± {shown(found, found.spreads[title])}"
    text += " (mean over clients)"
    if not found.rivals:
        return text + "."
    clear = [one.base for one in found.rivals if one.better(metric.sign)]
    close = [one.base for one in found.rivals if not one.better(metric.sign)]
    if not close:
        return text + f", ahead of {listed(clear)} beyond noise."
    if not clear:
        return text + f", but not told apart from {listed(close)}."
    return text + f", ahead of {listed(clear)} beyond noise, not told apart from {listed(close)}."


def over_alone(found: Verdict) -> list[str]:
    """Return how the methods do against local training, and who gains and loses."""
    if not found.against:
        return []
    lines = [f"{one.title} − {one.base}: {told(found, one)}." for one in found.against]
    sign = METRICS[found.metric].sign
    return [*lines, who(found, max(found.against, key=lambda one: sign * one.difference.mean))]


def told(found: Verdict, one: Compared) -> str:
    """Return a difference with its interval and test."""
    metric, d = METRICS[found.metric], one.difference
    text = f"{signed(found, d.mean)} {metric.unit}"
    if d.low is None or d.high is None:
        return text + " (one client, one seed: no interval)"
    text += f" (95 % interval {signed(found, d.low)} to {signed(found, d.high)}"
    text += "" if one.p is None else f", p {probability(one.p)}"
    good, bad = (d.better, d.worse) if metric.sign > 0 else (d.worse, d.better)
    state = "better" if one.better(metric.sign) else "worse" if one.beyond else "within noise"
    text += f"): {state}; better at {good}, worse at {bad} of {d.clients} clients"
    return text if d.sign_p is None else f"{text} (sign test p {probability(d.sign_p)})"


def who(found: Verdict, one: Compared) -> str:
    """Return which sites gain and which lose by the best shared method, or how many clients."""
    gain, lose = sides(found, one)
    if not found.lasting:
        return (
            f"With {one.title} {len(gain)} of {one.difference.clients} clients gain over local "
            f"training and {len(lose)} {'loses' if len(lose) == 1 else 'lose'}; drawn clients have "
            "no names."
        )
    return f"With {one.title} gain: {by_name(found, gain)}; lose: {by_name(found, lose)}."


def sides(found: Verdict, one: Compared) -> tuple[list[Site], list[Site]]:
    """Return the clients that gain and those that lose, the most first."""
    sign, sites = METRICS[found.metric].sign, one.difference.sites
    gain = [site for site in sites if sign * site.mean > 0]
    lose = [site for site in reversed(sites) if sign * site.mean < 0]
    return (gain, lose) if sign > 0 else (gain[::-1], lose[::-1])


def by_name(found: Verdict, those: Sequence[Site]) -> str:
    """Return clients by name with their differences; beyond NAMED their number."""
    named = [f"{found.names[s.id]} {signed(found, s.mean)}{mark(s)}" for s in those[:NAMED]]
    rest = len(those) - NAMED
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "") or "nobody"


def mark(site: Site) -> str:
    """Return a mark for a site whose own interval over seeds does not contain 0."""
    clear = site.low is not None and site.high is not None and (site.low > 0 or site.high < 0)
    return " (sure)" if clear else ""


def what_intervals_are(found: Verdict) -> list[str]:
    """Return what the intervals are over, and what they cannot show; a line each kind."""
    kinds = dict.fromkeys(of_kind(one.difference) for one in (*found.against, *found.rivals))
    many = ["p is Holm's, adjusted for the number of comparisons."] if len(found.means) > 2 else []
    return [*kinds, *many] if kinds else []


def of_kind(d: Difference) -> str:
    """Return what the interval of a difference is over."""
    if d.over == "clients":
        return (
            f"One seed: intervals are over its {d.clients} clients alone. They do not show what "
            f"another seed would change; run --seeds 3 or more."
        )
    if d.over == "nothing":
        return "One client and one seed: chance cannot be told from a difference; run more seeds."
    if d.over == "seeds":
        return f"Intervals are over {d.seeds} seeds, for this one client."
    if d.parts is None:
        return (
            f"Intervals are over {d.seeds} seeds, each with clients of its own ({d.clients} in "
            f"all): what other seeds and their clients would give."
        )
    return (
        f"Intervals are over {d.seeds} seeds × {d.clients} sites: what other seeds and other sites "
        "like these would give."
    )


def more_seeds(found: Verdict) -> list[str]:
    """Return how many seeds the leading method would need to show a difference of one point."""
    lead = next(iter(found.against or found.rivals), None)
    if lead is None or lead.difference.sd_seeds is None or METRICS[found.metric].factor != 100:
        return []
    d, pair = lead.difference, f"{lead.title} − {lead.base}"
    these, beyond = seeds_for(d, POINT, beyond=False), seeds_for(d, POINT)
    if these is None:
        return [f"{pair}: a difference of 1 point would take more than 1000 seeds."]
    text = f"{pair}: a difference of 1 point takes about {these} seeds (80 % power); "
    text += f"{d.seeds} were run."
    if d.parts is not None:
        more = "more sites" if beyond is None else f"about {beyond} seeds"
        text += f" To show it for other sites like these takes {more}."
    return [text]


def shown(found: Verdict, value: float | None) -> str:
    """Return a number in the metric's units."""
    metric = METRICS[found.metric]
    text = "–" if value is None else f"{metric.factor * value:.{metric.digits}f}"
    return f"{text} %" if metric.factor == 100 else text


def signed(found: Verdict, value: float) -> str:
    """Return a difference with its sign."""
    metric = METRICS[found.metric]
    return f"{metric.factor * value:+.{metric.digits}f}".replace("-", "−")


def probability(p: float) -> str:
    """Return a p-value as text."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def listed(titles: Sequence[str]) -> str:
    """Return titles as text."""
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"
