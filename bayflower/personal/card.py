"""The part of a personal model's card about its uncertainty: what is used and why, what sets
promise, how every form did on test samples, and thresholds. It contains no samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import metrics
from ..calibration import conformal, trust
from ..rounds.calibrated import TEST, Taken, forms
from ..rounds.deciding import ALARMS
from ..rounds.uncertain import affine

ERRORS = 5  # held-out errors, and right predictions, from which measures of doubt are compared
NOT_CALIBRATED = (
    "Its uncertainty was not calibrated: no samples were held out (calibration=off). "
    "Probabilities are those of the network itself."
)
NOT_REACHED = (
    "Its uncertainty was not calibrated: the client missed a request to calibrate after the last "
    "round. Probabilities are those of the network itself."
)
OLD = (
    "The model was written by an earlier version. Its diagonal posterior made predictions worse "
    "and is no longer used; export it again for calibrated uncertainty."
)


def point_only(why: str) -> dict[str, Any]:
    """Return the block of a model without calibrated uncertainty."""
    return {
        "used": "point",
        "why": why,
        "posterior": None,
        "calibration": None,
        "held_out": None,
        "sets": None,
        "doubt": "One minus the largest probability.",
        "tests": None,
        "alarms": {},
        "information": {"offered": False, "why": "There is no posterior in use."},
        "abstention": None,
    }


def block(
    client: int,
    taken: Taken,
    held: dict[str, Tensor] | None,
    y: Tensor,
    names: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the block "uncertainty" of a card. `held` is what the model says of the held-out
    samples with labels y, None if there are none; `names` are those of the classes, if known.
    """
    chosen, one = taken.one.chosen, taken.one
    information = compared(taken, held, y)
    kind, origin = taken.kinds.get(chosen.posterior, ("", ""))
    return {
        "used": "posterior" if chosen.posterior else "point",
        "why": why(taken),
        "posterior": {
            "name": chosen.posterior,
            "kind": kind,
            "origin": origin,
            "scale": chosen.scale,
        }
        if chosen.posterior
        else None,
        "calibration": {
            "how": taken.how,
            "temperature": chosen.temperature,
            "share_of_bias": chosen.share,
            "rest": chosen.rest,
            "even": float(taken.fitted.floor),  # share of even probabilities
            "bias": affine(taken.fitted, taken.choice)[1].tolist(),
        },
        "held_out": {
            "num_examples": one.rows,
            "num_examples_of_everyone": taken.total_rows,
            "nll": {
                "point": chosen.point,
                "fitted": chosen.fitted,
                "posterior": chosen.gated,
                "calibrated": chosen.calibrated,
            },
        },
        "sets": sets(taken, y, names),
        "doubt": doubt(taken),
        "tests": {name: tested(client, taken, name) for name in one.judged},
        "alarms": alarms(taken, held, bool(information["offered"])),
        "information": information,
        "abstention": abstention(held, y),
    }


def why(taken: Taken) -> str:
    """Return in words which form is used, and the held-out NLL that decided it."""
    chosen, rows = taken.one.chosen, taken.one.rows
    whose = {
        "client": f"the client's {rows} held-out samples",
        "global": f"everyone's {taken.total_rows} held-out samples",
        "shrunk": f"the client's {rows} held-out samples and everyone's {taken.total_rows}",
    }[taken.how]
    if not taken.kinds:
        return (
            "The point is used: the logits are not the output of a Linear layer, so there is no "
            "posterior."
        )
    if not (rows or taken.total_rows):
        return "The point is used: there are no held-out samples to choose a posterior on."
    seen = ""
    if rows:
        fits = " and ".join(
            f"{value:.3f} with the posterior {name} as fitted"
            for name, value in chosen.fitted.items()
        )
        seen = f" On the client's own, NLL is {chosen.point:.3f} as a point, {fits}."
    if not chosen.posterior:
        return (
            f"The posterior is withheld: on {whose} it is not better than the point, both "
            f"calibrated.{seen}"
        )
    how = (
        "as fitted"
        if chosen.scale == 1
        else f"scaled {'down' if chosen.scale < 1 else 'up'} to {chosen.scale:g} times its fitted "
        "standard deviations"
    )
    if rows and chosen.scale != 1 and chosen.gate == (chosen.posterior, chosen.scale):
        seen = seen[:-1] + f", {chosen.gated:.3f} at that scale."
    return (
        f"The posterior {chosen.posterior} is used, {how}: calibrated, it is best on {whose}.{seen}"
    )


