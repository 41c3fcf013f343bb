"""The samples and the noise of every step: functions of (seed, client, round, ...) only, hence the
same on every engine.

A *stream* is a name for one kind of draw. Two draws are independent if their seed, stream or keys
differ; always use a stream with the same number of keys, because numpy's SeedSequence cannot tell a
missing last key from a zero.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..contract import Phase
from ..errors import BayflowerError, ConfigError
from ..stacked.chance import GAMMA, further, mixed, shifted
from ..stacked.routes import has_kernels
from . import shuffles

Group = tuple[np.ndarray, ...]
SECRET = "secret/"  # names of noise that does not follow from the seed begin with this


def rng(seed: int, stream: str, *keys: int) -> np.random.Generator:
    """Return the generator of (seed, stream, keys): Philox, whose output is the same on every
    platform.
    """
    check_seed(seed)
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, crc32(stream.encode()), *keys]))
    )


def check_seed(seed: int) -> None:
    """Raise if a seed does not fit into 32 bits."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be in [0, {2**32 - 1}], got {seed}")


def num_steps(num_examples: int, phase: Phase, coupled: bool) -> int:
    """Return how many steps `plan` gives, without drawing them."""
    batches = len(_sizes(num_examples, phase, coupled))
    return phase.steps if phase.steps else -(-phase.epochs * batches // phase.batches)


def largest_batch(num_examples: int, phase: Phase, coupled: bool) -> int:
    """Return the size of the largest batch of `plan`: batch_size + 1 where a last single sample
    joined the batch before it.
    """
    return max(_sizes(num_examples, phase, coupled))


def plan(
    num_examples: int,
    phase: Phase,
    *,
    seed: int,
    client: int,
    round: int,
    purpose: str,
    coupled: bool,
) -> list[Group]:
    """Return for each step its `phase.batches` mini-batches, as arrays of sample numbers.

    The mini-batches are cut from one endless sequence of shuffled epochs; an epoch's last batch may
    be smaller. In epochs mode there are epochs x (batches of an epoch) of them, completed from a
    further shuffle where the last step would lack some. With `coupled` (layers such as BatchNorm,
    which need two samples) a last batch of one sample joins the batch before it. A longer phase
    begins like a shorter one.
    """
    sizes = _sizes(num_examples, phase, coupled)
    steps = num_steps(num_examples, phase, coupled)
    generator = rng(seed, f"batches/{purpose}/{phase.name}", client, round)
    cuts = np.cumsum(sizes)[:-1]
    epochs = -(-steps * phase.batches // len(sizes))
    stream = [
        batch
        for _ in range(epochs)
        for batch in np.split(generator.permutation(num_examples), cuts)
    ]
    return [
        tuple(stream[step * phase.batches : (step + 1) * phase.batches]) for step in range(steps)
    ]


class Layout(NamedTuple):
    """Where the batches of many clients lie in one array: a function of their sizes alone."""

    sizes: tuple[int, ...]  # samples of each client
    epochs: tuple[int, ...]  # shuffles that each client needs
    begins: tuple[int, ...]  # where each client's shuffled samples begin, one client after another
    places: np.ndarray  # (steps, clients, phase.batches, width): which of them; the last: none


def layout(sizes: Sequence[int], phase: Phase, *, coupled: bool, steps: int, width: int) -> Layout:
    """Return the layout of `table`."""
    known = np.asarray(sizes)
    epochs, cuts_of = np.empty(len(known), np.int64), {}
    for size in np.unique(known).tolist():
        cuts_of[size] = cuts = _sizes(size, phase, coupled)
        count = num_steps(size, phase, coupled)
        epochs[known == size] = -(-count * phase.batches // len(cuts))
    ends = np.cumsum(epochs * known)
    begins = ends - epochs * known
    rows = np.full((steps, len(known), phase.batches, width), ends[-1], np.int64)
    for size, cuts in cuts_of.items():
        places = np.flatnonzero(known == size)
        times, count = int(epochs[places[0]]), num_steps(size, phase, coupled)
        orders = begins[places, None] + np.arange(times * size)
        orders = orders.reshape(len(places), times, size)
        drawn = np.full((len(places), times, len(cuts), width), ends[-1], np.int64)
        whole = size - cuts[-1]  # all batches are full but perhaps the last
        if len(cuts) > 1:
            full = orders[:, :, :whole].reshape(len(places), times, -1, phase.batch_size)
            drawn[:, :, :-1, : phase.batch_size] = full
        drawn[:, :, -1, : cuts[-1]] = orders[:, :, whole:]
        flat = drawn.reshape(len(places), -1, width)[:, : count * phase.batches]
        rows[:count, places] = flat.reshape(len(places), count, phase.batches, width).swapaxes(0, 1)
    return Layout(
        tuple(known.tolist()), tuple(epochs.tolist()), (*begins.tolist(), int(ends[-1])), rows
    )


def table(
    known: Layout, clients: Sequence[int], name: str, *, seed: int, round: int, purpose: str
) -> np.ndarray:
    """Return the plans of many clients in the phase `name` as one array (steps, clients,
    phase.batches, width) of sample numbers, −1 where there is none.
    """
    check_seed(seed)
    stream = f"batches/{purpose}/{name}"
    drawn = np.empty(known.begins[-1] + 1, np.int32)
    drawn[-1] = -1
    left: Sequence[int] = range(len(clients))
    if len(clients) >= shuffles.MANY:
        left = _shared(known, clients, drawn, (seed, stream, round))
    asked = shuffles.generators(seed, stream, [clients[place] for place in left], round)
    for place, generator in zip(left, asked, strict=True):
        size, begin = known.sizes[place], known.begins[place]
        for start in range(begin, begin + known.epochs[place] * size, size):
            drawn[start : start + size] = generator.permutation(size)
    return drawn[known.places]


def _shared(
    known: Layout, clients: Sequence[int], drawn: np.ndarray, keys: tuple[int, str, int]
) -> Sequence[int]:
    """Draw for clients of one size at once, and return the places of the others."""
    (seed, stream, round), left = keys, []
    sizes = np.asarray(known.sizes)
    for size in np.unique(sizes).tolist():
        places = np.flatnonzero(sizes == size)
        times, begins = known.epochs[places[0]], np.asarray(known.begins)[places]
        some = [clients[place] for place in places.tolist()]
        orders = shuffles.permutations(seed, stream, some, round, size, times)
        if orders is None:
            left += places.tolist()
        else:
            drawn[begins[:, None] + np.arange(times * size)] = orders.reshape(len(some), -1)
    return left


def noise(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    client: int,
    round: int,
    stage: str,
    step: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return standard normal tensors of these shapes, by name.

    Each name has its own stream, so a further name does not change the others. `stage` must tell
    apart everything that happens in one round (for example "train/local" and "adapt/local"). Drawn
    in float64 and rounded, so that runs in two precisions see the same noise.
    """
    place = torch.as_tensor(step, device=device)
    return {
        name: normal(
            torch.tensor([noise_key(seed, stage, name, client, round)], device=device),
            place,
            shape,
            dtype,
        )[0]
        for name, shape in shapes.items()
    }


def noise_key(seed: int, stage: str, name: str, client: int, round: int) -> int:
    """Return the key of all noise called `name` of one client, round and stage; of secret noise a
    new one every time, which nobody can compute from the seed.
    """
    if name.startswith(SECRET):
        return secrets.randbits(62)
    return int(rng(seed, f"noise/{stage}/{name}", client, round).integers(2**62))


def noise_keys(
    seed: int, stage: str, name: str, clients: Sequence[int], round: int
) -> np.ndarray | list[int]:
    """Return the keys of `noise_key` for some clients."""
    found = None
    if not name.startswith(SECRET):
        found = shuffles.first_keys(seed, f"noise/{stage}/{name}", clients, round)
    if found is not None:
        return found
    return [noise_key(seed, stage, name, client, round) for client in clients]


def layers_key(seed: int, stage: str, client: int, round: int) -> int:
    """Return the key of the random layers of a network (dropout) for one client, round and stage;
    `chance.further_number` gives that of a step.
    """
    return int(rng(seed, f"layers/{stage}", client, round).integers(2**62))


def layers_keys(
    seed: int, stage: str, clients: Sequence[int], round: int
) -> np.ndarray | list[int]:
    """Return the keys of `layers_key` for some clients."""
    found = shuffles.first_keys(seed, f"layers/{stage}", clients, round)
    if found is not None:
        return found
    return [layers_key(seed, stage, client, round) for client in clients]


def normal(
    keys: Tensor, step: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return standard normal numbers (len(keys), *shape), each a function of its key, the step and
    its place, computed in float64.

    Whole numbers are hashed (SplitMix64's finaliser) into two uniform numbers, and those turned by
    Box and Muller: the same on a CPU and a GPU up to the last bits of log and cos, for all clients
    at once, and inside a recorded graph.
    """
    if has_kernels(keys):
        from ..stacked import noisekernels  # which only a GPU can import

        return noisekernels.normals(keys, step, shape, dtype)
    count = math.prod(shape)
    begin = further(keys, step)[:, None]
    place = torch.arange(1, 2 * count + 1, device=keys.device) * GAMMA
    bits = shifted(mixed(begin + place), 11).double()  # 53 bits
    first, second = (bits[:, :count] + 1) * 2.0**-53, bits[:, count:] * 2.0**-53
    found = (-2 * first.log()).sqrt() * torch.cos(2 * math.pi * second)
    return found.reshape(len(keys), *shape).to(dtype)


def _sizes(num_examples: int, phase: Phase, coupled: bool) -> list[int]:
    """Return the sizes of the batches of one epoch."""
    if num_examples < 1:
        raise BayflowerError(
            f"a client needs at least 1 training sample, got {num_examples}; use fewer clients or "
            "a larger min_size"
        )
    if (phase.epochs > 0) == (phase.steps > 0):
        raise ConfigError(
            f"exactly one of epochs and steps must be positive in phase {phase.name!r}, got "
            f"{phase.epochs} and {phase.steps}"
        )
    if phase.batch_size < 1 or phase.batches < 1:
        raise ConfigError(
            f"batch_size and batches must be at least 1 in {phase.name!r}, got {phase.batch_size} "
            f"and {phase.batches}"
        )
    full, rest = divmod(num_examples, phase.batch_size)
    sizes = [phase.batch_size] * full + [rest] * (rest > 0)
    if coupled:
        if num_examples == 1:
            raise BayflowerError(
                "a client with one sample cannot train a network whose samples influence each "
                "other (BatchNorm); raise min_size or use another norm"
            )
        if phase.batch_size == 1:
            raise ConfigError(
                f"batch_size must be at least 2 in phase {phase.name!r} for a network whose "
                "samples influence each other (BatchNorm), got 1"
            )
        if rest == 1:
            sizes = [*sizes[:-2], phase.batch_size + 1]
    return sizes
