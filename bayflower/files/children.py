"""Processes that end with the one that started them.

As a program of its own (`children.py MARK FOLDER`) this is the guard of a run. It waits until its
standard input closes, as it does when the run dies, and then clears up. It imports nothing but the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "BAYFLOWER_MARK"  # variable in the environment of every process of a run


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason; for `preexec_fn`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG


def start_guard(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the guard of this run: it does what `clear` does if this process dies before."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(folder)],
        env={key: value for key, value in os.environ.items() if key != MARK},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def clear(mark: str, folder: Path) -> None:
    """End every process that carries the mark, and remove the run's temporary folder."""
    end(mark)
    shutil.rmtree(folder, ignore_errors=True)


def end(mark: str) -> None:
    """End every process that carries the mark: terminated first, then killed."""
    for attempt in range(20):
        left = marked(mark) if len(mark) == 32 else []
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if attempt < 5 else signal.SIGKILL)
        if not left:
            return
        time.sleep(0.3)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment carries the mark, this one excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
                and int(folder.name) != os.getpid()
            ):
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


@contextmanager
def terminable() -> Iterator[None]:
    """Let a terminated process end its run as an error does, so that it leaves no processes
    behind; other threads than the main one cannot.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Be the guard of a run."""
    sys.stdin.buffer.read()
    clear(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
