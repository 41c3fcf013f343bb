"""Errors a person can act on. Nothing heavy is imported here, so the command line starts fast."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

_types: dict[type, Mapping[str, Any]] = {}
# what settings are called elsewhere
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "eta"), ("lr",)),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), ("local_epochs",)),
    **dict.fromkeys(("num_rounds", "n_rounds", "num_server_rounds"), ("rounds",)),
    **dict.fromkeys(("label", "labels", "label_column", "y", "outcome"), ("target",)),
    **dict.fromkeys(("client", "client_column", "hospital", "group"), ("site", "sites")),
    **dict.fromkeys(("clients", "n_clients", "partitions"), ("num_clients",)),
    **dict.fromkeys(("network", "net", "module"), ("model",)),
    **dict.fromkeys(("batch", "bs"), ("batch_size",)),
    **dict.fromkeys(("gpu", "cuda"), ("device",)),
    **dict.fromkeys(("random_state", "seed_value"), ("seed",)),
}


class BayflowerError(Exception):
    """An error whose text is one line that names the cause and the remedy."""


class ConfigError(BayflowerError):
    """A setting that is not allowed; raised before a run starts."""


def field_types(kind: type) -> Mapping[str, Any]:
    """Return the types of a class's fields; Python alone would read its annotations every time."""
    if kind not in _types:
        _types[kind] = get_type_hints(kind)
    return _types[kind]


def hint_for(name: str, known: Iterable[str], method: str) -> str:
    """Return what to do about a name that is no setting."""
    names = list(known)
    close = [one for one in ELSEWHERE.get(name, ()) if one in names]
    close = close or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"`bayflower settings {method}` lists them"


def check_choices(config: Any) -> None:
    """Raise if a Literal field of `config` has a value that is not allowed."""
    for name, kind in field_types(type(config)).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            raise ConfigError(
                f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(config, name)!r}"
            )


def check_positive(config: Any, *names: str) -> None:
    """Raise if one of these settings is not a positive finite number."""
    for name in names:
        if not 0 < getattr(config, name) < float("inf"):
            raise ConfigError(f"{name} must be positive and finite, got {getattr(config, name)}")


def check_least(config: Any, **least: int) -> None:
    """Raise if a setting is below the number beside its name."""
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise ConfigError(f"{name} must be at least {bound}, got {getattr(config, name)}")


class FormatError(BayflowerError):
    """A file that another version of Bayflower wrote. It is whole, and must not be set aside."""


class WireError(BayflowerError):
    """A message that cannot be used; the text says what is wrong with it."""


class PolicyError(BayflowerError):
    """A request that the policy of a site forbids; the text names the rule."""


def in_one_line(error: BaseException, most: int | None = None) -> str:
    """Return an error's text in one line, of at most `most` characters."""
    return " ".join(str(error).split())[:most]


# what torch says of networks that it cannot map over clients, and what that means
UNMAPPED = {
    "randomness error mode": "it draws random numbers by a function of torch that has none for "
    "stacks; torch.rand, randn, normal, bernoulli and the layers of torch have",
    ".item()": "it reads a number out of a tensor: .item(), float(), int(), or a branch on a value",
    "data-dependent control flow": "it branches on the values of a tensor",
    "setup_context": "an autograd.Function in it has torch's older form, without setup_context, "
    "or a layer has a backward hook",
    "does not have vmap support": "an autograd.Function in it has no form for stacks; "
    "generate_vmap_rule = True gives it one",
    "requires_grad_()": "it takes gradients in forward() by torch.autograd; those of torch.func "
    "have a form for stacks",
    "memory_format": "it asks for another order in memory, such as channels_last; leave that out",
    "dynamic shape": "a shape in it depends on the values of a tensor",
}


def unmapped(error: Exception) -> str:
    """Return why a network cannot be mapped over clients, in the words of its author."""
    text = str(error)
    found = [meaning for words, meaning in UNMAPPED.items() if words in text]
    return found[0] if found else first_sentence(error)


def first_sentence(error: Exception) -> str:
    """Return the first sentence of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0][:200]
