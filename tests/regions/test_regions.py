"""A tree of aggregators gives the bits of a flat federation: every additive method, with all that a
round has: a part of the clients, tests, new clients, limits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import assert_same_bits, small_prepared, some
from groves import Grove

from bayflower import methods
from bayflower.engines import Prepared
from bayflower.errors import ConfigError, WireError
from bayflower.files import checkpoint
from bayflower.flower.loop import InProcessGrid, run_loop
from bayflower.flower.regions.partial import sum_in, sum_out
from bayflower.maths.exact import Total
from bayflower.rounds.result import result

CHEAP = {"fedmap"}  # in the default run; `make test-all` has all methods
WORK: dict[str, Any] = {
    "num_clients": 7,
    "new_clients": 1,
    "rounds": 3,
    "fraction_train": 0.8,
    "evaluate_every": 2,
    "local_epochs": 1,
    "new_client_epochs": 1,
}
OTHER = ("seconds", "bytes_up", "bytes_down", "bytes", "usage")


def ready(method: str, **changes: Any) -> Prepared:
    return small_prepared(method, "loop", **{**WORK, **changes})


def ran(prepared: Prepared, **more: Any) -> Any:
    return run_loop(prepared.run, prepared.federation, prepared.halves, **more)


def kind(content: Any) -> str:
    return content["bayflower"]["tree"]


def numbers(prepared: Prepared, outcome: Any) -> Any:
    """Return all that a run's result says but for times and bytes."""

    def kept(one: Any) -> Any:
        if isinstance(one, dict):
            return {k: kept(v) for k, v in one.items() if not k.startswith(OTHER)}
        return [kept(v) for v in one] if isinstance(one, list) else one

    return kept(result(prepared.run, "loop", prepared.federation, prepared.halves, outcome))


def assert_equal(prepared: Prepared, flat: Any, tree: Any) -> None:
    assert_same_bits(flat.server_state, tree.server_state)
    assert numbers(prepared, flat) == numbers(prepared, tree)


ADDITIVE = [row.name for row in methods.ROWS if not row.additive]


@pytest.mark.parametrize("method", some(ADDITIVE, CHEAP))
def test_a_tree_has_the_bits_of_a_flat_federation(method):
    prepared = ready(method)
    assert_equal(prepared, ran(prepared), ran(prepared, made=Grove()))


VARIANTS: dict[str, dict[str, Any]] = {
    "calibration": {"calibration": "shrunk"},
    "no limits": {"robust": "off"},
    "only cut": {"robust": "clip"},
    "batch norm": {"model": "mlp-bn"},
    "capped": {"max_share": 0.2},
    "states that continue": {"continuity": "refuse"},
}


@pytest.mark.parametrize("variant", some(VARIANTS, {"capped"}))
def test_settings_of_all_kinds_give_the_bits_of_a_flat_federation(variant):
    prepared = ready("fedavg", **{"rounds": 2, **VARIANTS[variant]})
    assert_equal(prepared, ran(prepared), ran(prepared, made=Grove(3)))


REFUSED = {
    "metavd": ({}, "metavd cannot run in a tree of aggregators: it sends steps by client"),
    "fedpac": ({}, "its server mixes the heads of single clients"),
    "local": ({}, "it shares nothing"),
    "fedavg": ({"robust": "krum"}, "robust=krum compares single updates"),
    "fedprox": ({"secure": "sum"}, "secure sums and dp are made between one server and all"),
    "pfedvmp": ({"max_share": 0.5}, "max_share compares single updates of pfedvmp"),
    "fedavg-ft": ({"aggregation": "buffered"}, "aggregation=buffered needs single updates"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_a_tree_cannot_do_is_refused_before_anything_is_sent(method):
    settings, why = REFUSED[method]
    grove = Grove()
    with pytest.raises(ConfigError, match=why):
        ran(ready(method, **settings), made=grove)
    assert grove.asked == []


def test_a_region_sends_no_single_update_and_one_sum():
    prepared, grove = ready("fedavg", rounds=1), Grove()
    outcome = ran(prepared, made=grove)
    summed = [said for asked, said in grove.asked if kind(asked) in ("see", "add")]
    assert [kind(said) for said in summed] == ["see", "see", "add", "add"]
    names = {name.split("/")[-1] for said in summed for name in said}
    assert names == {"bayflower", "metrics", "sum"}
    size = sum(leaf.numel() for leaf in outcome.server_state.params.values())
    for said in summed[:2]:  # sizes and sketches of changes, no change itself
        assert all(math.prod(array.shape) < size / 2 for array in said["sum"].values())
    for said in summed[2:]:  # exact sums: two or three float64 numbers each, for any many clients
        assert sum(math.prod(array.shape) for array in said["sum"].values()) < 4.5 * size
    for asked, _ in grove.asked:  # the model goes down once
        if kind(asked) != "roll" and "state" not in asked:
            assert sum(name.endswith("/broadcast") for name in asked) <= 1


@pytest.mark.slow
def test_a_tree_goes_on_from_the_checkpoint_of_a_flat_run_and_the_other_way_round(tmp_path):
    prepared = ready("fedmap", checkpoint_every=1)
    whole = ran(prepared)
    halfway = ready("fedmap", checkpoint_every=1, rounds=2)
    for name, before, after in (("a", Grove(), InProcessGrid), ("b", InProcessGrid, Grove())):
        ran(halfway, out=tmp_path / name, made=before)
        resume = checkpoint.to_resume(tmp_path / name, prepared.run)
        assert resume.round == 2
        assert_equal(prepared, whole, ran(prepared, resume=resume, made=after))


@pytest.mark.parametrize("robust", some(["gate", "clip", "off"], {"clip"}))
def test_a_sketch_of_a_change_goes_up_only_under_the_gate(robust):
    grove = Grove()
    ran(ready("fedavg", rounds=2, robust=robust), made=grove)
    names = {name for _, said in grove.asked if "sum" in said for name in said["sum"]}
    assert ("sketches" in names) == (robust == "gate")
    assert any(name.startswith("seen/") for name in names) == (robust != "off")


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf, 2.0**300, 1.5 * 2.0**52 + 2.0**46])
def test_a_sum_with_digits_out_of_range_is_refused(wrong: float) -> None:
    """Such a digit would make other sums inexact, since a window holds few of them."""
    total, flat = Total(), {}
    for value in (1e6, -3e-9, 2.5):
        total.add({"x": torch.full((3,), value, dtype=torch.float64)})
    told = sum_out(total, flat, "sum")
    again = sum_in(told, flat, "sum").value()["x"]
    assert again.tolist() == total.value()["x"].tolist()
    name = next(one for one in flat if "limb" in one)
    flat[name] = flat[name].clone()
    flat[name][1] = wrong
    with pytest.raises(WireError, match="digits out of range"):
        sum_in(told, flat, "sum")
