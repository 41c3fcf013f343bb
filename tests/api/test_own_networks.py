"""Networks of one's own from Python: LSTM and transformer on text and torchvision's ResNet-18, the
same on every engine.
"""

from __future__ import annotations

import numpy as np
import ownnets
import pytest

import bayflower

TEXT = ("Lstm", "Transformer")
HOW = {"rounds": 2, "lr": 0.01, "local_epochs": 1, "batch_size": 10, "device": "cpu"}


def clients(name: str, number: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return texts in which one word tells the class, or pictures whose brightness does."""
    draw, found = np.random.default_rng(1), []
    for _ in range(number):
        y = draw.integers(0, 3, 48 if name in TEXT else 20)
        x = draw.normal(size=(len(y), 3, 32, 32)).astype(np.float32) + y[:, None, None, None]
        if name in TEXT:
            x = draw.integers(9, ownnets.WORDS, (len(y), 7))
            x[np.arange(len(y)), draw.integers(0, 7, len(y))] = y
        found.append((x, y))
    return found


@pytest.mark.parametrize("name", TEXT)
def test_networks_on_text_agree_between_stacks_and_the_reference(name):
    """One step of SGD in float64: fused in a stack and loop differ by rounding only."""
    data = clients(name, 3)
    found = [
        bayflower.fit(
            "fedmap",
            data,
            model=vars(ownnets)[name],
            engine=engine,
            stacking="yes",
            dtype="float64",
            optimizer="sgd",
            calibration="off",
            **{**HOW, "rounds": 1},
        )
        for engine in ("fused", "loop")
    ]
    for one in found:
        assert one.result["remark"] is None  # a stack
        assert one.result["model"]["name"] == f"ownnets:{name}"
    a, b = (one.result["final"]["personal"]["nll"] for one in found)
    assert a == pytest.approx(b, rel=1e-9)
    said = found[0].personal(1)
    assert said.card["network"]["input_dtype"] == "int64"
    assert said.predict(data[1][0][:4]).shape == (4,)
    with pytest.raises(bayflower.ConfigError, match="vocabulary"):
        said.predict(data[1][0] + ownnets.WORDS)


@pytest.mark.slow
def test_resnet18_of_torchvision_on_the_two_engines_of_this_process():
    found = [
        bayflower.fit("pfedvmp", clients("resnet18"), model=ownnets.resnet18, engine=engine, **HOW)
        for engine in ("fused", "loop")
    ]
    a, b = (one.result["final"] for one in found)
    assert a == b  # convolutions on a CPU: one by one, so to the bit
    assert found[0].personal(0).predict(clients("resnet18")[0][0][:3]).shape == (3,)


@pytest.mark.flower
@pytest.mark.parametrize("name", [*TEXT, "resnet18"])
def test_a_network_of_ones_own_gives_the_same_bits_under_flower(name):
    """Loop, Flower's simulation and one process a client agree to the bit, and personal models come
    from each.
    """
    data, network = clients(name), vars(ownnets)[name]
    found = {
        engine: bayflower.fit("fedmap", data, model=network, engine=engine, **HOW)
        for engine in ("loop", "ray", "deployment")
    }
    models = {engine: one.personal(1).predict_proba(data[1][0]) for engine, one in found.items()}
    for engine in ("ray", "deployment"):
        assert found[engine].result["final"] == found["loop"].result["final"]
        assert np.array_equal(models[engine], models["loop"])


@pytest.mark.flower
def test_a_callback_ends_a_run_under_flower():
    data, seen = clients("Lstm"), []
    stopped = bayflower.fit(
        "fedmap",
        data,
        model=ownnets.Lstm,
        engine="deployment",
        callbacks=lambda round, numbers: seen.append(round) or round >= 2,
        **{**HOW, "rounds": 200},
    )
    number = len(stopped.result["rounds"])
    assert 2 <= number < 200
    assert seen == sorted(set(seen))
    assert seen[-1] == number
    whole = bayflower.fit(
        "fedmap", data, model=ownnets.Lstm, engine="loop", **{**HOW, "rounds": number}
    )
    assert stopped.result["final"] == whole.result["final"]
