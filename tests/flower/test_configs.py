"""Flower's configs and logs: settings of local training in `train_config`, `evaluate_config` and
the run config; what a strategy tells; what `evaluate_fn` gets.
"""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from conftest import assert_same_bits, some
from flwr.app import ConfigRecord, MetricRecord
from smallapp import CLIENTS, Small, app, grid, initial, make
from torch import nn

from bayflower import strategies
from bayflower.errors import ConfigError
from bayflower.flower import records


def told(where, kind: str = "train") -> list[dict]:
    """Return the settings of local training in all messages of a kind, as they are sent."""
    found: list[dict] = []

    def spy(message):
        if message.metadata.message_type == kind:
            head = dict(message.content[records.HEADER])
            found.append(json.loads(head["instructions"])["training"])
        return where.ask(message)

    where.fail = spy
    return found


def warnings(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


# -- settings in configs -------------------------------------------------------------------------
def test_settings_in_train_config_are_those_of_local_training(tmp_path, caplog):
    """The run is that of a strategy made with these settings; where the strategy was made with
    others, a warning says both values once.
    """
    config = ConfigRecord({"lr": 0.05, "local-epochs": 2, "batch-size": 6, "mine": "x"})
    strategy = strategies.FedMAP(min_available_nodes=CLIENTS, lr=0.002, run="a")
    with caplog.at_level(logging.WARNING, "bayflower"):
        strategy.start(
            grid(app("fedmap", tmp_path / "a")), initial(), num_rounds=2, train_config=config
        )
    assert warnings(caplog) == [
        "train_config has lr=0.05, but the strategy was made with 0.002; 0.05 is used"
    ]
    other = make(strategies.FedMAP, lr=0.05, local_epochs=2, batch_size=6, run="a")
    other.start(grid(app("fedmap", tmp_path / "b")), initial(), num_rounds=2)
    assert_same_bits(strategy.state, other.state)
    assert [one["train_loss"] for one in strategy.records] == [
        one["train_loss"] for one in other.records
    ]


def test_a_schedule_in_configure_train_reaches_the_clients(tmp_path):
    """The way of Flower's advanced example: the config keeps what a hook writes into it."""

    class Decaying(strategies.FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round > 1:
                config["lr"] *= 0.5
            return super().configure_train(server_round, arrays, config, grid)

    where = grid(app("fedavg", tmp_path))
    seen = told(where)
    strategy = make(Decaying, lr=0.4)
    config = ConfigRecord({"lr": 0.4})
    strategy.start(where, initial(), num_rounds=3, train_config=config)
    assert [one["lr"] for one in seen[::CLIENTS]] == [0.4, 0.2, 0.1]


def test_what_cannot_be_honoured_is_said_once_with_both_values(tmp_path, caplog):
    where = grid(app("fedavg", tmp_path), run_config={"local-epochs": 3, "learning-rate": 0.1})
    with caplog.at_level(logging.WARNING, "bayflower"):
        make(strategies.FedAvg).start(
            where,
            initial(),
            num_rounds=2,
            train_config=ConfigRecord({"optimizer": "sgd", "local-steps": 2, "local-epochs": 1}),
            evaluate_config=ConfigRecord({"batch-size": 256}),
        )
    text = "\n".join(said := warnings(caplog))
    assert len(said) == 5
    assert "train_config has optimizer=sgd, but the strategy trains with adam" in text
    assert "has local_epochs=1, but the strategy trains local_steps=2 a round" in text
    assert "evaluate_config has batch_size=256, which is only sent to the clients" in text
    assert "the app's run config has local_epochs=3, but the strategy trains with 1" in text
    assert "the app's run config has lr=0.1, but the strategy trains with 0.01" in text
    with pytest.raises(ConfigError, match="batch_size must be a whole number, got 'many'"):
        make(strategies.FedAvg).start(
            where, initial(), num_rounds=1, train_config=ConfigRecord({"batch-size": "many"})
        )


def test_the_apps_run_config_can_be_the_strategys(tmp_path, caplog):
    config = {"local-epochs": 3, "learning-rate": 0.1, "batch-size": 12, "num-server-rounds": 9}
    where = grid(app("fedavg", tmp_path), run_config=config)
    seen = told(where)
    strategy = strategies.FedAvg(min_available_nodes=CLIENTS, run_config=config, lr=0.02)
    with caplog.at_level(logging.WARNING, "bayflower"):
        strategy.start(where, initial(), num_rounds=1)
    assert {(one["local_epochs"], one["batch_size"], one["lr"]) for one in seen} == {(3, 12, 0.02)}
    assert [text for text in warnings(caplog) if "local_epochs" in text] == []


# -- logs ------------------------------------------------------------------------------------------
class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def test_strategies_log_as_flowers_own_do(tmp_path):
    ear = Listening()
    logging.getLogger("flwr").addHandler(ear)
    where = grid(app("fedmap", tmp_path))
    train = where.ask

    def ill(message):
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node == 1001 and kind == "train":
            raise RuntimeError("disk on fire")
        return train(message)

    def fail(message):
        try:
            return ill(message)
        except RuntimeError as error:
            from flwr.app import Error, Message

            return Message(Error(code=2, reason=str(error)), reply_to=message)

    where.fail = fail
    try:
        make(strategies.FedMAP, sigma2=7.0).start(
            where,
            initial(),
            num_rounds=2,
            train_config=ConfigRecord({"mine": 3}),
            evaluate_fn=lambda round, arrays: MetricRecord({"norm": 1.0}),
        )
        said, ear.lines = "\n".join(ear.lines), []
        make(strategies.FedMAP, quiet=True).start(where, initial(), num_rounds=1)
        assert ear.lines == []
    finally:
        logging.getLogger("flwr").removeHandler(ear)
    lines = [
        "INFO: Starting FedMAP strategy:",
        r"INFO: .*Number of rounds: 2",
        r"INFO: .*ArrayRecord \(0\.00 MB\)",
        r"INFO: .*ConfigRecord \(train\): {'mine': 3}",
        r"INFO: .*ConfigRecord \(evaluate\): \(empty!\)",
        r"INFO: .*Fraction: train \(1\.00\)",
        r"INFO: .*Local training: optimizer=adam, lr=0\.01, batch_size=8, local_epochs=1",
        r"INFO: .*Method: sigma2=7\.0",
        "INFO: Initial global evaluation results: {'norm': 1.0}",
        r"INFO: \[ROUND 1/2\]",
        r"INFO: configure_train: Sampled 4 nodes \(out of 4\)",
        "WARNING: round 1, client 1: reply not used: the client failed: disk on fire",
        "INFO: aggregate_train: Received 3 results and 1 failures",
        "INFO: .*Aggregated MetricRecord: {'train-loss': ",
        r"INFO: .*Round finished in \d+\.\d\ds",
        r"INFO: Global evaluation: {'norm': 1\.0}",
        r"INFO: \[ROUND 2/2\]",
        r"INFO: configure_evaluate: Sampled 4 nodes \(out of 4\)",
        "INFO: aggregate_evaluate: Received 4 results and 0 failures",
        "INFO: .*Aggregated MetricRecord: .*'accuracy': ",
        r"INFO: Strategy execution finished in \d+\.\d\ds",
        "INFO: Final results:",
        "INFO: .*round  clients  train loss  accuracy  MB up  seconds",
        r"INFO: .* 2 +3 +\d\.\d{4} +0\.\d{4} +0\.\d\d +\d+\.\d\d",
        "INFO: .*2 faults were logged",
    ]
    assert re.search(r".*\n(?:.*\n)*?".join(lines), said), said


# -- what evaluate_fn gets -------------------------------------------------------------------------
class Full(Small):
    """A network with a frozen layer, tied weights and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5).requires_grad_(False)
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(5))
            self.stem.bias.zero_()
        self.norm, self.one, self.two = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x):
        x = self.norm(torch.relu(self.base(self.stem(x))))
        return self.head(self.two(torch.relu(self.one(x))))


OWN = {
    "FedAvg": set(),
    "FedPer": {"head.weight", "head.bias"},
    "FedMAP": {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
}


@pytest.mark.parametrize("method", some(list(OWN), ["FedPer"]))
def test_evaluate_fn_gets_a_network_that_loads(method, tmp_path, caplog):
    """Every array is there; what the method shares is what the server has, tied weights alike; what
    it keeps on the clients is initial, and a warning names it.
    """
    seen = {}

    def evaluate(round, arrays):
        state = arrays.to_torch_state_dict()
        Full().load_state_dict(state)
        seen[round] = state

    strategy, start = make(getattr(strategies, method)), initial(Full)
    made = app(method.lower(), tmp_path, Full)
    with caplog.at_level(logging.WARNING, "bayflower"):
        result = strategy.start(grid(made), start, num_rounds=1, evaluate_fn=evaluate)
    first, shared = start.to_torch_state_dict(), strategy.half.shared(strategy.state)
    assert sorted(seen) == [0, 1]
    assert_same_bits(seen[1], result.arrays.to_torch_state_dict())
    for name, value in seen[1].items():
        at = "one.weight" if name == "two.weight" else name
        assert (at in shared) == (at not in OWN[method] and not name.startswith("stem")), name
        assert torch.equal(value, shared.get(at, first[name])), name
    assert not torch.equal(seen[1]["two.weight"], first["two.weight"])
    kept = [text for text in warnings(caplog) if "keeps" in text]
    assert len(kept) == bool(OWN[method])
    assert all(name in kept[0] for name in OWN[method])
    assert sum("do not train 2 arrays of initial_arrays" in one for one in warnings(caplog)) == 1


def test_a_method_without_a_global_model_refuses_evaluate_fn(tmp_path):
    with pytest.raises(ConfigError, match="shares nothing, so there is no global model"):
        make(strategies.Local).start(
            grid(app("local", tmp_path)), initial(), evaluate_fn=lambda *_: None
        )
