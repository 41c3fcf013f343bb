"""numpy's own random numbers for many clients at once: those of `batches.rng`, to the bit, without
an object a client.

A generator of (seed, stream, client, round) is numpy's SeedSequence, whose four words key Philox
4x64-10, whose words shuffle by rejection. Here each of these is one operation on arrays with a row
a client. What they give is compared with numpy's result for one client every time: another version
of numpy may shuffle otherwise, and then its own is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

LOW = 0xFFFFFFFF
MANY = 512  # clients from which on this is faster than a generator each
SOME = 8  # clients from which on one generator, set to each client's state, is faster
LONGEST = 256  # samples up to which it is


def entropy(seed: int, stream: str, clients: Sequence[int], round: int) -> np.ndarray | None:
    """Return the words (C, 4) that generators start from; None if a number is too large."""
    words = np.empty((len(clients), 4), np.int64)
    words[:, 0], words[:, 1] = seed, crc32(stream.encode())
    words[:, 2], words[:, 3] = clients, round
    return words.astype(np.uint32) if bool(((words >= 0) & (words <= LOW)).all()) else None


def keys_of(words: np.ndarray) -> np.ndarray:
    """Return the keys (C, 2) that SeedSequence gives Philox."""
    factor = 0x43B0D7E5

    def hashed(value: np.ndarray, times: int, by: int) -> np.ndarray:
        """Return `times` hashes of the rows, each with its own factors."""
        nonlocal factor
        factors = [factor]
        for _ in range(times):
            factors.append(factors[-1] * by & LOW)
        factor = factors[-1]
        column = np.array(factors, np.uint32)[:, None]
        found: np.ndarray = (value ^ column[:-1]) * column[1:]
        return found ^ (found >> np.uint32(16))

    pool = hashed(np.ascontiguousarray(words.T), 4, 0x931E8875)
    for source in range(4):
        others = [target for target in range(4) if target != source]
        other = hashed(pool[source], 3, 0x931E8875)
        both: np.ndarray = pool[others] * np.uint32(0xCA01F9DD)
        both = both - other * np.uint32(0x4973F715)
        pool[others] = both ^ (both >> np.uint32(16))
    factor = 0x8B51F9DD
    parts = hashed(pool, 4, 0x58F38DED).astype(np.uint64)
    return (parts[::2] | parts[1::2] << np.uint64(32)).T


def generators(
    seed: int, stream: str, clients: Sequence[int], round: int
) -> Iterator[np.random.Generator]:
    """Yield the generator of `batches.rng` for each client, until the next one is asked for: one
    object, whose state is set. Numpy's own are made where there are few, or where its first one
    has another state.
    """
    words = entropy(seed, stream, clients, round) if len(clients) >= SOME else None
    if words is None:
        everyone = ([seed, crc32(stream.encode()), client, round] for client in clients)
        yield from map(generator, everyone)
        return
    one, keys = generator(words[0]), keys_of(words)
    state: Any = one.bit_generator.state
    if not np.array_equal(state["state"]["key"], keys[0]):
        yield from map(generator, words)
        return
    for key in keys:
        state["state"]["key"] = key
        one.bit_generator.state = state
        yield one


def philox(keys: np.ndarray, blocks: int) -> np.ndarray:
    """Return the first 4 · blocks words of Philox 4x64-10 of each key."""
    shape = (len(keys), blocks)
    first = np.broadcast_to(np.arange(1, blocks + 1, dtype=np.uint64), shape)
    c: list[np.ndarray] = [first, *(np.zeros(shape, np.uint64) for _ in range(3))]
    left, right = keys[:, :1], keys[:, 1:]
    for _ in range(10):
        high, low = product(c[0], 0xD2E7470EE14C6C93)
        other, least = product(c[2], 0xCA5A826395121157)
        c = [other ^ c[1] ^ left, least, high ^ c[3] ^ right, low]
        left, right = left + np.uint64(0x9E3779B97F4A7C15), right + np.uint64(0xBB67AE8584CAA73B)
    return np.stack(c, -1).reshape(len(keys), -1)


def product(a: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper and the lower 64 bits of a product."""
    half, low = np.uint64(32), np.uint64(LOW)
    upper, lower = np.uint64(by >> 32), np.uint64(by & LOW)
    a0, a1 = a & low, a >> half
    cross, across = a0 * upper, a1 * lower
    middle = (a0 * lower >> half) + (cross & low) + (across & low)
    return a1 * upper + (cross >> half) + (across >> half) + (middle >> half), a * np.uint64(by)


def first_keys(seed: int, stream: str, clients: Sequence[int], round: int) -> np.ndarray | None:
    """Return what `batches.rng(seed, stream, client, round).integers(2**62)` gives each client;
    None if it must be asked.
    """
    words = entropy(seed, stream, clients, round) if len(clients) >= SOME else None
    if words is None:
        return None
    if len(clients) < MANY:
        every = generators(seed, stream, clients, round)
        return np.array([int(one.integers(2**62)) for one in every])
    found = (philox(keys_of(words), 1)[:, 0] >> np.uint64(2)).astype(np.int64)
    own = int(generator(words[0]).integers(2**62))
    return found if own == found[0] else None


def permutations(
    seed: int, stream: str, clients: Sequence[int], round: int, size: int, times: int
) -> np.ndarray | None:
    """Return `times` permutations of `size` numbers for each client (C, times, size), as its
    generator gives them one after another; None if it must be asked.
    """
    few = len(clients) < MANY or size > LONGEST
    words = None if few else entropy(seed, stream, clients, round)
    if words is None:
        return None
    blocks = -(-(2 * (size - 1) * times + 32) // 8)
    drawn = philox(keys_of(words), blocks).astype("<u8").view("<u4")  # the lower half first
    everyone, at = np.arange(len(clients)), np.zeros(len(clients), np.int64)
    last = drawn.shape[1] - 1
    found = np.empty((len(clients), times, size), np.int32)
    found[:] = np.arange(size, dtype=np.int32)
    for time in range(times):
        rows = found[:, time]
        for place in range(size - 1, 0, -1):
            mask, chosen = (1 << place.bit_length()) - 1, np.empty(len(clients), np.int64)
            left = everyone
            while len(left):  # those whose number was too large draw again
                chosen[left] = drawn[left, np.minimum(at[left], last)] & mask
                at[left] += 1
                left = left[(chosen[left] > place) & (at[left] <= last)]
            chosen = np.minimum(chosen, place)
            mine = rows[:, place].copy()
            rows[:, place] = rows[everyone, chosen]
            rows[everyone, chosen] = mine
    # clients that ran out of numbers, which is rare, ask their own; so does one for comparison
    for client in [0, *np.flatnonzero(at > last).tolist()]:
        own = generator(words[client])
        mine = np.stack([own.permutation(size) for _ in range(times)])
        if client == 0 and at[0] <= last and not np.array_equal(mine, found[0]):
            return None
        found[client] = mine
    return found


def generator(words: Sequence[int] | np.ndarray) -> np.random.Generator:
    """Return the generator that starts from four words."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
