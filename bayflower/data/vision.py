"""torchvision, imported lazily and in a way that survives a CPU-only torch beside a torchvision
built for CUDA.

Such a pair fails at `import torchvision` with "operator torchvision::nms does not exist", because
the compiled part cannot be loaded and torchvision describes two of its operators unconditionally.
Declaring the two names first lets data sets, transforms and models work; the operators themselves
stay unusable. Everything that imports torchvision (torchmetrics and laplace do) goes through this
module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from ..errors import BayflowerError

OPERATORS = ("nms", "qnms")
# a Library takes its operators with it when it is collected
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Return the module torchvision."""
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise BayflowerError(
            f"torchvision cannot be imported ({error}); install it with: pip install torchvision"
        ) from error


def prepare_torchvision() -> bool:
    """Return True if missing operators were declared; call it before importing a package that
    imports torchvision.
    """
    if torch.version.cuda is not None or "torchvision" in sys.modules:
        return False
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    # A real CPU build registers the operators itself when its library is loaded: let it, and
    # declare only what is still missing.
    for library in sorted(Path(spec.origin).parent.glob("_C*")):
        if library.suffix in (".so", ".pyd"):
            with contextlib.suppress(OSError, ImportError):
                torch.ops.load_library(str(library))
    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        fragment = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(fragment)
    return bool(missing)
