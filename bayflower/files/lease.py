"""A lease on a run's folder: one process at a time writes there, and whoever else asks is told who
it is.

The lease is a file with its holder: machine, process and a number that grows with every holder. A
lock of the operating system on that file ends with its process. Where machines share a folder
without such locks, the file's age decides: its holder touches it every few seconds. The lease of a
dead process is taken over. A holder that slept meanwhile finds another number in the file when it
next writes, and stops (fencing).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BayflowerError, ConfigError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger("bayflower")
LOCK = ".running"  # of the command that does a run
SERVING = ".serving"  # of the ServerApp, which may be a process of another command
BEAT_SECONDS = 5.0
STALE_SECONDS = 20.0  # without a beat a holder on another machine counts as dead
BUSY = "another process is doing the run in"


class BusyError(ConfigError):
    """Another process is doing the run."""


class Holder(NamedTuple):
    """Who holds a lease."""

    host: str
    pid: int
    since: float  # when the process was started, by the system's clock
    number: int
    command: str

    def named(self) -> str:
        """Return the holder as text."""
        return f"process {self.pid} on {self.host}: {self.command}"


_held: dict[Path, tuple[Path, Holder]] = {}  # by folder: file and holder, of this process


def read(path: Path) -> Holder | None:
    """Return who holds the lease in a file; None if nobody is named."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def started(pid: int) -> float:
    """Return when a process of this machine was started; 0 if there is none."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        pass
    if Path("/proc/self/stat").exists():
        return 0.0
    try:  # no /proc here: whether it is alive must do
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0.0
    except OSError:
        return 1.0
    return 1.0


def this_process(number: int) -> Holder:
    """Return this process as the holder of a lease."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:120]
    return Holder(socket.gethostname(), os.getpid(), started(os.getpid()), number, command)


def refuse(folder: Path, holder: Holder | None) -> None:
    """Raise with the name of the holder."""
    who = f" ({holder.named()})" if holder else ""
    raise BusyError(f"{BUSY} {folder}{who}; wait for it, or choose another folder")


def beats(path: Path) -> bool:
    """Return whether the holder of a lease on another machine touches it; wait to be sure."""
    with suppress(OSError):
        seen, deadline = path.stat().st_mtime, time.monotonic() + STALE_SECONDS
        if time.time() - seen > 10 * STALE_SECONDS:
            return False
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            if path.stat().st_mtime != seen:
                return True
    return False


def alive(holder: Holder, path: Path) -> bool:
    """Return whether a holder that has no lock of the operating system still runs."""
    if holder.host == socket.gethostname():
        return holder.since == started(holder.pid) and holder.pid != os.getpid()
    return beats(path)


def take(folder: Path, name: str) -> tuple[Any, Holder]:
    """Return the locked file and this process as its holder; raise if another one has it."""
    path = folder / name
    while True:
        file = path.open("a+")
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                refuse(folder, read(path))
        if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            file.close()  # its holder ended and removed it just now
            continue
        before = read(path)
        if before is not None and alive(before, path):
            file.close()
            refuse(folder, before)
        if before is not None:
            log.warning("%s: the lease of a dead process is taken over (%s)", path, before.named())
        break
    mine = this_process(before.number + 1 if before else 1)
    file.seek(0)
    file.truncate()
    file.write(json.dumps(mine._asdict()))
    file.flush()
    return file, mine


@contextmanager
def alone_in(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Keep other processes out of a folder while a run is under way."""
    file, mine = take(folder, name)
    path, key, ends = folder / name, folder.resolve(), threading.Event()
    _held[key] = (path, mine)

    def beat() -> None:
        while not ends.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(file.fileno())

    beating = threading.Thread(target=beat, daemon=True, name="lease")
    beating.start()
    try:
        yield
    finally:
        ends.set()
        beating.join()
        _held.pop(key, None)
        if read(path) == mine:
            path.unlink(missing_ok=True)
        file.close()


def check(folder: Path) -> None:
    """Raise if this process has lost its lease on a folder; without a lease do nothing."""
    path, mine = _held.get(folder.resolve(), (None, None))
    if path is None or (there := read(path)) == mine:
        return
    who = there.named() if there else "nobody: its file is gone"
    raise BayflowerError(
        f"this process has lost its lease on {folder}, which is held by {who}; nothing was "
        "written; go on from the last checkpoint with --resume"
    )
