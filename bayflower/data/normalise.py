"""Normalised images: (x − mean) / std of each channel, alike in training, tests and predictions.

No rule pools samples. `published` takes constants that were published with the data set, `client`
the mean and the standard deviation of a client's own training images (as tables do), and numbers
may be given. Constants and given numbers are on the scale 0 to 1 where images are of type uint8,
else on the data's own; training sees images of type uint8 as (x/255 − 0.5)/0.5, and so do they.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import ConfigError

NONE, CLIENT, PUBLISHED = "none", "client", "published"
Channels = tuple[tuple[float, ...], tuple[float, ...]]  # means, standard deviations
# of the training images, pixels from 0 to 1; EMNIST's are those of its Balanced split
KNOWN: dict[str, Channels] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fmnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "emnist": ((0.1751,), (0.3332,)),
    "emnist47": ((0.1751,), (0.3332,)),
}


def checked(rule: str, dataset: str) -> None:
    """Raise unless `rule` is one, and suits the data set."""
    if rule == PUBLISHED and dataset not in KNOWN:
        raise ConfigError(
            f"normalise=published knows {', '.join(KNOWN)}, got dataset={dataset}; use "
            "normalise=client, or give MEAN,…/STD,…, one number a channel"
        )
    if rule not in (NONE, CLIENT, PUBLISHED):
        given(rule)


def given(text: str) -> Channels:
    """Return the numbers in a text MEAN,…/STD,…."""
    try:
        mean, std = (tuple(float(part) for part in half.split(",")) for half in text.split("/"))
    except ValueError:
        mean, std = (), ()
    if (
        not mean
        or len(mean) != len(std)
        or not all(math.isfinite(value) for value in mean)
        or not all(0 < value < math.inf for value in std)
    ):
        raise ConfigError(
            "normalise must be none, client, published or MEAN,…/STD,… with one positive STD a "
            f"channel, such as 0.5,0.5,0.5/0.2,0.2,0.2, got {text!r}"
        )
    return mean, std


def channels(rule: str, dataset: str, pixels: bool, train: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return mean and standard deviation (C, 1, 1) of images (N, C, H, W) as training sees them;
    `pixels`: they were of type uint8. `train` are the client's own training images.
    """
    if train.ndim != 4:
        raise ConfigError(
            f"normalise needs images of shape (channels, height, width), but inputs have shape "
            f"{train.shape[1:]}; leave it at none"
        )
    if rule == CLIENT:
        mean, std = (
            np.asarray(moment(train, axis=(0, 2, 3), dtype=np.float64))
            for moment in (np.mean, np.std)
        )
        std = np.where(std > 0, std, 1.0)
    else:
        said = KNOWN[dataset] if rule == PUBLISHED else given(rule)
        mean, std = (np.array(part) for part in said)
        if len(mean) != train.shape[1]:
            raise ConfigError(
                f"normalise has {len(mean)} channels, but the images have {train.shape[1]}; give "
                "one number a channel"
            )
        if pixels:
            mean, std = (mean - 0.5) / 0.5, std / 0.5
    return mean[:, None, None], std[:, None, None]
