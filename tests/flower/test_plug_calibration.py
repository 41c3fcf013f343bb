"""Calibration in a user's own Flower app: which samples are held out, in which forms of data, and
what each client takes home.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import some
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from usernet import Net, load, run, strategy_of

from bayflower import clients
from bayflower.clients import Plug
from bayflower.errors import BayflowerError, ConfigError, WireError
from bayflower.flower import plug as plugs
from bayflower.flower import records
from bayflower.flower.holding import Rule
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.flower.plug import batch
from bayflower.personal import load_personal
from bayflower.tree import flatten

make_client_app = partial(clients.make_client_app, export=())
RULE = Rule(0.2, 500, 0)
DEVICE = torch.device("cpu")
FORMS = {
    "tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "sets": TensorDataset,
    "loaders": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
}


def told(rule: Rule | None):
    """Return what a message of a strategy with this rule says."""
    head = records.make_header(**(rule.told() if rule else {}))
    return SimpleNamespace(content=RecordDict({records.HEADER: head}))


def site(data, rule: Rule | None, client: int = 0):
    plug = Plug("fedmap", model=Net, data=data, device="cpu")
    return plug.site(contexts([client])[0], told(rule))


def by_hand(context):
    """Return the parts of `load`, a share of the training part held out by the user."""
    train, test = load(context)
    parts = RULE.split(batch(train, "train", DEVICE), int(context.node_config["partition-id"]))
    return (parts[0].x, parts[0].y), test, (parts[1].x, parts[1].y)


def sized(train: int, held: int | None = None):
    """Return a data function with so many samples."""

    def data(context):
        generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        numbers = (train, 12, *([] if held is None else [held]))
        pairs = []
        for number in numbers:
            y = torch.arange(number) % 3
            pairs.append((torch.randn(number, 1, 8, 8, generator=generator), y))
        return tuple(pairs)

    return data


def uncertainty(strategy) -> dict[str, torch.Tensor]:
    """Return all that is known of the clients' uncertainty by name."""
    found = strategy.outcome.calibrated
    flat = {f"total/{name}": leaf for name, leaf in flatten(found.total).items()}
    for client, one in found.clients.items():
        flat |= {f"{client}/{name}": leaf for name, leaf in flatten(one.judged).items()}
    return flat


# -- which samples ---------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
def test_a_fifth_of_the_training_part_is_held_out_in_every_form_of_data(form):
    def data(context):
        return tuple(FORMS[form](*part) for part in load(context))

    (context,) = contexts([1])
    (x, y), (x_test, _) = load(context)
    found = site(data, RULE, 1).data
    assert (len(found.train.y), found.num_held, len(y)) == (58, 14, 72)
    assert torch.equal(found.test.x, x_test)
    place = {row.numpy().tobytes(): number for number, row in enumerate(x)}
    left, held = (
        [place[row.numpy().tobytes()] for row in part.x] for part in (found.train, found.held)
    )
    assert sorted(left + held) == list(range(72))
    assert left == sorted(left)
    assert torch.equal(found.train.y, y[left])
    assert torch.equal(found.held.y, y[held])
    assert len(found.held.mask) == 14
    again = site(data, RULE, 1).data
    assert torch.equal(again.held.x, found.held.x)
    other = RULE._replace(seed=1).split(batch((x, y), "train", DEVICE), 1)[1]
    assert not torch.equal(other.x, found.held.x)
    assert not torch.equal(RULE.split(batch((x, y), "train", DEVICE), 2)[1].x, found.held.x)


@pytest.mark.parametrize("form", FORMS)
def test_a_third_part_is_held_out_as_it_is(form):
    def data(context):
        return tuple(FORMS[form](*part) for part in by_hand(context))

    train, _, held = by_hand(contexts([0])[0])
    for rule, number in ((RULE, 14), (None, 0)):
        found = site(data, rule).data
        assert torch.equal(found.train.x, train[0])
        assert found.num_held == number
    assert torch.equal(site(data, RULE).data.held.x, held[0])


@pytest.mark.parametrize(("number", "held"), [(1, 0), (2, 0), (3, 1), (5000, 500)])
def test_at_least_one_sample_stays_and_at_most_500_are_held_out(number, held):
    found = site(sized(number), RULE).data
    assert (len(found.train.y), found.num_held) == (number - held, held)
    assert (found.held is None) == (held == 0)


