"""Whether clients with a network can be a stack, as far as its layers and trying it tell."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ConfigError
from ..stacked.masked import INSTANCES, MASKABLE

# a sample's output depends on the other samples of its batch
COUPLING = (nn.modules.batchnorm._BatchNorm,)


class Manner:
    """What trying a network has shown (`mixing.py`); copies of a model share it."""

    def __init__(self) -> None:
        self.known = False
        self.mixes = False  # outputs or buffers in training depend on the other samples
        self.mixes_slopes = False  # gradients do (scale_grad_by_freq)
        self.changes = False  # a pass changes parameters in place (max_norm)
        self.mixes_in_tests = False  # predictions do
        self.writes = False  # a pass changes its input in place
        # attributes that every pass writes before it reads them, with what was there before
        self.left: dict[str, Any] = {}
        self.strays = False  # two passes of one batch differ
        self.refused: ConfigError | None = None  # why it cannot be trained

    def why(self, name: str) -> str | None:
        """Return why padding would change the numbers of the network called so, or None."""
        because = "clients were trained one by one because the network cannot be stacked: "
        if self.strays:
            return (
                f"{because}two passes of one batch through {name} differ, so it draws numbers "
                "that are not torch's, which no seed of a run fixes; draw them by torch"
            )
        others = "on the other samples of its batch, and padding would be among them"
        if self.mixes_in_tests:
            return f"{because}in {name} a sample's outputs depend {others}; so do predictions"
        if self.mixes:
            return f"{because}in {name} a sample's outputs in training depend {others}"
        if self.changes:
            return f"{because}{name} changes parameters in forward() (max_norm), for padding, too"
        if self.mixes_slopes:
            return f"{because}in {name} the gradient of a sample depends {others}"
        return None


def couples(module: nn.Module) -> bool:
    """Return whether a layer is known to couple the samples of a batch."""
    return any(isinstance(part, COUPLING) for part in module.modules())


def unstackable(network: nn.Module) -> str | None:
    """Return why a network cannot be trained as a stack, as far as its layers tell, or None."""
    for name, module in network.named_modules():
        counts = isinstance(module, COUPLING) or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        )
        if counts and type(module) not in (*MASKABLE, *INSTANCES):
            return (
                f"clients were trained one by one because layer {name!r} "
                f"({type(module).__name__}) cannot leave padding out"
            )
        if isinstance(module, COUPLING) and not module.track_running_stats:
            return (
                f"clients were trained one by one because layer {name!r} ({type(module).__name__} "
                "with track_running_stats=False) takes the statistics of a batch in tests, too"
            )
    return None
