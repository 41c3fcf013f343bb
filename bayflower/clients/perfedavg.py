"""PerFedAvg, client half (Fallah, Mokhtari and Ozdaglar 2020, NeurIPS): MAML whose Hessian is a
difference of two gradients (HF-MAML).

    paper          here                 shape
    w              work.params          by name
    alpha          config.inner_lr      ()
    beta           lr                   (): rate of the outer step
    delta          config.hf_delta      ()
    D, D', D''     batches[0], [1]      D (inner step) and D'' (Hessian) are the support, D' the
                                        query

    g = ∇f(w − alpha ∇f(w; D); D')                                                      [eq. 1]
    d = (∇f(w + delta g; D'') − ∇f(w − delta g; D'')) / (2 delta)
    w ← w − beta (g − alpha d)                                                          [eq. 2]

Departs: D'' = D, so that a step takes two batches. delta is the length of the step, delta·g/‖g‖:
one setting then fits gradients of any size. More than one inner step is walked back one by one
(meta.py).
"""

from __future__ import annotations

from torch import Tensor

from ..contract import Work
from ..maths import meta
from ..tree import Tensors
from . import maml


class Client(maml.Client):
    """Trains for what comes after a step of adaptation, without second derivatives."""

    def meta_gradient(
        self, loss: meta.Loss, work: Work, way: meta.Way
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return (g − alpha d, the buffers, F) [eq. 1] [eq. 2]."""
        return meta.hessian_free(loss, work.params, work.buffers, way, self.config.hf_delta)
