"""The contract: the two halves of a method, the types they exchange, and the names used everywhere.

Symbols

    paper            here                  meaning
    theta_k, w_i     params                trainable tensors of one client, by name
    gamma, theta     broadcast.params      what the server sends
    n_k, N_k         num_examples          training samples of a client (int64, 0-d)
    m^(t)            state                 what a half remembers from round to round
    omega, pi, g     (names of a half)     weights of clients in an average

A *state*, *broadcast* or *update* is a NamedTuple whose fields are tensors, or dicts of tensors by
name. Numbers are 0-d tensors. So one piece of code stacks, saves and sends all of them (`tree.py`).

A *statistic* is a finite map from names to tensors. Two statistics are added name by name and a
missing name counts as zero: the empty map is the identity. Names use "/" between levels, e.g.
"params/fc.weight" or "alpha/17".

Halves hold configuration only; every function is pure. They never import flwr.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from .maths.gradients import grad_and_value
from .maths.laplace import Posterior as Posterior  # part of the contract
from .maths.laplace import Seen, fitted, last_weights
from .maths.portions import Portions
from .networks.model import Anatomy, Batch
from .shown import Heading, Picture
from .tree import Shapes, Tensors, flatten, map_tree, matching, shapes, stack, unflatten
from .work import Phase as Phase  # these three are part of the contract
from .work import Survey as Survey
from .work import Work as Work

if TYPE_CHECKING:
    from .maths.exact import Scaled
    from .maths.tops import Top
    from .networks.model import Model

Statistic = Mapping[str, "Tensor | Scaled"]
Sum = Mapping[str, Tensor]
Purpose = Literal["train", "finetune", "new"]
Weight = Literal["precision", "certainty", "log_weight", "claimed"]
Held = Literal["slope", "factor", "exact"]  # what a client keeps as well
Kind = Literal["model", "root", "buffers", "count", "rows", "other"] | Held | Weight


class ServerHalf(Portions, ABC):
    """The server half of a method.

    A method needs `init`, `broadcast`, `statistic`, `finalise` and `expects`; all else is optional.
    """

    state_type: ClassVar[type]
    broadcast_type: ClassVar[type]
    per_client: ClassVar[bool] = False  # True if `broadcast` depends on the client
    shares_nothing: ClassVar[bool] = False  # True for the baseline that others are compared with

    def __init__(self, config: Any, anatomy: Anatomy) -> None:
        self.config = config
        self.anatomy = anatomy

    # -- round -------------------------------------------------------------------------------------
    @abstractmethod
    def init(self, params: Tensors, buffers: Tensors, clients: tuple[int, ...]) -> Any:
        """Return the state before the first round."""

    @abstractmethod
    def broadcast(self, state: Any, client: int) -> Any:
        """Return what `client` is sent."""

    def broadcasts(self, state: Any, clients: tuple[int, ...]) -> Any:
        """Return what `clients` are sent, stacked. Only the fused engine asks, if `per_client`."""
        return stack([self.broadcast(state, client) for client in clients])

    @abstractmethod
    def statistic(self, state: Any, client: int, update: Any) -> Statistic:
        """Return the client's element of the monoid: tensors by name (`Scaled` for products)."""

    def summand(self, state: Any, client: int, update: Any) -> Statistic:
        """Return what a secure sum adds in place of `statistic`: made on the client, where `state`
        is the broadcast; its names and shapes must be the same for all clients.
        """
        return self.statistic(state, client, update)

    @abstractmethod
    def finalise(self, state: Any, total: Sum) -> Any:
        """Return the next state from the sum of all statistics; of an empty sum `state` itself."""

    def refined(self, state: Any, update: Any) -> Any:
        """Return the state after a round with the update of `ClientHalf.refiner`."""
        return state

    def total(self, state: Any, clients: tuple[int, ...], updates: Any) -> Sum | None:
        """Return the sum of the statistics of stacked updates, in float64 on their device, as fast
        as it goes: its last bits may depend on the order. Only the fused engine asks; None: it adds
        the statistics one by one.
        """
        return None

    def negligible(self, names: Iterable[str]) -> set[str]:
        """Return the names of a running total that `finalise` will not need, to save memory."""
        return set()

    # -- wire --------------------------------------------------------------------------------------
    @abstractmethod
    def expects(self, state: Any) -> Any:
        """Return an update whose tensors have the names, shapes and dtypes a client must send;
        values mean nothing.
        """

    def pack(self, broadcast: Any) -> Tensors:
        """Return what travels of a broadcast, by name."""
        return flatten(broadcast)

    def packs_alike(self, broadcast: Any) -> bool:
        """Return whether `pack` gives the same shapes for all clients of a stacked broadcast."""
        return type(self).pack is ServerHalf.pack

    def unpack(self, state: Any, flat: Tensors) -> Any:
        """Return the update that `ClientHalf.pack` made `flat` of; raise if it cannot be one.
        Values are checked to be finite.
        """
        return matching(flat, self.expects(state))

    def shared(self, state: Any) -> Tensors:
        """Return the shared parameters and buffers in `state`, by name."""
        return {**state.params, **state.buffers}

    # True if the state is the average of whole models by sample count (params, buffers) and nothing
    # else: then the method can run inside another strategy, such as Flower's wrappers for
    # differential privacy
    averages_models: ClassVar[bool] = False
    velocities: ClassVar[tuple[str, ...]] = ()  # fields of the state: the server's past steps alone

    # -- guard -------------------------------------------------------------------------------------
    # what the fields of an update are, by name or by "name/" and what follows:
    #   model      a model, or a part of one: must stay near the one that was sent (max_change)
    #   slope      a gradient of the model: must stay small next to the model (max_change)
    #   precision  at most max_precision
    #   root       its square counts, so its size is at most the root of max_value
    #   buffers    running statistics: a variance must not be negative
    # every other number is at most max_value. Next to the other clients (robust, rounds/robust.py):
    #   certainty  positive numbers by which something counts
    #   rows       vectors, each of which stays short
    #   log_weight a logarithm of the weight of the whole update
    #   claimed    limited by `claims` alone
    #   factor     the change of natural parameters, of which all are cut by one number
    #   exact      both sides keep it: used as it is, or the whole update is refused
    update_fields: ClassVar[Mapping[str, Kind]] = {"params": "model", "buffers": "buffers"}
    has_claims: ClassVar[bool] = False  # if `claims` names something: max_share then holds a round
    adds_up: ClassVar[bool] = False  # if a change is this round's move and the sum of all moves

    def check(self, state: Any, client: int, update: Any) -> str | None:
        """Return why a well-formed update (shapes, dtypes, finite) must not be used, or None."""
        return None

    def bounds(
        self, state: Any, client: int, update: Any, limits: Any, training: Any
    ) -> str | None:
        """Return why an update goes beyond what `limits` allow a client to claim, or None; asked
        after the bounds that `update_fields` declares.
        """
        return None

    def claims(self, state: Any, update: Any) -> dict[str, float]:
        """Return sizes by name by which the update counts next to those of others."""
        return {}

    def reduced(self, state: Any, update: Any, factors: Mapping[str, float]) -> Any:
        """Return the update with the claims named in `factors` multiplied by them."""
        return update

    @property
    def comparable(self) -> bool:
        """Return whether honest clients' updates are alike in size, so that `robust` may bound one
        by the others.
        """
        return True

    def sent_entries(self, state: Any) -> Tensors:
        """Return by name which entries of the model clients were sent, as bool; {} = all. The
        others differ by more, and are limited apart.
        """
        return {}

    def present(self, state: Any, updates: Any) -> Tensors:
        """Return by flat name ("params/fc.weight") which entries of stacked updates travelled, as
        bool; a missing name: all did. `robust` counts the others as unchanged and never cuts them.
        """
        return {}

    def stacked_claims(self, state: Any, updates: Any) -> Tensors:
        """Return `claims` of stacked updates: by name one number a client, 0 = none."""
        return {}

    def stacked_reduced(self, state: Any, updates: Any, factors: Tensors) -> Any:
        """Return `reduced` of stacked updates."""
        return updates

    # -- membership --------------------------------------------------------------------------------
    def admit(self, state: Any, client: int) -> Any:
        """Return the state with a client that begins in the middle of a run; called once each."""
        return state

    def forget(self, state: Any, client: int) -> Any:
        """Return the state without what a client that left adds to totals; its own part is kept."""
        return state

    # -- display -----------------------------------------------------------------------------------
    # headings of the numbers in `report`; "name/" stands for all numbers below it, one line each
    headings: ClassVar[Mapping[str, Heading]] = {}

    def report(self, state: Any) -> dict[str, float]:
        """Return what a person wants to see of the last round."""
        return {}

    def pictures(self, state: Any) -> tuple[Picture, ...]:
        """Return what a person wants to see of the last state of a run."""
        return ()


