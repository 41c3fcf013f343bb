"""Programs that need nothing of ours: torch.export and ONNX files with the calibrated uncertainty,
tested against the module before they are kept.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import conformal
from ..errors import BayflowerError, in_one_line
from ..maths.tops import Processes
from ..tree import Tensors
from .network import Ready

log = logging.getLogger("bayflower")
CLOSE = 1e-5  # by which probabilities may differ
PLAIN = (bool, int, float, str, tuple, list, type(None))  # attributes that tracing may write down
TRACED: dict[str, Any] = {}  # the last program that was traced, by its module's form
FAILED: dict[str, str] = {}  # why the last module that cannot be traced cannot, by its form
EDGE = 1e-4  # classes whose probability is as near to the edge of a set may fall on either side


class UntraceableError(BayflowerError):
    """Another client's module of the same form could not be traced."""


class Program(nn.Module):
    """What is exported: raw inputs to the outputs of `Ready` by name, numbers in single precision
    (of a float64 network, in double).
    """

    def __init__(self, ready: Ready) -> None:
        super().__init__()
        self.ready = ready
        first = next(ready.network.parameters(), torch.zeros(()))
        self.dtype = first.dtype
        self.graph: Any = None  # the module as torch.export has it

    def forward(self, x: Tensor) -> Tensors:
        return {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in self.ready(x).items()
        }


def exported(path: Path, made: Program, example: Tensor, kind: str) -> str:
    """Write and test an exported file; return its name, or the reason if it fails or gives other
    numbers.
    """
    if len(example) < 2:
        return "not written: it takes two samples to make one"
    part = path.with_name(f".{os.getpid()}.{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about its own future
            # fixed draws are made here once, outside of tracing
            want = [made(example[:size]) for size in (1, len(example))]
            failed: BayflowerError | None = None
            for program, new in traced(made, example):
                if kind == "pt2":
                    torch.export.save(program, part)
                    # reading takes longer than all else: once for each program that was traced
                    run: Any = (torch.export.load(part) if new else program).module()
                else:
                    run = to_onnx(part, program, list(want[0]))
                try:
                    for one in want:
                        size = len(next(iter(one.values())))
                        check(run(example[:size]), one, made.ready)
                    failed = None
                    break
                except BayflowerError as error:
                    failed = error
            if failed is not None:
                raise failed
        part.replace(path)
    except ImportError as error:
        return f"not written: {error.name} is not installed; pip install 'bayflower[onnx]'"
    except UntraceableError as error:  # logged when it was tried
        return f"not written: {error}"
    # a network that cannot be exported does not affect the other files
    except Exception as error:
        log.warning("%s was not written: %s", path, in_one_line(error, 200))
        return f"not written: {type(error).__name__}: {in_one_line(error, 200)}"
    finally:
        part.unlink(missing_ok=True)
    return path.name


def traced(made: Program, example: Tensor) -> Iterator[tuple[Any, bool]]:
    """Yield the program of a module, and whether it is new: first that of the last module, with
    these numbers, if both have the same form; then one that is traced now. Tracing takes most of
    the time, and the clients of a run differ in numbers only. All kinds of files of a module share
    one program. A form that could not be traced is not tried again.
    """
    if made.graph is not None:
        yield made.graph, True
        return
    key, numbers = form(made, example), made.state_dict(keep_vars=True)
    known = TRACED.get(key) if key is not None else None
    if known is not None and set(known.state_dict) <= set(numbers):
        known.state_dict.update({name: numbers[name] for name in known.state_dict})
        made.graph = known
        yield known, False
    if key in FAILED:
        raise UntraceableError(FAILED[key])
    batch = torch.export.Dim("batch", min=1)
    made.graph = None  # no part of what is traced
    try:
        program = torch.export.export(made, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:
        FAILED.clear()
        if key is not None:
            FAILED[key] = f"{type(error).__name__}: {in_one_line(error, 200)}"
        raise
    TRACED.clear()
    if key is not None:
        TRACED[key] = program
    made.graph = program
    yield program, True


def form(made: Program, example: Tensor) -> str | None:
    """Return everything of a module but its numbers, as a text; None if a program would hold
    numbers that are no part of the module's state.
    """
    if made.ready.drawn or any(isinstance(part, Processes) for part in made.modules()):
        return None
    parts: list[Any] = [(tuple(example.shape[1:]), example.dtype, repr(made))]
    for path, module in made.named_modules():
        own = [
            (name, plain(value)) for name, value in vars(module).items() if isinstance(value, PLAIN)
        ]
        parts.append((path, type(module), sorted(own)))
    for name, value in made.state_dict().items():
        parts.append((name, tuple(value.shape), value.dtype))
    return repr((parts, sorted(made.ready.parts)))


def plain(value: Any) -> Any:
    """Return an attribute as tracing may write it down. Of another object in a list its kind says
    enough: its text has a place in memory, so that no two clients would have the same.
    """
    if isinstance(value, (list, tuple)):
        return repr([plain(one) for one in value])
    return repr(value) if isinstance(value, PLAIN) else repr(type(value))


def check(got: Tensors, want: Tensors, ready: Ready) -> None:
    """Raise an error if a program's outputs are not those of the module."""
    if list(got) != list(want):
        raise BayflowerError(f"its outputs are {', '.join(got)}, expected {', '.join(want)}")
    for name, value in want.items():
        if value.is_floating_point():
            if not torch.allclose(got[name], value, atol=CLOSE, rtol=1e-4):
                worst = float((got[name] - value).abs().max())
                raise BayflowerError(f"its {name} differ by up to {worst:.1e}")
        elif name == "sets":
            edge = conformal.edge(ready.extras()["sets/lowest"])
            sure = (want["probabilities"] - edge).abs() > EDGE
            if bool((sure & (got[name] != value)).any()):
                raise BayflowerError("its sets differ")


def to_onnx(path: Path, program: Any, names: list[str]) -> Any:
    """Write the program as ONNX; return a function that runs it with onnxruntime."""
    import onnxruntime
    import onnxscript  # noqa: F401 (torch's exporter needs it, and says so less clearly)

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(
        program,
        (),
        str(path),
        input_names=["x"],
        output_names=names,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path))

    def run(x: Tensor) -> Tensors:
        found = session.run(names, {session.get_inputs()[0].name: x.numpy()})
        return dict(zip(names, map(torch.as_tensor, found), strict=True))

    return run
