"""The words of the report, explained once."""

from __future__ import annotations

from collections.abc import Container
from html import escape

ALWAYS = {
    "accuracy": "Share of test samples whose class is predicted right.",
    "balanced accuracy": "Mean over the classes of the share that is predicted right, so that a "
    "rare class counts as much as a common one.",
    "beyond noise": "The difference is larger than chance explains: p below 0.05 after Holm's "
    "correction for the number of comparisons.",
    "calibration": "Whether events that a model calls 80 % likely happen in 80 % of the cases.",
    "ECE": "Expected calibration error: mean gap between stated and true confidence, in ten bins. "
    "Small test sets have some by chance.",
    "fairness CV": "Standard deviation of the sites' accuracies over their mean; small is even.",
    "interval (95 %)": "Range in which the true value lies in 95 of 100 such studies.",
    "local training": "Every site trains on its own data alone and shares nothing.",
    "NLL, −log p": "Mean of −log of the probability given to the true class; small is good, and a "
    "confident error costs most.",
    "p": "Probability of a difference at least as large if the two methods were equally good.",
    "personal model": "The model that a site uses after the last round; the global model is the "
    "same for all sites.",
    "point": "One hundredth: accuracy 84 % is 2 points above 82 %.",
    "round": "One exchange: the server sends, sites train, the server combines.",
    "seed": "The number that decides everything random in a run; several seeds show what chance "
    "does.",
    "site, client": "A data owner, such as a hospital. Drawn clients are parts of one data set.",
}
CALIBRATED = {
    "coverage": "Share of samples whose prediction set has the true class; a promise of 90 % "
    "should hold for about 90 %.",
    "error AUROC": "How well a model's doubt tells its wrong predictions from its right ones; "
    "50 % is blind, 100 % perfect.",
    "posterior": "A distribution over models in place of one model; it is used where it helps on "
    "held-out samples.",
    "prediction set": "The classes that a calibrated model cannot rule out for a sample.",
    "alarms": "Share of samples that a model finds unlike what it has seen.",
}
TWO = {
    "AUROC": "Probability that a positive sample has a higher score than a negative one; 0.5 is "
    "blind, 1 perfect.",
    "decision curve": "Net benefit of acting on a model for every probability from which one would "
    "act.",
    "net benefit": "True positives less false ones, weighed by the odds of the threshold, per "
    "sample.",
    "positives that are right": "Share of positive predictions that are right (positive predictive "
    "value); it depends on how common positives are.",
    "sensitivity": "Share of the positive samples that are found.",
    "specificity": "Share of the negative samples that are cleared.",
}
# words of tasks without classes, by a metric that tells the task
TASKS = {
    "rmse": {
        "CRPS": "Distance between the predicted distribution and the value that was seen, in its "
        "units.",
        "PIT": "The predicted probability of a smaller value than the one seen; evenly spread if "
        "the distributions are right.",
        "RMSE": "Root of the mean squared error, in the target's units.",
    },
    "c_index": {
        "Brier score": "Mean squared difference between the predicted probability of no event and "
        "what happened; 0.25 is a coin's. Censored samples count through weights. Integrated: its "
        "mean over time.",
        "C-index": "Share of pairs of samples of which the one with the earlier event has the "
        "higher risk; 0.5 is blind, 1 perfect. Uno's is not changed by when samples are censored.",
        "censored": "The event had not been seen when the observation ended.",
        "horizon": "The time by which predicted and observed probabilities of an event are "
        "compared.",
    },
    "macro_auroc": {
        "AUPRC": "Mean share of true labels among those with the highest scores (average "
        "precision); the share of true labels is blind, 1 perfect.",
        "AUROC": TWO["AUROC"],
        "macro, micro": "Macro is the mean over labels, so that a rare one counts as much as a "
        "common one. Micro is over all labels together.",
    },
}


def glossary(calibrated: bool, two: bool, shown: Container[str] = ()) -> str:
    """Return the words that this page uses, in order; `shown` are metrics of the runs."""
    known = {**ALWAYS, **(CALIBRATED if calibrated else {}), **(TWO if two else {})}
    for metric, words in TASKS.items():
        known |= words if metric in shown else {}
    rows = [
        f"<dt>{escape(word)}</dt><dd>{escape(known[word])}</dd>"
        for word in sorted(known, key=str.lower)
    ]
    return f'<dl class="glossary">{"".join(rows)}</dl>'
