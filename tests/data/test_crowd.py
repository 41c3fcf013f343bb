"""Made-up clients: each one's samples are its own, the same alone and among many, and no work is
done for clients that nobody asks for.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from conftest import assert_same_bits

from bayflower.config import parse
from bayflower.data import DataSettings, load_client, load_federation
from bayflower.data.crowd import CLASSES, INPUTS, SCALE, Crowd
from bayflower.engines import execute, prepare, run_to_result
from bayflower.errors import ConfigError
from bayflower.stacked.chance import mixed_number, signed
from bayflower.testing.runs import same_outcome

SMALL = {
    "dataset": "crowd",
    "num_clients": 12,
    "new_clients": 2,
    "fraction_train": 0.5,
    "model": "mlp",
    "rounds": 3,
    "device": "cpu",
}
GAMMA = 0x9E3779B97F4A7C15


def number(key: int, stream: int, place: int) -> int:
    """Return one of a stream's numbers, the slow way."""
    begin = mixed_number(mixed_number(key) + signed(stream * GAMMA % 2**64))
    word = mixed_number(begin + (place + 1) * GAMMA) % 2**64
    return sum(word >> (16 * lane) & 65535 for lane in range(4)) - 2 * 65535


def test_samples_are_those_of_the_formula():
    """Sample by sample, in Python's whole numbers."""
    crowd = load_federation(DataSettings(dataset="crowd", num_clients=1000), 5).clients
    assert isinstance(crowd, Crowd)
    x, y = crowd.samples([7, 940], torch.device("cpu"))
    for place, client in enumerate((7, 940)):
        own = mixed_number(mixed_number(crowd.key) + signed(client * GAMMA % 2**64))
        for row in (0, 19):
            inputs = [number(own, 1, row * INPUTS + column) for column in range(INPUTS)]
            want = np.array(inputs, float) / SCALE
            assert x[place, row].numpy().tolist() == want.astype(np.float32).tolist()
            scores = []
            for one in range(CLASSES):
                maps = [
                    2 * (number(crowd.key, 4, c * CLASSES + one) >> 6)
                    + (number(own, 3, c * CLASSES + one) >> 6)
                    for c in range(INPUTS)
                ]
                score = sum(a * b for a, b in zip(inputs, maps, strict=True))
                scores.append(score + 3000 * number(own, 2, row * CLASSES + one))
            assert int(y[place, row]) == int(np.argmax(scores))


def test_a_client_is_the_same_alone_and_among_others():
    settings = DataSettings(dataset="crowd", num_clients=20_000, new_clients=3)
    federation = load_federation(settings, 1)
    x, y = federation.clients.samples(range(8190, 8195), torch.device("cpu"))
    alone = load_client(settings, 1, 8193)
    parts = federation.clients.parts
    assert [len(one) for one in parts] == [13, 4, 3]
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))
    assert np.array_equal(alone.x_train, x[3, parts.train].numpy())
    assert np.array_equal(alone.y_held, y[3, parts.held].numpy())
    assert np.array_equal(alone.x_test, federation.clients[8193].x_test)
    assert load_client(settings, 1, 20_002).client == 20_002
    other = load_client(settings, 2, 8193)
    assert not np.array_equal(other.x_train, alone.x_train)
    assert abs(float(x.mean())) < 0.05
    assert abs(float(x.std()) - 1) < 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_the_same_samples():
    crowd = load_federation(DataSettings(dataset="crowd", num_clients=10**6), 5).clients
    some = list(range(0, 10**6, 101))
    assert_same_bits(
        dict(zip("xy", crowd.samples(some, torch.device("cpu")), strict=True)),
        {k: v.cpu() for k, v in zip("xy", crowd.samples(some, torch.device("cuda")), strict=True)},
    )


def test_a_million_clients_cost_nothing_until_they_are_asked_for():
    begun = time.process_time()
    prepared = prepare(parse("ditto", {**SMALL, "num_clients": 10**6, "seed": 77}))
    assert len(prepared.federation.clients) == 10**6
    assert len(str(prepared.federation.partition)) < 1000
    assert time.process_time() - begun < 5  # a loop over all clients takes minutes


@pytest.mark.slow
def test_the_fused_engine_has_the_bits_of_the_loop():
    """One by one; the fused engine has only the samples of the clients at work. Both sample the
    same clients for the test, and calibrate them.
    """
    given = {**SMALL, "stacking": "no", "fraction_evaluate": 0.5, "max_fused": 4}
    fused, loop = (execute(prepare(parse("fedper", given), engine)) for engine in ("fused", "loop"))
    same_outcome(fused, loop)
    assert len(fused.views["personal"]) + len(fused.new_clients["personal"]) == 7
    assert fused.views["personal"].keys() == loop.views["personal"].keys()
    for view, tallies in loop.new_clients.items():
        assert_same_bits(fused.new_clients[view], tallies)
    assert fused.calibrated.clients.keys() == fused.views["personal"].keys()


@pytest.mark.slow
def test_stacks_of_any_size_give_the_numbers_of_one(tmp_path):
    """The window on the samples moves and grows; weights of classes follow it."""
    given = {**SMALL, "stacking": "yes", "dtype": "float64", "class_weights": "client"}
    whole = execute(prepare(parse("ditto", given)))
    parts = execute(prepare(parse("ditto", {**given, "max_fused": 3})))
    loop = execute(prepare(parse("ditto", given), "loop"))
    for other in (parts, loop):
        for a, b in zip(
            whole.server_state.params.values(), other.server_state.params.values(), strict=True
        ):
            assert float((a - b).abs().max()) < 1e-12


def test_the_result_says_who_was_tested(tmp_path):
    given = {**SMALL, "rounds": 1, "num_clients": 20_000, "fraction_train": 0.001, "new_clients": 0}
    given |= {"client_states": "disk", "calibration": "off"}
    found = run_to_result(
        prepare(parse("ditto", {**given, "fraction_evaluate": 0.002})),
        tmp_path,
    )
    said = found["final"]["personal"]
    assert said["clients"].startswith("40 sampled ones of the 20000 training clients")
    assert said["num_clients"] == 40
    assert len(found["clients"]) == 40
    assert (tmp_path / "result.json").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"samples_per_client": 1}, "at least 2, one to train and one to test"),
        ({"partition": "iid"}, "partition must not be set for dataset 'crowd'"),
        ({"keep": 0.5}, "keep must be 1 for dataset 'crowd'"),
        ({"test_fraction": 0.0}, "test_fraction must be in"),
    ],
)
def test_settings_that_do_not_suit_are_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        DataSettings(dataset="crowd", **given)


def test_a_share_of_tested_clients_is_checked():
    with pytest.raises(ConfigError, match=r"fraction_evaluate must be in \(0, 1\]"):
        parse("fedavg", {"fraction_evaluate": 0})