def test_of_too_many_calibration_samples_some_are_drawn_with_a_line(caplog):
    with caplog.at_level(logging.WARNING, "bayflower"):
        found = site(sized(9, 30), RULE._replace(rows=20)).data
    assert found.num_held == 20
    assert len(found.train.y) == 9
    assert "client 0: 20 of its 30 calibration samples are used" in caplog.text
    assert site(sized(9, 0), RULE).data.held is None


def test_parts_that_cannot_be_are_refused():
    def other_shape(context):
        train, test = load(context)
        return train, test, (torch.zeros(3, 1, 4, 4), torch.zeros(3).long())

    def other_labels(context):
        train, test = load(context)
        return train, test, (train[0][:2], torch.tensor([0, 7]))

    with pytest.raises(ConfigError, match=r"calibration has \(1, 4, 4\); give both the same"):
        site(other_shape, RULE)
    with pytest.raises(ConfigError, match="label 7 has no output"):
        site(other_labels, RULE)
    with pytest.raises(ConfigError, match=r"\(train, test\) or \(train, test, calibration\)"):
        site(lambda _: (1, 2, 3, 4), RULE)
    for text in ("[0.2, 500]", "[2.0, 500, 0]", '["a", 1, 0]', "[0.2, 0, 0]", "{}", "x"):
        with pytest.raises(WireError, match="the rule of held-out samples cannot be read"):
            Rule.read({"hold": text})


# -- whole runs ------------------------------------------------------------------------------------
def test_off_holds_nothing_and_says_nothing(tmp_path):
    """No message has another key than before, all samples train, and a third part is not used."""
    messages: list[Message] = []
    grid = InProcessGrid(
        make_client_app("fedmap", model=Net, data=load, state=tmp_path),
        contexts(range(3)),
        lambda message: messages.append(message) or grid.ask(message),
    )
    strategy = strategy_of("fedmap", local_epochs=1)
    torch.manual_seed(0)
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=1, timeout=60)
    kinds = {"protocol", "method", "run", "round", "seed", "evaluate", "purpose", "instructions"}
    heads = [(m.metadata.message_type, set(m.content[records.HEADER])) for m in messages]
    assert {kind for kind, keys in heads if keys == kinds} == {"train", "evaluate"}
    assert {kind for kind, keys in heads if keys == {"protocol"}} == {"query"}
    assert len(messages) == 9
    members = strategy.roster.members
    assert {member.facts.train_size for member in members.values()} == {72}
    assert strategy.outcome.calibrated is None

    def third(context):
        return (*load(context), by_hand(context)[2])

    app = make_client_app("fedmap", model=Net, data=third, state=tmp_path / "b")
    more = run(app, "fedmap", rounds=1, local_epochs=1)
    assert all(torch.equal(strategy.state.params[k], v) for k, v in more.state.params.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shrunk", "client", "global"])
def test_our_split_gives_the_bits_of_the_same_split_by_hand(how, tmp_path):
    same = {"rounds": 2, "local_epochs": 2, "calibration": how}
    ours, theirs = (
        run(
            make_client_app("fedmap", model=Net, data=data, state=tmp_path / name), "fedmap", **same
        )
        for name, data in (("ours", load), ("theirs", by_hand))
    )
    assert ours.faults == theirs.faults == []
    for name, value in ours.state.params.items():
        assert torch.equal(value, theirs.state.params[name]), name
    here, there = uncertainty(ours), uncertainty(theirs)
    assert here.keys() == there.keys()
    assert all(torch.equal(leaf, there[name]) for name, leaf in here.items())
    assert {one.rows for one in ours.outcome.calibrated.clients.values()} == {14}
    assert int(ours.outcome.calibrated.total.rows) == 42
    assert {member.facts.train_size for member in ours.roster.members.values()} == {58}


@pytest.mark.slow
def test_a_process_that_saw_no_query_holds_out_the_same(tmp_path):
    """Every message goes to a process of its own: nothing is cached between them."""
    app = make_client_app("fedmap", model=Net, data=load, state=tmp_path / "a")

    def forget(message: Message) -> Message:
        plugs.SITES.clear()
        return grid.ask(message)

    grid = InProcessGrid(app, contexts(range(3)), forget)
    strategy = strategy_of("fedmap", calibration="shrunk", local_epochs=1)
    torch.manual_seed(0)
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=1, timeout=60)
    cached = run(
        make_client_app("fedmap", model=Net, data=load, state=tmp_path / "b"),
        "fedmap",
        rounds=1,
        local_epochs=1,
        calibration="shrunk",
    )
    here, there = uncertainty(strategy), uncertainty(cached)
    assert all(torch.equal(leaf, there[name]) for name, leaf in here.items())


