"""A call of a ClientApp that can pause: it runs in a thread of its own, and only while its owner
waits for it. So code runs in a fixed order, one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Ended(BaseException):
    """Ends a paused call; no handler of errors catches it."""


class Call:
    """A function that runs when it is resumed, until it pauses or ends."""

    def __init__(self, work: Callable[[Call], Any]) -> None:
        """`work` gets this object, on which it may pause."""
        self.work = work
        self.result: Any = None
        self.seat: Any = None  # what the work leaves for its owner when it pauses
        self.over = self.dropped = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resume(self) -> bool:
        """Let the call go on until it pauses or ends; return whether it ended."""
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._back.acquire()
        return self.over

    def pause(self) -> None:
        """Return when the owner resumes; called by the work itself."""
        self._back.release()
        self._go.acquire()
        if self.dropped:
            raise Ended

    def drop(self) -> None:
        """End a paused call."""
        if not self.over and self._thread.ident:
            self.dropped = True
            self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self.work(self)
        except Ended:
            pass
        finally:
            self.over = True
            self._back.release()
