"""Data sets, partitions into clients, and the batches and noise of every step. Pure numpy and
torch; nothing here imports flwr.
"""

from .batches import largest_batch, noise, num_steps, plan, rng
from .federation import (
    ClientData,
    Federation,
    Scaling,
    client_scaling,
    describe,
    hold_out,
    load_client,
    load_federation,
    names,
    num_classes,
    scaling,
    standardise,
)
from .settings import DATASETS, PARTITIONS, READINGS, SCENARIOS, DataSettings
from .source import Names, Source
from .sources import load_source, read_npz

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "READINGS",
    "SCENARIOS",
    "ClientData",
    "DataSettings",
    "Federation",
    "Names",
    "Scaling",
    "Source",
    "client_scaling",
    "describe",
    "hold_out",
    "largest_batch",
    "load_client",
    "load_federation",
    "load_source",
    "names",
    "noise",
    "num_classes",
    "num_steps",
    "plan",
    "read_npz",
    "rng",
    "scaling",
    "standardise",
]