@pytest.mark.parametrize("kind", ["state", pytest.param("pt2", marks=pytest.mark.slow)])
def test_each_client_takes_its_calibrated_model_home(kind, tmp_path):
    nodes = contexts(range(4))
    nodes[3].node_config["new-client"] = "true"
    formats, network = ((), Net) if kind == "state" else (("pt2",), None)
    app = clients.make_client_app("fedper", model=Net, data=load, state=tmp_path, export=formats)
    strategy = strategy_of("fedper", calibration="shrunk", coverage=0.8, run="home")
    strategy.start(
        InProcessGrid(app, nodes), ArrayRecord(Net().state_dict()), num_rounds=1, timeout=60
    )
    assert strategy.faults == []
    found = strategy.outcome.calibrated
    assert (len(found.clients), len(found.new_clients)) == (3, 1)
    for client in (0, 3):
        folder = tmp_path / "home" / f"client-{client}" / "personal"
        card = json.loads((folder / "card.json").read_text())
        assert card["data"]["num_held_out"] == 14
        said = card["uncertainty"]["calibration"]
        one = {**found.clients, **found.new_clients}[client]
        assert said["temperature"] == pytest.approx(one.chosen.temperature)
        x, y = load(nodes[client])[1]
        model = load_personal(folder, model=network)
        predicted = model.uncertainty(x)
        nll = -torch.log(torch.as_tensor(predicted.probabilities))[range(len(y)), y].sum()
        tally = one.judged["test"].tallies["calibrated"]
        assert float(nll) == pytest.approx(float(tally.nll), rel=1e-4)
        assert predicted.sets.shape == (24, 3)
        assert "about 80% of new samples a set holds" in predicted.promise


def test_arguments_of_the_strategy(tmp_path):
    app = make_client_app("fedmap", model=Net, data=sized(40), state=tmp_path)
    strategy = run(
        app, "fedmap", rounds=1, calibration="client", calibration_share=0.5, sets="class"
    )
    assert int(strategy.outcome.calibrated.total.rows) == 60
    assert len(strategy.outcome.calibrated.total.scores) == 3
    with pytest.raises(ConfigError, match="calibration must be one of shrunk, client, global, off"):
        strategy_of("fedmap", calibration="on")
    with pytest.raises(ConfigError, match="fraction_evaluate above 0, or calibration='off'"):
        strategy_of("fedmap", calibration="shrunk", fraction_evaluate=0.0, keep_personal=False)


@pytest.mark.parametrize("fraction", some([0.5, 0.4, 0.0], [0.4]))
def test_every_client_is_calibrated_whatever_share_is_tested(fraction, tmp_path):
    """The sums and each client's choice are those of a run that tests all clients; the test itself
    is of the share alone, here of one new client. `keep_personal=False` spares the others.
    """

    def calibrated(name: str, **how):
        nodes = contexts(range(4))
        nodes[3].node_config["new-client"] = "true"
        app = make_client_app("fedavg", model=Net, data=load, state=tmp_path / name)
        strategy = strategy_of("fedavg", calibration="shrunk", run="home", **how)
        torch.manual_seed(0)
        initial = ArrayRecord(Net().state_dict())
        strategy.start(InProcessGrid(app, nodes), initial, num_rounds=1, timeout=60)
        assert strategy.faults == []
        return strategy

    def cards(name: str) -> dict[int, dict]:
        paths = (tmp_path / name).rglob("personal/card.json")
        found = [json.loads(path.read_text()) for path in paths]
        return {card["client"]: card for card in found}

    part = calibrated("part", fraction_evaluate=fraction, min_evaluate_nodes=1)
    every = calibrated("every")
    here, there = uncertainty(part), uncertainty(every)
    assert here.keys() == there.keys()
    assert all(torch.equal(leaf, there[name]) for name, leaf in here.items())
    assert cards("part") == cards("every")
    assert cards("part").keys() == set(range(4))
    groups = (part.outcome.views, part.outcome.new_clients)
    tested = {client for group in groups for client in group.get("personal", {})}
    number = int(4 * fraction)
    assert len(tested) == number
    if number == 2:
        calibrated("few", fraction_evaluate=fraction, min_evaluate_nodes=1, keep_personal=False)
        assert cards("few").keys() == tested


