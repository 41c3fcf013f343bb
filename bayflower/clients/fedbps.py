"""FedBPS, client half (Luo and Kuruoglu, arXiv 2402.16091): local training, then a Laplace
approximation of the posterior.

    paper      here                 shape
    w_i        state.params         by name: the client's weights, continued from round to round
    w_g        broadcast.params     by name, meaningful where it is shared
    M          broadcast.mask       by name, bool: true = personal
    h          work.survey.total    by name: diagonal curvature of the summed loss at w_i
    delta      config.delta         ()
    sigma_i    update.variance      by name

    w_i ← w_i ⊙ M + w_g ⊙ (1 − M), then E epochs of the optimiser
    sigma_i = 1 / (h + delta)                                                           [eq. 2]

Departs:
  E-B1  the algorithm's line 13 returns h where [eq. 2] needs its inverse; as printed the *most*
        certain weights would be personal (`ranking=printed`).
  E-B3  h is exactly 0 for weights behind dead ReLUs: the prior precision delta keeps sigma_i
        finite. Its default weight_decay · n_i is the curvature of the weight decay in the summed
        loss.
  E-B4  h is exact: the model-label Fisher information by per-sample gradients, BatchNorm in
        evaluation mode (curvature.py).
  E-B7  the partition is in data/partition.py.
  E-B8  BatchNorm's scale and shift take part; its running statistics stay here unless
        `statistics=average`.
  The server of the paper forms w_i; here the client does, so the server needs to hold no client's
  weights. A client that comes late has the common initialisation on its personal entries; one that
  never trained fits those alone, for `new_client_epochs`. With `finetune_epochs` all entries are
  trained before a test, as FedPer's are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Posterior, Purpose, Survey, Work
from ..errors import WireError
from ..maths.bits import unpack_bits
from ..maths.curvature import at_once, diagonal
from ..maths.laplace import Seen, independent
from ..networks.model import Batch, Model
from ..strategies.fedbps import Broadcast, Update
from ..tree import Tensors
from .fedavg import count

FIT = "fit"  # the phase of a client that never trained


class State(NamedTuple):
    """The client's weights (they travel, by the method's definition) and its running statistics,
    unless these are averaged; before a test also the whole model after fine-tuning, else {}.
    """

    params: Tensors
    buffers: Tensors
    tuned: Tensors


class Client(ClientHalf):
    """Trains from its personal and the shared entries; says how certain it is of each."""

    state_type = State
    update_type = Update
    private = ("buffers", "tuned")

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        self.survey_size = at_once(model, training.batch_size, config.curvature)

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why weight decay is no prior (E-B3): that of adamw is no part of the loss."""
        if config.delta is not None or training.optimizer != "adamw" or not training.weight_decay:
            return None
        return (
            "takes its prior from weight_decay in the loss, which adamw keeps out of it; set "
            "delta, or optimizer=adam"
        )

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training; a new client fits its personal entries; before a
        test fine-tuning, where it is set.
        """
        if purpose == "train":
            return (self.training.phase("local"),)
        if purpose == "new" and self.config.personal_share > 0:
            return (self.training.phase(FIT, epochs=self.training.new_client_epochs),)
        epochs = self.config.finetune_epochs if purpose == "finetune" else 0
        return (self.training.phase("finetune", epochs=epochs),) if epochs else ()

    def views(self) -> dict[str, str]:
        """Return the personal model, and that before fine-tuning where there is any; no client has
        the whole of w_g.
        """
        model = "the client's own entries where the last mask says so, the global ones elsewhere"
        epochs = self.config.finetune_epochs
        if not epochs:
            return {"personal": model}
        return {
            "personal": f"{model}, after {epochs} epoch(s) of local training; of a client that "
            "never trained, of its own entries alone",
            "before": f"{model}, before local training",
        }

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return the initial model."""
        return State(params, buffers if self.config.statistics == "local" else {}, tuned={})

    def unpack(self, kind: type, flat: Tensors) -> Broadcast:
        """Return the broadcast from bits and shared entries; raise if they do not fit each other
        and the network.
        """
        rest = dict(flat)
        try:
            packed, values = rest.pop("mask"), rest.pop("values")
        except KeyError as error:
            raise WireError(f"key {error} is missing in the broadcast") from None
        if unknown := sorted(name for name in rest if not name.startswith("buffers/")):
            raise WireError(f"key {unknown[0]!r} in the broadcast is not expected")
        shapes = self.model.shapes
        size = self.model.num_parameters
        if packed.dtype != torch.uint8 or packed.shape != (-(-size // 8),):
            raise WireError(
                f"the mask must be {-(-size // 8)} bytes for {size} parameters, got "
                f"{packed.dtype} {tuple(packed.shape)}"
            )
        mask = unpack_bits(packed, size)
        if values.shape != (int((~mask).sum()),) or not values.is_floating_point():
            raise WireError(
                f"the mask leaves {int((~mask).sum())} shared entries, got {values.dtype} "
                f"{tuple(values.shape)}"
            )
        whole = values.new_zeros(size).masked_scatter(~mask, values)
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]

        def named(vector: Tensor) -> Tensors:
            return {
                name: part.reshape(shape)
                for (name, shape), part in zip(shapes.items(), vector.split(sizes), strict=True)
            }

        return Broadcast(
            named(whole),
            {name.removeprefix("buffers/"): rest[name] for name in sorted(rest)},
            named(mask),
        )

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that starts at w_i ⊙ M + w_g ⊙ (1 − M)."""
        return Work(
            combined(state.params, broadcast), {**state.buffers, **broadcast.buffers}, memo={}
        )

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the curvature that `batch` adds."""
        return Survey(
            diagonal(self.model, work.params, work.buffers, batch, self.config.curvature), {}
        )

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return w_i as state, and (n_i, w_i, sigma_i)."""
        number = count(data)
        prior = self.precision(number.to(data.mask.dtype))
        variance = {name: value + prior for name, value in work.survey.total.items()}
        if self.config.ranking != "printed":
            variance = {name: 1 / value for name, value in variance.items()}
        sent = {name: value for name, value in work.buffers.items() if name not in state.buffers}
        return self.kept(state, work), Update(number, work.params, variance, sent)

    def precision(self, number: Tensor) -> Tensor:
        """Return delta, the precision of the prior [eq. 2]."""
        if self.config.delta is not None:
            return torch.full_like(number, self.config.delta)
        return (
            self.training.weight_decay * number
            if self.training.weight_decay
            else torch.ones_like(number)
        )

    def kept(self, state: State, work: Work) -> State:
        """Return what stays on the client."""
        kept = {name: work.buffers[name] for name in state.buffers}
        return state._replace(params=work.params, buffers=kept)

    def adapt(self, state: State, broadcast: Broadcast, data: Batch, purpose: Purpose) -> Work:
        """Return the work of fitting the personal entries to the
        shared ones, which the memo holds.
        """
        return self.begin(state, broadcast, data)._replace(memo=broadcast)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the mean loss of a batch; while a new client fits, the shared entries are w_g's,
        whatever the optimiser does to them.
        """
        if phase.name == FIT:
            params = combined(params, work.memo)
        return super().loss(params, work, batch, noise, phase)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the fitted model; of fine-tuning the state beside it."""
        if purpose == "finetune":
            return state._replace(tuned={**work.params, **work.buffers})
        return self.kept(state, work._replace(params=combined(work.params, work.memo)))

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of w_i ⊙ M + w_g ⊙ (1 − M), or of that fine-tuned."""
        if view == "personal" and state.tuned:
            logits, _ = self.model.forward(state.tuned, {}, x, train=False)
            return self.model.probabilities(logits)
        buffers: dict[str, Any] = {**state.buffers, **broadcast.buffers}
        logits, _ = self.model.forward(combined(state.params, broadcast), buffers, x, train=False)
        return self.model.probabilities(logits)

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return also the method's own posterior of the last layer's weights, 1 / (h + delta)
        [eq. 2].
        """
        found = super().posterior(params, broadcast, seen, layer)
        if seen is not None:
            std = (seen.diagonal + self.precision(seen.number)).rsqrt()
            found["own"] = independent(std, "FedBPS's curvature of the last layer under its prior")
        return found


def combined(own: Tensors, broadcast: Broadcast) -> Tensors:
    """Return own ⊙ M + w_g ⊙ (1 − M) by name."""
    return {
        name: torch.where(mask, own[name], broadcast.params[name])
        for name, mask in broadcast.mask.items()
    }
