"""Errors in the words of Python: an option of the command line is an argument here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BayflowerError

OPTION = re.compile(r"--([a-z][a-z-]*)")


def in_python(text: str) -> str:
    """Return a text with options as arguments: `--target` as `target=`."""
    return OPTION.sub(lambda found: found[1].replace("-", "_") + "=", text).replace("= ", "=")


@contextmanager
def spoken(verbose: bool = False) -> Iterator[None]:
    """Say errors in the words of Python, and keep logs quiet unless `verbose`."""
    loggers = {logging.getLogger(name): name for name in ("bayflower", "flwr")}
    before = {logger: logger.level for logger in loggers}
    for logger, name in loggers.items():
        quiet = logging.ERROR if name == "bayflower" else logging.WARNING
        logger.setLevel(logging.INFO if verbose else quiet)
    try:
        yield
    except BayflowerError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
