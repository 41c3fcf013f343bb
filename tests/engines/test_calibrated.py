"""Calibrated uncertainty on every engine: equal numbers, sums of training clients only, and replies
that cannot be.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import small, small_prepared, some
from personalruns import NEW, TRAINED, end_of, trained

from bayflower.calibration import conformal, curves, trust
from bayflower.contract import ClientHalf
from bayflower.engines import execute, prepare, run_to_result
from bayflower.errors import BayflowerError, WireError
from bayflower.files import checkpoint
from bayflower.files.atomic import load_tensors, save_tensors
from bayflower.flower import calibrating
from bayflower.flower.calibrating import Calibrator, Order, as_vector, from_vector
from bayflower.methods import METHODS
from bayflower.rounds import deciding, uncertain
from bayflower.rounds.calibrated import FILE, FORMAT, OLDER, block, load_total
from bayflower.tree import flatten

ON = {"calibration": "shrunk", "keep": 0.25, "local_epochs": 1, "evaluate_every": 0}
ON |= {"num_clients": 3, "new_clients": 1}
FIRST = {"fedbps", "fedmap", "metavd", "pfedvmp"}  # posteriors of four kinds
PLAIN = [method for method in sorted(METHODS) if METHODS[method].client.one_network]
EVERY = some(PLAIN, FIRST)


@functools.cache
def outcome(method: str, engine: str, stacking: str = "yes", **changes: Any) -> Any:
    return execute(small_prepared(method, engine, **{**ON, "stacking": stacking, **changes}))


def numbers(found: Any) -> dict[str, torch.Tensor]:
    """Return all tallies of all clients by name."""
    return {
        f"{client}/{name}": leaf
        for group in (found.clients, found.new_clients)
        for client, one in group.items()
        for name, leaf in flatten(one.judged).items()
    }


@pytest.mark.parametrize("method", some(PLAIN, {"fedmap"}))
def test_a_stack_and_messages_give_the_same_uncertainty(method: str) -> None:
    stacked = outcome(method, "fused").calibrated
    alone = outcome(method, "loop").calibrated
    assert stacked.kinds == alone.kinds
    own = METHODS[method].client.posterior is not ClientHalf.posterior
    assert ("own" in alone.kinds) == own
    last = METHODS[method].stem != "pfedgp"  # its logits are no Linear layer's output
    assert ("laplace" in alone.kinds) == last
    assert int(stacked.total.rows) == int(alone.total.rows) > 0
    assert stacked.clients.keys() == alone.clients.keys()
    assert len(alone.new_clients) == 1
    here, there = (block(found, "shrunk", 0.9)["clients"]["forms"] for found in (stacked, alone))
    missing = (set() if own else {"own"}) | (set() if last else {"fitted"})
    assert here.keys() == there.keys() == set(uncertain.FORMS) - missing
    for form in here:
        for name in ("accuracy", "nll", "brier"):
            # a sample between two classes may fall to either side, a client between two scales too
            assert here[form][name] == pytest.approx(there[form][name], abs=0.03), (form, name)


@pytest.mark.parametrize("method", some(["fedmap", "metavd"], ["fedmap"]))
def test_one_by_one_has_the_bits_of_messages(method: str) -> None:
    alone = numbers(outcome(method, "fused", "no").calibrated)
    loop = numbers(outcome(method, "loop").calibrated)
    assert alone.keys() == loop.keys()
    for name in loop:
        assert torch.equal(alone[name], loop[name]), name


def test_float64_stacks_agree_closely() -> None:
    changes = {"dtype": "float64"}
    here = outcome("fedmap", "fused", **changes).calibrated
    there = outcome("fedmap", "loop", **changes).calibrated
    assert torch.equal(here.total.scores, there.total.scores)
    far = (here.total.table - there.total.table).abs().double() / there.total.table.double()
    assert float(far.max()) < 1e-5
    for client, one in there.clients.items():
        assert here.clients[client].chosen.scale == one.chosen.scale
        assert here.clients[client].chosen.temperature == pytest.approx(
            one.chosen.temperature, rel=1e-4
        )


def test_sums_are_of_training_clients_and_rows_are_not_trained_on() -> None:
    prepared = small_prepared("fedmap", "fused", **ON)
    federation, found = prepared.federation, outcome("fedmap", "fused").calibrated
    held = {data.client: len(data.y_held) for data in federation.clients}
    assert int(found.total.rows) == sum(held.values())
    assert {client: one.rows for client, one in found.clients.items()} == held
    off = prepare(small("fedmap", **{**ON, "calibration": "off"}))
    for with_it, without in zip(federation.clients, off.federation.clients, strict=True):
        assert len(with_it.y_train) + len(with_it.y_held) == len(without.y_train)
        assert (with_it.y_test == without.y_test).all()
        assert without.y_held is None
    assert int(found.total.scores.sum()) == sum(held.values())
    assert found.total.doubts.sum((1, 2)).tolist() == [sum(held.values())] * 2
    plain = trust.keeps_plain(found.total.doubts)
    assert {one.chosen.plain for one in found.clients.values()} == {plain}


def test_a_fold_does_not_decide_about_itself() -> None:
    """Other labels in a fold change what all other folds would use, and not what it would use."""
    draw = torch.Generator().manual_seed(0)
    rows = 40
    logits = 3 * torch.randn(rows, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (rows,), generator=draw)
    bias, floor = torch.randn(4, generator=draw).double(), curves.floor_of(rows)
    fold = curves.fold_of(rows)

    def own(labels: torch.Tensor) -> deciding.Held:
        mask = torch.ones(rows)
        found = curves.tables(logits, {}, bias, bias, floor, labels, mask)
        blank = deciding.nothing_held(0, 4, False)
        return blank._replace(rows=curves.by_fold(mask.long()), raw=found[0], table=found[1])

    other = torch.where(fold == 1, logits.argmax(-1), y)
    found = []
    for labels in (y, other):
        held = own(labels)
        every = deciding.whole(own(y))._replace(table=deciding.whole(held).table)
        found.append(deciding.decide_folds(held, every, (), "shrunk").temperature)
    same = (found[0] == found[1]).tolist()
    assert same == [False, True, False, False]
    slow = own(y)
    for part in range(curves.FOLDS):
        left = fold != part
        kept = (bias, bias, floor, y[left], torch.ones(30))
        want = curves.tables(logits[left], {}, *kept)[1].sum(0)
        assert torch.equal(slow.table.sum(0) - slow.table[part], want)


OTHER = [{"calibration": "client"}, {"calibration": "global"}, {"sets": "class"}]


@pytest.mark.parametrize(
    "changes", [OTHER[2], *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER[:2])]
)
def test_other_ways_to_calibrate(changes: dict[str, str]) -> None:
    settings = {**ON, "keep": 0.5, **changes}  # enough samples for a promise about each class
    prepared = small_prepared("fedavg", "fused", **settings)
    found = execute(prepared).calibrated
    temperatures = {one.chosen.temperature for one in found.clients.values()}
    assert (len(temperatures) == 1) == (changes.get("calibration") == "global")
    groups = 10 if "sets" in changes else 1
    assert found.total.scores.shape == (groups, conformal.BINS)
    shown = block(found, settings["calibration"], 0.9)["clients"]["forms"]["calibrated"]
    assert shown["coverage"] > 0.8


def test_result_and_file(tmp_path) -> None:
    content = run_to_result(small_prepared("fedmap", "fused", **ON), tmp_path)
    again = json.loads((tmp_path / "result.json").read_text())["uncertainty"]
    assert again == json.loads(json.dumps(content["uncertainty"]))
    total = load_total(tmp_path)
    assert int(total.rows) == again["rows"]
    assert (tmp_path / FILE).exists()
    clients = again["clients"]
    assert set(clients["shifted"]) == {"noise", "blur", "rotation"}
    assert len(clients["per_client"]) == 3
    row = clients["per_client"][0]
    assert row["covered_low"] <= row["num_examples"]
    assert content["partition"]["calibration_sizes"][0] == row["rows"]
    assert run_to_result(small_prepared("fedmap", "fused"))["uncertainty"] is None


@pytest.mark.parametrize(
    ("client", "known"), [pytest.param(TRAINED, 3, marks=pytest.mark.slow), (NEW, 4)]
)
def test_sums_of_an_older_run_have_fewer_sides(tmp_path, client: int, known: int) -> None:
    """Its clients choose among those sides."""
    folder = trained(tmp_path, "fedavg", keep=0.4)
    flat, head = load_tensors(folder / FILE, FORMAT, "sums")
    assert head["format"] not in OLDER
    table = flat["table"]
    # everyone's losses are lower the larger the share, beyond what one client's own can outweigh
    for side in range(1, len(curves.SIDES)):
        table[:, side] = table[:, 0] * (9 - side) // 9
    save_tensors(folder / FILE, flat, {"format": FORMAT})
    assert end_of(folder, client).taken.one.chosen.share == pytest.approx(
        max(curves.SHARES), abs=0.1
    )
    older = {**flat, "table": table[:, :known].contiguous()}
    save_tensors(folder / FILE, older, {"format": f"bayflower-calibration-{known - 1}"})
    assert torch.equal(load_total(folder).table, older["table"])
    found = end_of(folder, client).taken
    assert found.one.chosen.share == pytest.approx(curves.SHARES[known - 1], abs=0.1)
    assert found.one.chosen.rest == 0
    assert found.total_rows == int(flat["rows"])
    assert found.one.judged["test"].tallies["calibrated"].num_examples > 0
    save_tensors(folder / FILE, older, {"format": "bayflower-calibration-1"})
    with pytest.raises(BayflowerError, match="another version"):
        load_total(folder)


def test_a_run_from_before_calibration_held_nothing_out(tmp_path) -> None:
    prepared = small_prepared("fedavg", "fused", checkpoint_every=1)
    run_to_result(prepared, tmp_path)
    found = checkpoint.read(tmp_path)
    old = {k: v for k, v in found.config.items() if not k.startswith("calibration")}
    checkpoint.write(tmp_path, found._replace(config=old))
    assert checkpoint.read(tmp_path).config["calibration"] == "off"
    checkpoint.to_resume(tmp_path, prepared.run)


# -- replies that cannot be ------------------------------------------------------------------------
SIZES = SimpleNamespace(train_size=100, test_size=20)
SIDES = len(curves.SIDES)


def settings():
    return small("fedmap", **ON).data


def table(rows: int = 3, posteriors: int = 1) -> dict[str, torch.Tensor]:
    blank = deciding.nothing_held(posteriors, 10, False)
    return {
        "rows": torch.tensor(rows),
        "raw": blank.raw + rows * 1000,
        "table": blank.table + rows * 1000,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": torch.tensor(501)}, "held-out samples"),
        ({"rows": torch.tensor(-1)}, "held-out samples"),
        ({"table": torch.zeros(4, SIDES, 27, dtype=torch.int64)}, "shape"),
        ({"table": torch.zeros(8, SIDES, 27)}, "shape or dtype"),
        ({"table": torch.zeros(8, SIDES - 1, 27, dtype=torch.int64)}, "shape or dtype"),
        ({"table": -torch.ones(8, SIDES, 27, dtype=torch.int64)}, "impossible values"),
        ({"table": torch.full((8, SIDES, 27), 2**60)}, "impossible values"),
        ({"raw": torch.full((8, 2), 2**60)}, "impossible values"),
        ({"raw": torch.zeros(7, 2, dtype=torch.int64)}, "shape"),
        ({"other": torch.zeros(())}, "rows, raw and table"),
    ],
)
def test_impossible_tables_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    server = Calibrator(settings())
    with pytest.raises(WireError, match=words):
        server.hear({**table(), **change}, 0, False, SIZES, 10)
    assert not server.tables


def test_a_table_of_another_shape_is_left_out_and_scores_must_agree() -> None:
    server = Calibrator(settings())
    for client, posteriors in ((0, 2), (1, 1), (2, 1)):  # the first reply does not decide
        server.hear(table(3, posteriors), client, False, SIZES, 10)
    server.hear(table(5), 9, True, SIZES, 10)  # a new client is not part of the sums
    server.close()
    assert set(server.tables) == {1, 2}
    assert int(server.sums()["rows"]) == 6
    scores = torch.zeros(1, conformal.BINS, dtype=torch.int64)
    scores[0, 5] = 4
    doubts = torch.zeros(2, 2, trust.BINS, dtype=torch.int64)
    doubts[:, 0, 9] = 4
    with pytest.raises(WireError, match="other samples"):
        server.hear({"scores": scores, "doubts": doubts}, 1, False, SIZES, 10)
    with pytest.raises(WireError, match="scores is missing or has another shape"):
        server.hear({"scores": scores[:, :7], "doubts": doubts}, 1, False, SIZES, 10)
    with pytest.raises(WireError, match="doubts is missing or has another shape"):
        server.hear({"scores": scores}, 1, False, SIZES, 10)
    with pytest.raises(WireError, match="impossible"):
        server.hear({"scores": scores, "doubts": -doubts}, 1, False, SIZES, 10)
    scores[0, 5], doubts[:, 0, 9] = 3, 3
    doubts[1, :, 9] = torch.tensor([1, 1])
    with pytest.raises(WireError, match="other samples"):
        server.hear({"scores": scores, "doubts": doubts}, 1, False, SIZES, 10)
    doubts[1, 1, 9] = 2
    server.hear({"scores": scores, "doubts": doubts}, 1, False, SIZES, 10)
    assert int(server.sums()["doubts"].sum()) == 6


def test_what_a_client_uses_travels_as_numbers() -> None:
    kinds = {"laplace": ("kronecker", "a"), "own": ("diagonal", "b")}
    chosen = curves.Chosen("own", 0.5, 1.5, 2.0, ("laplace", 1.0), 1.0, 0.9, None, {"laplace": 2.0})
    chosen = chosen._replace(plain=True)
    assert from_vector(as_vector(chosen, kinds), kinds) == chosen
    wrong = as_vector(chosen, kinds)
    for place, value in (
        (0, 7.0),
        (1, -0.5),
        (2, 0.0),
        (3, 2.5),
        (4, 0.5),
        (6, 2.0),
        (7, torch.nan),
    ):
        changed = wrong.clone()
        changed[place] = value
        with pytest.raises(WireError):
            from_vector(changed, kinds)
    assert Order.read(Order("judge", "shrunk", 0.9, "class").text()).sets == "class"
    for text in ("", "[]", '["hold", "off", 0.9, "class"]', '["run", "client", 0.9, "class"]', "7"):
        with pytest.raises(WireError):
            Order.read(text)


@pytest.mark.parametrize("spoil", ["tally", "trust", "alarms", "names", "too many"])
def test_impossible_tallies_are_refused(spoil: str) -> None:
    from bayflower.flower.calibrating import read_judged

    one = next(iter(outcome("fedmap", "loop").calibrated.clients.values()))
    flat = flatten(one.judged, "judged")
    number = int(one.judged["test"].trusts["point"].num_examples)
    assert read_judged(flat, 10, number).keys() == one.judged.keys()
    changes = {
        "tally": {"judged/test/tallies/point/correct": torch.tensor(-1)},
        "trust": {"judged/test/trusts/point/covered": torch.tensor(10**6)},
        "alarms": {"judged/noise/alarms/entropy": torch.tensor(-4)},
        "names": {"judged/test/more/x": torch.zeros(())},
        "too many": {},
    }
    with pytest.raises(WireError):
        read_judged({**flat, **changes[spoil]}, 10, 0 if spoil == "too many" else number)


@pytest.mark.slow
def test_a_client_fits_its_posteriors_once_for_all_requests(monkeypatch) -> None:
    counts = {"fit": 0, "hold": 0}

    def counted(name, fn):
        def once(*args):
            counts[name] += 1
            return fn(*args)

        return once

    monkeypatch.setattr(uncertain, "fit_alone", counted("fit", uncertain.fit_alone))
    monkeypatch.setattr(uncertain, "hold_alone", counted("hold", uncertain.hold_alone))
    monkeypatch.setattr(calibrating, "MEMORY", calibrating.Memory(2**25))
    few = {**ON, "num_clients": 2, "new_clients": 1, "rounds": 1, "keep": 0.2}
    found = execute(small_prepared("fedavg", "loop", **few)).calibrated
    clients = len(found.clients) + len(found.new_clients)
    assert counts == {"fit": clients, "hold": clients}
    assert not calibrating.MEMORY.begun  # nothing is left
    # without room everything is made again, with the same bits
    monkeypatch.setattr(calibrating, "MEMORY", calibrating.Memory(0))
    again = execute(small_prepared("fedavg", "loop", **few)).calibrated
    assert counts["fit"] == 4 * clients
    for name, leaf in numbers(found).items():
        assert torch.equal(leaf, numbers(again)[name]), name


def test_words_are_not_shifted() -> None:
    from bayflower.networks.model import Batch, Model
    from bayflower.rounds.calibrated import tests_of

    batch = Batch(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    words = Model(
        lambda: torch.nn.Sequential(
            torch.nn.Embedding(9, 2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
        ),
        2,
    )
    numbers_ = Model(lambda: torch.nn.Sequential(torch.nn.Linear(4, 2)), 2)
    assert set(tests_of(batch, words, seed=0, client=0)) == {"test"}
    assert set(tests_of(batch, numbers_, seed=0, client=0)) == {"test", "noise", "missing"}
