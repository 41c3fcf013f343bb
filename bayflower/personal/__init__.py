"""Personal models: made from a client's state, saved with a model card, loaded as classifiers and
torch modules.
"""

from __future__ import annotations

from .doubt import Drift
from .load import Personal, Prediction, load_personal
from .made import Kept, keep
from .runs import export, export_all, personalise

__all__ = [
    "Drift",
    "Kept",
    "Personal",
    "Prediction",
    "export",
    "export_all",
    "keep",
    "load_personal",
    "personalise",
]