@pytest.mark.slow
def test_a_client_that_misses_the_last_request_says_so_in_its_card(tmp_path):
    app = make_client_app("fedavg", model=Net, data=load, state=tmp_path)

    def lose(message: Message) -> Message | None:
        head = message.content.get(records.HEADER) or {}
        lost = "judge" in str(head.get("calibration", "")) and len(seen) < 1
        seen.extend([1] * lost)
        return None if lost else grid.ask(message)

    seen: list[int] = []
    grid = InProcessGrid(app, contexts(range(3)), lose)
    strategy = strategy_of("fedavg", calibration="shrunk", run="home")
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=1, timeout=5)
    found = [json.loads(path.read_text()) for path in tmp_path.rglob("personal/card.json")]
    said = {card["client"]: card["uncertainty"]["why"] for card in found}
    assert len(said) == 3
    missed = [text for text in said.values() if "missed a request to calibrate" in text]
    assert len(missed) == 1


# -- where it cannot work --------------------------------------------------------------------------
def own_loop(data, state, read: bool) -> ClientApp:
    """Return an app with its own training loop, on job.train or on what `data` returns."""
    plug = Plug("fedavg", model=Net, data=data, state=state, export=())
    app = ClientApp()
    app.query()(plug.query)
    app.evaluate()(plug.evaluate)

    @app.train()
    def train(message, context):
        job = plug.begin(message, context)
        x, y = (job.train.x, job.train.y) if read else data(context)[0]
        optimizer = torch.optim.Adam(job.parameters(), lr=0.01)
        for rows in torch.arange(len(y)).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(job.model(x[rows]), y[rows]).backward()
            optimizer.step()
        return job.reply(train_loss=0.5)

    return app


@pytest.mark.slow
def test_own_loops_train_on_what_is_left(tmp_path):
    for name, data, read in (("read", load, True), ("by hand", by_hand, False)):
        strategy = run(own_loop(data, tmp_path / name, read), "fedavg", calibration="shrunk")
        assert strategy.faults == []
        assert int(strategy.outcome.calibrated.total.rows) == 42


def test_an_own_loop_whose_data_are_not_seen_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(
        BayflowerError, match=r"did not read job\.train.*let data return \(train, test, calibration"
    ):
        run(own_loop(load, tmp_path / "a", False), "fedavg", calibration="shrunk")
    assert run(own_loop(load, tmp_path / "b", False), "fedavg").faults == []


def test_inside_a_wrapper_nothing_is_held_out_and_one_line_says_so(tmp_path, caplog):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(64, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(torch.relu(self.first(x.flatten(1))))

    inner = strategy_of("fedavg", calibration="shrunk")
    outer = DifferentialPrivacyServerSideFixedClipping(
        inner, noise_multiplier=0.01, clipping_norm=1.0, num_sampled_clients=3
    )
    app = make_client_app("fedavg", model=Plain, data=load, state=tmp_path)
    with caplog.at_level(logging.WARNING, "bayflower"):
        grid = InProcessGrid(app, contexts(range(3)))
        outer.start(grid, ArrayRecord(Plain().state_dict()), num_rounds=1)
    assert sum("calibration is off inside another strategy" in one for one in caplog.messages) == 1
    assert {member.facts.train_size for member in inner.roster.members.values()} == {72}


def test_too_few_samples_everywhere_are_reported(tmp_path):
    few = make_client_app("fedmap", model=Net, data=sized(2), state=tmp_path)
    found = run(few, "fedmap", rounds=1, calibration="shrunk")
    assert "no client held samples out" in str(found.faults)
