"""The server's memory does not grow with the number of replies."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEMORY = """
import resource, sys, torch, gc
from flwr.app import Message, RecordDict, MetricRecord
from bayflower.flower import records as wire
from bayflower.wire.hello import ClientInfo, to_header
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.strategies import FedAvg
from bayflower.strategies.fedavg import Update
from bayflower.errors import BayflowerError
from bayflower.networks.model import Anatomy

torch.set_num_threads(1)
REPLIES, SIZE = int(sys.argv[1]), 600_000
layers = {f"layer{i}": torch.randn(SIZE // 6) for i in range(6)}
anatomy = Anatomy(tuple(layers), (), frozenset(), frozenset())

def app(message, context):
    client = context.node_config["partition-id"]
    if message.metadata.message_type == "query":
        facts = to_header(ClientInfo(anatomy, (1,), 2, 1 + client, 1, {}))
        head = wire.make_header(client=client, new=False, **facts)
        return Message(RecordDict({wire.HEADER: head}), reply_to=message)
    if message.metadata.message_type == "evaluate":
        raise RuntimeError("nothing to test")
    told = wire.header(message, ("method", "run", "round"))
    generator = torch.Generator().manual_seed(client)
    params = {k: torch.randn(v.shape, generator=generator) for k, v in layers.items()}
    update = Update(torch.tensor(1 + client), params, {})
    told = {name: told[name] for name in ("method", "run", "round")}
    numbers = MetricRecord({wire.TRAIN_LOSS: 0.0})
    content = {wire.UPDATE: wire.to_arrays(update), wire.METRICS: numbers}
    content[wire.HEADER] = wire.make_header(**told, client=client)
    return Message(RecordDict(content), reply_to=message)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

def start(replies):
    strategy = FedAvg(
        min_available_nodes=1, min_train_nodes=1, min_evaluate_nodes=1,
        robust="off",  # the first round of robust=clip keeps its replies
    )
    try:
        grid = InProcessGrid(app, contexts(range(replies)))
        strategy.start(grid, wire.to_arrays(layers), num_rounds=1)
    except BayflowerError as error:
        assert "no client could be tested" in str(error)
    return strategy

start(1)  # everything is imported and warm
open("/proc/self/clear_refs", "w").write("5")
before = peak()
strategy = start(REPLIES)
assert strategy.records[0]["num_clients"] == REPLIES, strategy.faults[:3]
print((peak() - before) / (4 * SIZE))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("replies", [60, 1000])
def test_many_replies_need_the_memory_of_a_few(replies):
    """Server and one client at a time in one process: growth of the peak (8 models or so, as with
    50 replies) under 16 models.
    """
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, str(replies)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    growth = float(printed.stdout.split()[-1])
    assert growth < 16, f"{growth:.1f} models"
