"""Personal models: made from a client's state, saved with a model card, loaded as torch modules."""

from __future__ import annotations

from .load import Personal, Prediction, load_personal
from .made import Kept, keep
from .runs import export, personalise

__all__ = ["Kept", "Personal", "Prediction", "export", "keep", "load_personal", "personalise"]
