"""The app's server side in the process Flower gives it."""

from __future__ import annotations

import subprocess
import sys

# Ray starts processes from one thread while the ServerApp computes in another: so does this, 200 times.
FORKS = """
import os, subprocess, sys, threading
import numpy as np
from bayflower.remote import single_threaded

x, matrix, done = np.ones((2000, 60)), np.ones((60, 60)), 0

def work():
    global done
    while True:
        x @ matrix
        done += 1

with single_threaded():
    threading.Thread(target=work, daemon=True).start()
    before = -1
    for number in range(200):
        subprocess.run(["true"], preexec_fn=lambda: None)
        if number % 40 == 39:
            if done == before:
                os._exit(3)
            before = done
os._exit(0)
"""


def test_a_fork_does_not_stop_the_products_of_a_serverapp():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:] or "the products stopped after a fork"
