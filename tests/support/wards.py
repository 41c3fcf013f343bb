"""A made-up table of patients for tests of data."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

SITES = ("Aachen", "Bern", "Cork")


def patients(number: int = 90, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of a made-up table."""
    draw = np.random.default_rng(seed)
    rows = []
    for k in range(number):
        age, stage = float(np.round(draw.normal(60, 9), 1)), str(draw.choice(["I", "II", "III"]))
        chol = None if draw.random() < 0.2 else int(draw.integers(120, 300))
        sick = age / 10 + 2 * (stage == "III") + draw.normal() > 7
        rows.append(
            {
                "patient_id": f"P{k:04d}",
                "hospital": SITES[k % 3],
                "admitted": f"2024-02-{1 + k % 28:02d}",
                "age": age,
                "stage": stage,
                "cholesterol": chol,
                "outcome": "sick" if sick else "well",
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]], mark: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=mark)
        writer.writeheader()
        writer.writerows(rows)
    return path
