"""`bayflower WORDS` in a process of its own, without importing torch again for each.

A server, one to a test process, imports what the commands need and forks for each of them. It has
one thread and runs nothing itself, so that a forked process is as good as a new one.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("torch.func", "torch.fx.experimental.symbolic_shapes", "flwr.app", "flwr.serverapp"),
    *("bayflower.cli", "bayflower.engines", "bayflower.fused.run", "bayflower.flower.loop"),
    *("scipy.special", "torch._dynamo", "torch._functorch.aot_autograd"),  # report, export
)


@functools.cache
def server() -> subprocess.Popen:
    """Start the server."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(process.kill)
    return process


def bayflower(
    *words: str,
    cwd: str | os.PathLike | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 300,
) -> subprocess.CompletedProcess:
    """Return what `bayflower WORDS` printed and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {
            "words": list(words),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "files": [str(out), str(err)],
            "timeout": timeout,
        }
        process = server()
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def become(asked: Mapping[str, Any]) -> None:
    """Turn this forked process into the command; its exit code is the process's."""
    for number, path in enumerate(["/dev/null", *asked["files"]]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["bayflower", *asked["words"]]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a command that takes too long is ended
    signal.alarm(asked["timeout"])
    from bayflower.cli import main

    main()


def serve(reader: int) -> None:
    """Answer each line of the file descriptor with an exit code."""
    import importlib

    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    with os.fdopen(reader) as lines, os.fdopen(os.dup(1), "w") as answers:
        for line in lines:
            child = os.fork()
            if not child:
                code = 1
                try:
                    become(json.loads(line))
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
            answers.flush()


if __name__ == "__main__":
    serve(os.dup(0))
