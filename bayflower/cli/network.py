"""`bayflower doctor --model`: are clients with this network trained in stacks, and what works?"""

from __future__ import annotations

from ..errors import ConfigError
from .findings import Finding

CLASSES = 10  # of a network whose number of classes is open


def network(name: str, shape: str, words: int) -> list[Finding]:
    """Return the findings about a network on samples of `shape`."""
    import torch

    from ..fused.trial import tried
    from ..networks.check import trial
    from ..networks.mixing import try_out
    from ..networks.papers import build

    sizes = sizes_of(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(4, *sizes, device=device)
    if words:
        x = torch.randint(0, words, (4, *sizes), device=device)
    model = build(name, sizes, CLASSES)
    logits, _ = trial(model, x)  # raises with the layer at fault
    try_out(model, x)
    model.num_classes = max(logits.shape[1], 2)
    found = tried(model, x)
    size = f"{model.num_parameters:,} parameters"
    why = (found.training or "").removeprefix("clients were trained one by one because ")
    return [
        Finding(
            f"model: {name}",
            "ok" if found.training is None else "missing",
            f"{size}; clients are trained in stacks"
            if found.training is None
            else f"{size}; clients are trained one by one: {why}",
        ),
        Finding(
            "model: random layers",
            "ok",
            "yes; their numbers follow from the seed" if found.draws else "none",
        ),
        *(
            Finding(
                f"model: {what}",
                "ok" if why is None else "missing",
                "work" if why is None else f"do not work in a stack: {why}",
            )
            for what, why in (
                ("second derivatives", found.second_derivatives),
                ("gradients by sample (curvature)", found.curvature),
            )
        ),
    ]


def sizes_of(text: str) -> tuple[int, ...]:
    """Return a shape from what was typed."""
    parts = text.replace("x", ",").split(",")
    if not text or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError(
            f"--input must be the shape of one sample, got {text!r}; e.g. --input 3,32,32"
        )
    return tuple(int(part) for part in parts)
