"""An add-on to a base: a client half whose way of training, FedAvg's, Reptile's, MAML's or
PerFedAvg's, is a setting (`base`).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ..contract import Phase, Purpose, Work
from ..errors import ConfigError
from ..maths import dropout, meta
from ..networks.model import Model
from ..tree import Tensors
from . import maml, reptile

Base = Literal["fedavg", "reptile", "maml", "perfedavg"]
TWO = ("maml", "perfedavg")  # bases whose step takes two batches
LOCAL = "local"


class AddOn(maml.Client):
    """Trains as `config.base` does, on a network one linear layer of which the add-on is about."""

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        self.weight = dropout.find_layer(
            model.anatomy, model.shapes, model.shapes, config.dropout_layer
        )
        self.layer = self.weight.removesuffix(".weight")
        if other := model.tied.get(self.weight):
            raise ConfigError(
                f"layer {self.layer!r} shares its weight with {other!r}; name a layer with "
                "weights of its own as dropout_layer"
            )

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return local training as the base does it; a few steps of the network before a test,
        unless the base is fedavg.
        """
        if purpose == "train":
            return (
                self.training.phase(LOCAL)._replace(batches=2 if self.config.base in TWO else 1),
            )
        if self.config.base == "fedavg" or not self.config.adapt_steps:
            return ()
        return (self.adaptation()._replace(trainable=self.model.anatomy.trainable),)

    def adaptation(self) -> Phase:
        """Return the steps before a test: the inner ones, or those of local training."""
        return super().adaptation() if self.config.base in TWO else reptile.Client.adaptation(self)

    def meta_gradient(
        self, loss: meta.Loss, work: Work, way: meta.Way
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return (∇F, the buffers, F), exactly (maml) or by differences (perfedavg)."""
        if self.config.base == "perfedavg":
            return meta.hessian_free(loss, work.params, work.buffers, way, self.config.hf_delta)
        return super().meta_gradient(loss, work, way)

    @property
    def plain_loop(self) -> bool:
        """Return whether the base trains by plain steps."""
        return self.config.base not in TWO