def sets(taken: Taken, y: Tensor, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what prediction sets promise, and on how many samples."""
    lowest, coverage, how = taken.choice.lowest, taken.coverage, taken.how
    by_class = len(lowest) > 1
    counts = torch.bincount(y, minlength=len(lowest)).tolist() if by_class else [len(y)]
    filled = how == "shrunk" and min(counts) < conformal.ENOUGH and taken.total_rows > 0
    return {
        "coverage": coverage,
        "by_class": by_class,
        "num_held_out": len(y),
        "filled_up": filled,
        "smallest_probability": [float(value) for value in conformal.edge(lowest)],
        "promise": promise(coverage, counts, filled, how, taken.total_rows, lowest, names),
    }


def doubt(taken: Taken) -> str:
    """Return in words which doubt is in use."""
    if not taken.one.chosen.plain:
        return "One minus the largest calibrated probability."
    return (
        "One minus the largest probability of the network itself: on held-out samples the "
        "calibrated one does not find errors better."
    )


def promise(
    coverage: float,
    counts: list[int],
    filled: bool,
    how: str,
    total: int,
    lowest: Tensor,
    names: tuple[str, ...] = (),
) -> str:
    """Return the promise of prediction sets, in one sentence or two."""
    needed, by_class = conformal.fewest(coverage), len(counts) > 1
    known = names if len(names) == len(counts) else tuple(map(str, range(len(counts))))
    open_classes = [known[k] for k, low in enumerate(lowest.tolist()) if low == 0]
    if len(open_classes) == len(counts):
        return (
            f"Every set holds all classes: {min(counts)} held-out samples are too few to promise "
            f"{coverage:.0%}; it takes {needed}{' of each class' if by_class else ''}."
        )
    whom = "of each class, a set" if by_class else "a set"
    much = "about" if how == "shrunk" else "at least"
    text = f"For {much} {coverage:.0%} of new samples {whom} holds the true class, if "
    number = f"{sum(counts)} held-out sample{'s' if sum(counts) != 1 else ''}"
    if how == "global":
        text += f"they are like everyone's {total} held-out samples."
    elif filled:
        text += (
            f"they are like the client's {number}, filled up to {conformal.ENOUGH} with everyone's "
            f"{total}, and these are like the client's."
        )
    else:
        text += f"they are like the client's {number} (exchangeable)."
    if open_classes:
        text += f" Class {', '.join(open_classes)} is in every set: too few samples."
    return text


def tested(client: int, taken: Taken, test: str) -> dict[str, Any]:
    """Return the numbers of each form on one kind of test samples."""
    found = forms({client: taken.one}, test)
    kept = ("accuracy", "nll", "brier", "ece", "ece_allclass", "error_auroc", "coverage")
    return {
        form: {key: row[key] for key in (*kept, "set_size", "risk_coverage") if key in row}
        for form, row in found.items()
    }


def delivered(client: int, taken: Taken) -> dict[str, Any]:
    """Return the summary of the calibrated model on the client's test samples."""
    return metrics.summarise({client: taken.one.judged[TEST].tallies["calibrated"]})


def compared(taken: Taken, held: dict[str, Tensor] | None, y: Tensor) -> dict[str, Any]:
    """Return whether information finds held-out errors at least as well as doubt does, and so is
    offered.
    """
    if not taken.one.chosen.posterior:
        return {"offered": False, "why": "There is no posterior in use."}
    wrong = None if held is None else held["probabilities"].argmax(-1) != y
    errors = 0 if wrong is None else int(wrong.sum())
    if held is None or wrong is None or min(errors, len(y) - errors) < ERRORS:
        return {
            "offered": False,
            "why": f"{errors} of {len(y)} held-out predictions are wrong; it takes {ERRORS} wrong "
            "and as many right ones to see whether information finds errors.",
        }
    own, plain = auroc(held["information"], wrong), auroc(held["doubt"], wrong)
    said = f"AUROC {own:.3f} against {plain:.3f} of doubt on {len(y)} held-out samples"
    good = own >= plain
    return {
        "offered": good,
        "why": f"It finds errors {'at least as well as' if good else 'worse than'} doubt: {said}.",
        "error_auroc": own,
        "error_auroc_of_doubt": plain,
    }


def auroc(measure: Tensor, wrong: Tensor) -> float:
    """Return the probability that an error has more of the measure than a right prediction."""
    high, low = measure[wrong][:, None], measure[~wrong][None]
    return float(((high > low).double() + 0.5 * (high == low).double()).mean())


def alarms(
    taken: Taken, held: dict[str, Tensor] | None, information: bool
) -> dict[str, dict[str, Any]]:
    """Return the alarms that are given out: threshold, and how often each sounds on held-out and on
    test samples.
    """
    found: dict[str, dict[str, Any]] = {}
    if held is None:
        return found
    for name in ALARMS:
        threshold = float(taken.choice.alarms[name])
        offered = information if name == "information" else name in held
        if not (offered and math.isfinite(threshold)):
            continue
        found[name] = {
            "threshold": threshold,
            "held_out": int((held[name] > threshold).sum()),
            "num_held_out": len(held[name]),
            "rates": {
                test: int(judged.alarms[name]) / max(int(judged.trusts["point"].num_examples), 1)
                for test, judged in taken.one.judged.items()
            },
        }
    return found


def abstention(held: dict[str, Tensor] | None, y: Tensor) -> dict[str, Any]:
    """Return the rule of abstention and the held-out curve of risk against coverage."""
    return {
        "default": "The model abstains where the set does not hold exactly one class.",
        "risk_coverage": None if held is None else trust.risks(right_or_wrong(held, y)),
    }


def right_or_wrong(held: dict[str, Tensor], y: Tensor) -> trust.Trust:
    """Return the tally of held-out predictions."""
    inside = torch.zeros_like(held["probabilities"], dtype=torch.bool)
    plain, use = held["doubt"], torch.ones((), dtype=torch.int64)
    return trust.tally(held["probabilities"].log(), inside, y, torch.ones(len(y)), plain, use)
