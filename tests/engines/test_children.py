"""Processes of a run that is killed: those that ignore a termination end as well."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest

from bayflower.files.children import MARK, end, marked, start_guard

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(99)
"""
RUN = f"""
import os, subprocess, sys, time
from pathlib import Path
from bayflower.files.children import MARK, start_guard
mark, folder = sys.argv[1], Path(sys.argv[2])
start_guard(mark, folder)
words = [sys.executable, "-c", {STUBBORN!r}]
child = subprocess.Popen(
    words, env={{**os.environ, MARK: mark}}, stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
print(flush=True)
time.sleep(99)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their mark in /proc")
def test_a_killed_run_leaves_neither_processes_nor_its_folder(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "folder"
    folder.mkdir()
    run = subprocess.Popen([sys.executable, "-c", RUN, mark, folder], stdout=subprocess.PIPE)
    try:
        run.stdout.readline()
        assert len(marked(mark)) == 1
        run.kill()
        deadline = time.monotonic() + 20
        while (marked(mark) or folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert marked(mark) == []
        assert not folder.exists()
    finally:
        run.kill()
        run.communicate()
        end(mark)


def test_the_guard_ends_with_its_run_and_touches_no_other(tmp_path):
    """What carries another mark goes on."""
    mark = uuid.uuid4().hex
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(99)"], env={MARK: uuid.uuid4().hex}
    )
    try:
        guard = start_guard(mark, tmp_path / "folder")
        guard.communicate(timeout=20)
        assert guard.returncode == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
