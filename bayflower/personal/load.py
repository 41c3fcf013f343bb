"""A personal model loaded from its files: a torch module with probabilities and, if the method is
Bayesian, uncertainty.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..errors import BayflowerError, ConfigError
from ..files.atomic import below
from ..networks.papers import build
from ..tree import Tensors
from .made import FORMAT, Ready, as_probabilities

AT_ONCE = 16  # samples whose derivatives are in memory at a time


class Prediction(NamedTuple):
    """A Bayesian model's predictions for some samples."""

    mean: Tensor  # (N, C) class probabilities, averaged over the posterior
    std: Tensor  # (N, C) standard deviation of these probabilities over the posterior
    entropy: Tensor  # (N,) entropy of the mean in nats: the total uncertainty
    # (N,) the part of it due to uncertain weights, which more data would reduce
    information: Tensor


class Personal(nn.Module):
    """One client's own model. `forward` gives log-probabilities (N, C); `network` is the plain
    module inside.
    """

    def __init__(self, ready: nn.Module, card: dict[str, Any], std: Tensors | None = None) -> None:
        super().__init__()
        self.ready, self.card = ready, card
        self.names = sorted(std or {})
        for number, name in enumerate(self.names):
            self.register_buffer(f"std_{number}", (std or {})[name])

    @property
    def network(self) -> nn.Module:
        """Return the network, from prepared inputs to logits; if loaded without its factory, from
        inputs to probabilities.
        """
        return self.ready.network if isinstance(self.ready, Ready) else self.ready

    def train(self, mode: bool = True) -> Personal:
        """Set the mode of the network; an exported program has only one."""
        if isinstance(self.ready, Ready):
            super().train(mode)
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.ready(x).clamp(min=torch.finfo(torch.float32).tiny).log()  # type: ignore[no-any-return]

    def predict_proba(self, x: Tensor) -> Tensor:
        """Return class probabilities (N, C), without gradients."""
        with torch.no_grad():
            return self.ready(x)  # type: ignore[no-any-return]

    def predict(self, x: Tensor, samples: int = 100, seed: int = 0) -> Prediction:
        """Return mean and uncertainty of the class probabilities over the posterior of the weights;
        the draws follow from the seed.
        """
        if not self.names:
            raise BayflowerError(
                f"{self.card['title']} ends with a point estimate: this model has no posterior; "
                "use predict_proba"
            )
        if not isinstance(self.ready, Ready):
            raise ConfigError(
                "predict needs the network itself; load it with load_personal(path, model=Net)"
            )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            draws = self._sampled if self.card["posterior"]["kind"] == "sampled" else self._linear
            probs = draws(self.ready.prepared(x), samples, generator)  # (S, N, C)
        mean = probs.mean(0)
        entropy = entropies(mean)
        return Prediction(
            mean, probs.std(0), entropy, (entropy - entropies(probs).mean(0)).clamp(min=0)
        )

    def _deviations(self) -> Tensors:
        return {name: getattr(self, f"std_{number}") for number, name in enumerate(self.names)}

    def _sampled(self, x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Return the probabilities for draws of the weights."""
        params = dict(self.network.named_parameters())
        found = []
        for _ in range(samples):
            drawn = {
                name: params[name] + std * noise(std, generator)
                for name, std in self._deviations().items()
            }
            found.append(as_probabilities(functional_call(self.network, drawn, (x,))))
        return torch.stack(found)

    def _linear(self, x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Return the probabilities for draws of the logits of the network made linear: N(f(x), J
        diag(std²) Jᵀ).
        """
        known, stds = dict(self.network.named_parameters()), self._deviations()
        mean = {name: known[name].detach() for name in stds}

        def logits(params: Tensors, one: Tensor) -> Tensor:
            return functional_call(self.network, params, (one[None],))[0]

        found = []
        for part in x.split(AT_ONCE):
            slopes = vmap(jacrev(logits), in_dims=(None, 0))(mean, part)
            # (n, K, P)
            wide = torch.cat([(slopes[name] * stds[name]).flatten(2) for name in stds], 2)
            covariance = (wide @ wide.mT).double()
            tiny = 1e-9 * (1 + covariance.diagonal(dim1=1, dim2=2).mean(1))[:, None, None]
            root = torch.linalg.cholesky(
                covariance + tiny * torch.eye(covariance.shape[1], dtype=torch.float64)
            ).to(part.dtype)
            centre = self.network(part)
            draws = torch.randn(
                samples, *centre.shape, generator=generator, dtype=torch.float64
            ).to(centre)
            found.append(as_probabilities(centre + (root @ draws[..., None])[..., 0]))
        return torch.cat(found, 1)


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers of this shape."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def entropies(probs: Tensor) -> Tensor:
    """Return −Σ p log p over the last axis."""
    return -torch.special.xlogy(probs, probs).sum(-1)


def load_personal(path: Path | str, model: Callable[[], nn.Module] | None = None) -> Personal:
    """Return the personal model in a folder, in evaluation mode.

    Bayflower's networks are built by name; your own by `model`, the factory it was trained with.
    Without `model`, the exported program (model.pt2) is loaded if it exists: it gives probabilities
    but has no posterior.
    """
    folder = Path(path)
    if folder.name == "card.json":
        folder = folder.parent
    card = read_card(folder)
    extras = (
        tensors(folder / "extras.safetensors") if (folder / "extras.safetensors").exists() else {}
    )
    recipe = card["network"]["recipe"]
    if model is None and recipe is None:
        return Personal(program(folder), card, below(extras, "std")).eval()
    built = (
        model
        if model is not None
        else build(
            recipe["name"], tuple(recipe["input_shape"]), recipe["num_classes"], recipe["features"]
        ).factory
    )
    with torch.random.fork_rng(devices=[]):
        network = built()
    state = tensors(folder / "model.safetensors")
    network.to(
        next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
    )
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the network does not fit {folder / 'model.safetensors'}: {reason}; give the factory "
            "it was trained with"
        ) from None
    return Personal(
        Ready(network.eval(), below(extras, "input")), card, below(extras, "std")
    ).eval()


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card of a personal model."""
    path = folder / "card.json"
    try:
        card = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); give the folder that `bayflower export` wrote"
        ) from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ConfigError(
            f"{path} is not the card of a personal model of this version ({FORMAT}); export it "
            "again"
        )
    return card


def tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); export the model again") from None


def program(folder: Path) -> nn.Module:
    """Return the exported program as a module."""
    path = folder / "model.pt2"
    if not path.exists():
        raise ConfigError(
            f"{folder} holds a network of your own; load it with load_personal(path, model=Net), "
            "where Net is its class"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own future
        return torch.export.load(path).module()  # type: ignore[no-any-return]
