"""The classes of a personal model as its data had them: words, whole numbers, or True and False."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ConfigError

BOOLEANS = ["False", "True"]


def texts(card: dict[str, Any]) -> list[str]:
    """Return the name of each class; its number where the card has no names."""
    number = int(card["network"]["num_classes"])
    kept = (card.get("reading") or {}).get("classes"), card["data"].get("classes")
    found = next((names for names in kept if names and len(names) == number), None)
    return [str(name) for name in found] if found else [str(k) for k in range(number)]


def values(card: dict[str, Any]) -> np.ndarray:
    """Return the classes (K,) with the type that labels had: whole numbers, True and False, or
    words.
    """
    names = texts(card)
    if names == BOOLEANS:
        return np.array([False, True])
    if all(is_whole(name) for name in names):
        return np.array([int(name) for name in names])
    return np.array(names)


def is_whole(name: str) -> bool:
    """Return whether a name is a whole number as Python writes it; 007 is a word."""
    return name.removeprefix("-").isdecimal() and len(name) < 18 and name == str(int(name))


def check_labels(y: np.ndarray, classes: np.ndarray) -> None:
    """Raise if the labels are numbers and the classes words, or the other way round."""
    words = [all(isinstance(one, str) for one in some.tolist()) for some in (y, classes)]
    if len(y) and words[0] != words[1]:
        known = ", ".join(repr(one) for one in classes[:5].tolist())
        more = ", …" if len(classes) > 5 else ""
        raise ConfigError(
            f"labels must be classes of the model ({known}{more}), got {y.tolist()[0]!r}; give "
            "labels as the training data had them"
        )
