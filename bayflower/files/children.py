"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason; for `preexec_fn`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG
