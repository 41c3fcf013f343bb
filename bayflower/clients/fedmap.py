"""FedMAP, client half (Zhang et al., "FedMAP: Bi-Level MAP Optimization", arXiv 2405.19000v1): MAP
training of a personal model.

    paper      here                   shape
    theta_k    state.params           by name: the personal model, continued from round to round
    gamma      work.memo.params       by name: mean of the prior, constant during the round
    sigma^2    config.sigma2          ()
    N_k        num_examples           ()
    J_k        objective              ()

    J_k(theta) = (1/N_k) Σ_i −log p(y_i|x_i, theta) + ‖theta − gamma‖² / (2 sigma²)     [eq. 7]
    log omega_k = −J_k(theta_k)/tau                                     (`mean`)        [eq. 8]

With `prior=learned` or `full` the prior is N(gamma, Sigma), both learned, and Sigma counts against
the *summed* NLL: N_k J_k = Σ_i −log p + ½ (theta − gamma)ᵀ Sigma⁻¹ (theta − gamma). So a client
with few samples stays near gamma. Up to SMALL parameters its posterior is found by Newton's method,
with a full covariance (`maths/hierarchy.py`); exact for linear models with Gaussian noise. Larger
networks are trained as usual, and the diagonal of the generalised Gauss–Newton matrix gives the
variances. Predictions include the posterior's uncertainty: all of it for small models, that of the
last layer for networks. A client that never trained has the prior itself.

What distinguishes it from FedProx with mu = 1/sigma²: a round continues from the client's own
theta_k, and clients are weighted by how well their models explain their data.

Departs:
  E-M1  log omega instead of omega; the Gaussian's constant is dropped because it cancels.
  E-M2  `weights=mean` by default; `sum` is the printed [eq. 8], `count` multiplies by N_k,
        `uniform` is equal weights.
  E-M3  the prior is added to the *mean* NLL [eq. 7], not to the sum [eq. 6]; so clients of
        different size are tied equally.
  E-M8  an "arg min" in the algorithm is some epochs of the optimiser. BatchNorm's scale and shift
        are part of theta; its running statistics stay on the client.
  A client that never trained starts at gamma and fits [eq. 7] for `new_client_epochs`. A noise that
is learned has a prior worth one sample of N_k (`Task.extra_prior`). E-M6 (the generator) is in
data/synthetic.py, E-M7 (balanced accuracy) in metrics.py, E-M9 (averages) in the experiment's table
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import ClientHalf, Phase, Purpose, Survey, Work
from ..errors import ConfigError
from ..maths import hierarchy
from ..maths.curvature import at_once, diagonal
from ..maths.laplace import WIDE, Posterior, Seen, of_parameters
from ..maths.scoring import stds
from ..networks.last import forward_last, last_layer
from ..networks.model import Batch, Model, masked_mean
from ..strategies.fedmap import FULL, Broadcast, Update, too_large
from ..tasks import EXTRA
from ..tree import Tensors, choose, map_tree
from .fedavg import count
from .fedprox import sq_distance

STEPS = 2  # Newton steps in a round
NEW_STEPS = 12  # of a client that never trained


class Solving(NamedTuple):
    """The prior of a small model, and the client's place in it."""

    params: Tensors
    root: Tensor
    z: Tensor


class Known(NamedTuple):
    """The prior of a network, and how many samples it stands against."""

    params: Tensors
    std: Tensors
    number: Tensor


class State(NamedTuple):
    """The personal model (it travels, by the method's definition), its running statistics, whether
    it has trained, and under a learned prior how certain it is: "covariance", or variances by name.
    """

    params: Tensors
    buffers: Tensors
    started: Tensor  # bool
    belief: Tensors = {}


class Client(ClientHalf):
    """Fits its personal model under the prior N(gamma, sigma² I)."""

    state_type = State
    update_type = Update
    private = ("buffers",)
    survey_size = 1024

    def __new__(cls, config: Any = None, training: Any = None, model: Any = None) -> Client:
        """Return the client of this prior: a learned one has halves of its own."""
        kind = cls
        if cls is Client and config is not None and config.learns:
            solved = config.solves({name: torch.empty(s) for name, s in model.shapes.items()})
            kind = Solver if solved else Learner
        return super().__new__(kind)

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why a prior cannot be learned with these settings, or None."""
        usual = {"mixup": 0.0, "label_smoothing": 0.0, "class_weights": "none"}
        wrong = [name for name, off in usual.items() if getattr(training, name) != off]
        if config.learns and wrong:
            return f"{wrong[0]} changes the likelihood; switch it off, or set prior=fixed"
        return None

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return one stretch of local training; a new client fits its model from gamma; nothing
        before a test.
        """
        if purpose == "finetune":
            return ()
        epochs = self.training.new_client_epochs if purpose == "new" else None
        return (self.training.phase("local" if purpose == "train" else "fit", epochs=epochs),)

    def views(self) -> dict[str, str]:
        """Return the personal model and the prior's mean."""
        return {
            "personal": "the client's own MAP model",
            "global": "the mean of the prior after the last round",
        }

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return a state that will start at the first gamma it is sent."""
        return State(params, buffers, torch.zeros((), dtype=torch.bool))

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that continues theta_k, or starts at gamma the first time."""
        params = choose(state.started, state.params, broadcast.params)
        known = Known(broadcast.params, {}, data.mask.sum()) if EXTRA in params else broadcast
        return Work(params, state.buffers, memo=known)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return J_k on one batch [eq. 7], and the prior of what the task learns itself."""
        nll, buffers = super().loss(params, work, batch, noise, phase)
        if EXTRA in params:
            nll = nll + self.model.task.extra_prior(params[EXTRA]) / work.memo.number
        return nll + self.prior(params, work.memo.params), buffers

    def prior(self, params: Tensors, gamma: Tensors) -> Tensor:
        """Return ‖theta − gamma‖² / (2 sigma²)."""
        return sq_distance(params, gamma) / (2 * self.config.sigma2)

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return theta_k as state, and (theta_k, log omega_k, N_k)."""
        number = count(data)
        weight = self.log_weight(
            work.survey.total,
            self.prior(work.params, work.memo.params).double(),
            number.double(),
        )
        return State(work.params, work.buffers, torch.ones_like(state.started)), Update(
            number, weight, work.params
        )

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return Σ_i −log p(y_i|x_i, theta_k) of a batch, in evaluation mode (float64)."""
        logits, _ = self.model.forward(work.params, work.buffers, batch.x, train=False)
        nll = self.model.nll(logits, batch.y, batch.mask)
        return Survey((nll * batch.mask).sum(dtype=torch.float64), {})

    def log_weight(self, sum_nll: Tensor, prior: Tensor, number: Tensor) -> Tensor:
        """Return log omega_k [eq. 8] in the chosen reading (E-M2, E-M3)."""
        mode, tau = self.config.weights, self.config.tau
        if mode == "uniform":
            return torch.zeros_like(sum_nll)
        if mode == "sum":
            return -sum_nll - prior
        objective = sum_nll / number + prior
        return -objective / tau + (number.log() if mode == "count" else 0)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the fitted model."""
        return State(work.params, work.buffers, torch.ones_like(state.started))

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return class probabilities of theta_k (gamma if the client has not trained), or of gamma
        for `global`.
        """
        own = state.started & (view != "global")
        params = choose(own, state.params, broadcast.params)
        logits, _ = self.model.forward(params, state.buffers, x, train=False)
        return self.model.probabilities(logits)


class Learner(Client):
    """Fits a network under a prior whose variances are learned: a diagonal posterior."""

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        if config.prior == "full" and model.num_parameters > FULL:
            raise ConfigError(too_large(model.num_parameters))
        if model.task.coupled:
            raise ConfigError(
                "a prior is learned from samples that are independent, and those of this task are "
                "not; set prior=fixed"
            )
        self.survey_size = at_once(model, training.batch_size, "fisher")
        self.layer = last_layer(model)

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return a state that believes nothing yet."""
        belief = {name: torch.zeros_like(value) for name, value in params.items()}
        return super().init(params, buffers)._replace(belief=belief)

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that continues theta_k, or starts at gamma the first time."""
        params = choose(state.started, state.params, broadcast.params)
        memo = Known(broadcast.params, stds(broadcast.prior), data.mask.sum())
        return Work(params, state.buffers, memo=memo)

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return the summed NLL and minus the log prior, both divided by N_k, on one batch."""
        nll, buffers = ClientHalf.loss(self, params, work, batch, noise, phase)
        squares = [value.square().sum() for value in self.places(params, work.memo).values()]
        return nll + sum(squares[1:], squares[0]) / (2 * work.memo.number), buffers

    def places(self, params: Tensors, memo: Known) -> Tensors:
        """Return z = (theta − gamma) / sigma by name."""
        return {name: (params[name] - memo.params[name]) / std for name, std in memo.std.items()}

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return the summed NLL of a batch, and the diagonal of its curvature."""
        found = diagonal(self.model, work.params, work.buffers, batch)
        return Survey((super().survey(work, batch).total, found), {})

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return the posterior as state and as update, with N_k and the evidence."""
        return self.finished(state, work, data)

    def finished(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return state and update of a model that is fitted."""
        belief, sent, evidence = self.believed(work, data)
        after = State(work.params, work.buffers, torch.ones_like(state.started), belief)
        return after, Update(count(data), evidence, {}, sent)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the fitted model with its posterior; adapting made no survey."""
        total: Any = None
        for start in range(0, data.x.shape[0], self.survey_size):
            part = Batch(*(tensor[start : start + self.survey_size] for tensor in data))
            found = self.survey(work, part).total
            total = found if total is None else map_tree(torch.add, total, found)
        return self.finished(state, work._replace(survey=Survey(total, {})), data)[0]

    def believed(self, work: Work, data: Batch) -> tuple[Tensors, Tensors, Tensor]:
        """Return (what the client keeps of its posterior, what it sends, its evidence)."""
        nll, curvature = work.survey.total
        z, std = self.places(work.params, work.memo), work.memo.std
        ratio = {name: value * std[name].square() for name, value in curvature.items()}
        logs = [
            (z[name].double().square() + value.double().log1p()).sum()
            for name, value in ratio.items()
        ]
        sent = {f"z/{name}": value for name, value in z.items()}
        sent |= {f"data/{name}": value / (1 + value) for name, value in ratio.items()}
        variance = {name: std[name].square() / (1 + value) for name, value in ratio.items()}
        return variance, sent, -nll - 0.5 * sum(logs[1:], logs[0])

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return the prediction with the uncertainty of the last layer, under the posterior, or
        under the prior (`global`, and a client that has not trained).
        """
        own = state.started & (view != "global")
        params = choose(own, state.params, broadcast.params)
        prior = {name: value.square() for name, value in stds(broadcast.prior).items()}
        variance = choose(own, state.belief, prior)
        out, features = forward_last(self.model, params, state.buffers, x, self.layer)
        if features is None:
            return self.model.probabilities(out)
        spread = features.square() @ variance[f"{self.layer}.weight"].mT
        if f"{self.layer}.bias" in variance:
            spread = spread + variance[f"{self.layer}.bias"]
        return hierarchy.wide_prediction(self.model.task, out, torch.diag_embed(spread))

    def spread(self, state: State, broadcast: Broadcast) -> Tensors:
        """Return standard deviations of the posterior, those of the prior without training."""
        own = {name: value.sqrt() for name, value in state.belief.items()}
        found: Tensors = choose(state.started, own, stds(broadcast.prior))
        return found

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return the last layer's part of the posterior under the learned prior."""
        origin = "posterior under the learned prior"
        return {} if layer is None else {"laplace": of_parameters(params, layer, origin)}


class Solver(Learner):
    """Solves for the posterior of a small model, with its full covariance."""

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        super().__init__(config, training, model)
        self.survey_size = 0

    @property
    def plain_loop(self) -> bool:
        """Return False: a step is Newton's."""
        return False

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return a pass over the data that only looks; Newton's steps come after it."""
        return () if purpose == "finetune" else (self.training.phase("look", epochs=1),)

    def init(self, params: Tensors, buffers: Tensors) -> State:
        """Return a state that believes nothing yet."""
        d, one = hierarchy.size(params), next(iter(params.values()))
        belief = {WIDE: torch.zeros(d, d, dtype=torch.float64, device=one.device)}
        return super().init(params, buffers)._replace(belief=belief)

    def root(self, broadcast: Broadcast) -> Tensor:
        """Return the root of the prior's covariance."""
        if "root" in broadcast.prior:
            return broadcast.prior["root"].double()
        return torch.diag(hierarchy.vector(stds(broadcast.prior)))

    def begin(self, state: State, broadcast: Broadcast, data: Batch) -> Work:
        """Return the work that continues theta_k, or starts at gamma the first time."""
        gamma, root = broadcast.params, self.root(broadcast)
        center = hierarchy.vector(gamma)
        theta = hierarchy.vector(choose(state.started, state.params, gamma))
        z = hierarchy.started(theta, center, root)
        params = hierarchy.point(center + root @ z, gamma)
        return Work(params, state.buffers, memo=Solving(gamma, root, z))

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return the work as it is, and the loss before the round's steps."""
        batch = batches[0]
        out, _ = self.model.forward(work.params, work.buffers, batch.x, train=False)
        return work, {"loss": masked_mean(self.model.nll(out, batch.y, batch.mask), batch.mask)}

    def newton(self, work: Work, data: Batch, steps: int) -> Work:
        """Return the work after some Newton steps on all samples."""
        memo: Solving = work.memo
        center, z = hierarchy.vector(memo.params), memo.z
        for _ in range(steps):
            z = hierarchy.improved(
                self.model, z, center, memo.root, memo.params, work.buffers, data
            )
        theta = hierarchy.point(center + memo.root @ z, memo.params)
        return work._replace(params=theta, memo=memo._replace(z=z))

    def finish(self, state: State, work: Work, data: Batch) -> tuple[State, Update]:
        """Return the posterior after the round's steps."""
        return self.finished(state, self.newton(work, data, STEPS), data)

    def finish_adapting(self, state: State, work: Work, data: Batch, purpose: Purpose) -> State:
        """Return the posterior of a client that never trained."""
        return self.finished(state, self.newton(work, data, NEW_STEPS), data)[0]

    def believed(self, work: Work, data: Batch) -> tuple[Tensors, Tensors, Tensor]:
        """Return (what the client keeps of its posterior, what it sends, its evidence)."""
        memo: Solving = work.memo
        fit = hierarchy.fit(self.model, work.params, work.buffers, data)
        share = hierarchy.data_share(fit.precision, memo.root)
        covariance = hierarchy.spread(share, memo.root)
        sent = {"z": memo.z, "data": share}
        if EXTRA in work.params:
            shared = hierarchy.shared(self.model, work.params, work.buffers, data, covariance)
            sent |= {"extra_slope": shared.slope, "extra_information": shared.information}
        return {WIDE: covariance}, sent, hierarchy.evidence(fit.nll, memo.z, share)

    def spread(self, state: State, broadcast: Broadcast) -> Tensors:
        """Return the covariance of the posterior, that of the prior without training."""
        root = self.root(broadcast)
        return {WIDE: torch.where(state.started, state.belief[WIDE], root @ root.mT)}

    def predict(
        self, view: str, state: State, broadcast: Broadcast, x: Tensor, noise: Tensors
    ) -> Tensor:
        """Return the prediction with the whole uncertainty of posterior or prior."""
        own = state.started & (view != "global")
        params, root = choose(own, state.params, broadcast.params), self.root(broadcast)
        wide = torch.where(own, state.belief[WIDE], root @ root.mT)
        if EXTRA in params:  # what all clients share is as new as the broadcast
            params = {**params, EXTRA: broadcast.params[EXTRA]}
        out, _ = self.model.forward(params, state.buffers, x, train=False)
        _, rows = hierarchy.jacobians(self.model, params, state.buffers, x)
        spread = torch.einsum("bod,de,bpe->bop", rows, wide.to(rows.dtype), rows)
        return hierarchy.wide_prediction(self.model.task, out, spread)