class ClientHalf(ABC):
    """The client half of a method. All functions but `phases` and `noise` are run under
    `torch.func.vmap` by the fused engine.

    A method needs `init`, `begin`, `finish` and `predict`, and usually a `loss`; no more.
    """

    state_type: ClassVar[type]
    update_type: ClassVar[type]
    needs_base: ClassVar[bool] = False  # True if there must be layers before the head
    needs_classes: ClassVar[bool] = False  # True if targets must be classes
    one_network: ClassVar[bool] = True  # False if a personal model is more, without `top`
    # a half that the server runs after each round, on samples without labels (`server_data`)
    refiner: ClassVar[type[ClientHalf] | None] = None

    def __init__(self, config: Any, training: Any, model: Model) -> None:
        self.config = config
        self.training = training
        self.model = model

    # -- round -------------------------------------------------------------------------------------
    @abstractmethod
    def init(self, params: Tensors, buffers: Tensors) -> Any:
        """Return the state of a client that has not trained, from the seeded initial model."""

    @abstractmethod
    def begin(self, state: Any, broadcast: Any, data: Batch) -> Work:
        """Return the work of a round."""

    @abstractmethod
    def finish(self, state: Any, work: Work, data: Batch) -> tuple[Any, Any]:
        """Return (the client's next state, the update)."""

    def adapt(self, state: Any, broadcast: Any, data: Batch, purpose: Purpose) -> Work:
        """Return the work of `phases(purpose)`: "finetune", or "new" with a state from `init`."""
        return self.begin(state, broadcast, data)

    def finish_adapting(self, state: Any, work: Work, data: Batch, purpose: Purpose) -> Any:
        """Return the state to predict with after the phases of `purpose`."""
        return self.finish(state, work, data)[0]

    @abstractmethod
    def predict(self, view: str, state: Any, broadcast: Any, x: Tensor, noise: Tensors) -> Tensor:
        """Return class probabilities (N, C) of the model called `view`."""

    # -- training ----------------------------------------------------------------------------------
    survey_size: int = 0  # samples of one `survey`; 0 = no pass over the data after training

    @classmethod
    def refuses(cls, config: Any, training: Any) -> str | None:
        """Return why the method cannot train with these settings of local training, or None."""
        return None

    @property
    def plain_loop(self) -> bool:
        """Return whether a round is only steps down `loss`, which a user's own loop can do."""
        return True

    def phases(self, purpose: Purpose) -> tuple[Phase, ...]:
        """Return the phases of a round ("train"), before a test ("finetune"), of a "new" client."""
        return (self.training.phase("local"),) if purpose == "train" else ()

    def noise(self, stage: str, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the standard normal noise one call of `stage` (a phase's name, or
        "predict") needs, for a full batch: a half that gets fewer samples uses the first rows.
        """
        return {}

    def loss(
        self, params: Tensors, work: Work, batch: Batch, noise: Tensors, phase: Phase
    ) -> tuple[Tensor, Tensors]:
        """Return (the objective to minimise on one batch, the buffers after the forward pass)."""
        logits, buffers = self.model.forward(
            params, work.buffers, batch.x, train=True, mask=batch.mask
        )
        return self.model.mean_nll(logits, batch.y, batch.mask), buffers

    def gradient(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return (gradient of what moves, buffers, loss) of one step. Default: that of `loss`."""
        moving = {name: work.params[name] for name in phase.moving(work.params)}

        def objective(moving: Tensors) -> tuple[Tensor, Tensors]:
            return self.loss({**work.params, **moving}, work, batches[0], noise, phase)

        grads, (loss, buffers) = grad_and_value(objective, has_aux=True)(moving)
        return grads, buffers, loss

    def step(
        self, phase: Phase, work: Work, batches: tuple[Batch, ...], noise: Tensors
    ) -> tuple[Work, Tensors]:
        """Return (the work after one step, what a person wants to see). Default: one step of the
        optimiser down `gradient`; the fused engine does it on stacks in place. A half that
        overrides it is stepped as it says.
        """
        grads, buffers, loss = self.gradient(phase, work, batches, noise)
        old = {name: work.params[name] for name in grads}
        moved, opt = phase.optimizer.update(old, grads, work.opt)
        params = {**work.params, **moved}
        return work._replace(params=params, buffers=buffers, opt=opt), {"loss": loss}

    def survey(self, work: Work, batch: Batch) -> Survey:
        """Return what `batch` adds to the pass over all training data after the phases of a round;
        padding must add nothing to `total`.
        """
        raise NotImplementedError

    # -- wire --------------------------------------------------------------------------------------
    private: ClassVar[tuple[str, ...]] = ()  # fields of the state that never travel
    # leaves of an update whose values `packed_shapes` reads, by the beginning of their names
    sized_by: ClassVar[tuple[str, ...]] = ()

    def pack(self, update: Any) -> Tensors:
        """Return what travels of an update, by name; its shapes may depend on the values."""
        return flatten(update)

    def packed_shapes(self, updates: Any) -> list[Shapes]:
        """Return the shapes of `pack` for each of stacked updates, without packing them."""
        alike = shapes(map_tree(lambda leaf: leaf[0], updates))
        return [alike] * int(next(iter(flatten(updates).values())).shape[0])

    def unpack(self, kind: type, flat: Tensors) -> Any:
        """Return the broadcast, of type `kind`, that `ServerHalf.pack` made `flat` of."""
        return unflatten(kind, flat)

    # -- membership --------------------------------------------------------------------------------
    def rejoined(self, state: Any) -> Any:
        """Return the state with which a client that was forgotten goes on."""
        return state

    def lost(self, state: Any) -> Any:
        """Return the same for one whose last state is gone: from an older one, or from `init`."""
        return state

    # -- display -----------------------------------------------------------------------------------
    shapes_features: ClassVar[bool] = False  # True if it is about features: the report shows them

    def views(self) -> dict[str, str]:
        """Return the models that `predict` can show, each with a description; one is "personal"."""
        return {"personal": "the client's own model"}

    def remark(self) -> str | None:
        """Return a line if the method is not what its name promises on this network."""
        return None

    def spread(self, state: Any, broadcast: Any) -> Tensors:
        """Return the spread of the personal model's weights in the state, for `posterior`."""
        return {}

    def extra_of(self, state: Any) -> Tensors:
        """Return the parameters of the task that only this client has, by name."""
        return {}

    def top(self) -> Top | None:
        """Return what stands in the place of the head in a personal model; None = the head."""
        return None

    def topped(self, state: Any, broadcast: Any) -> tuple[Tensors, Tensors]:
        """Return (parameters, buffers) of the personal model with its `top`, by name."""
        raise NotImplementedError

    def posterior(
        self, params: Tensors, broadcast: Any, seen: Seen | None, layer: str | None
    ) -> dict[str, Posterior]:
        """Return the posteriors over the logits of a personal model with these parameters, by name;
        held-out samples decide which is used, at what scale. `seen` is what the last layer, called
        `layer`, got of the training data; None if the logits are not a Linear layer's output.
        """
        if seen is None or layer is None:
            return {}
        return {"laplace": fitted(seen, last_weights(params, layer))}
