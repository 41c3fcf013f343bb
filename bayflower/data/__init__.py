"""Data sets, partitions into clients, and the batches and noise of every step. Pure numpy and
torch; nothing here imports flwr.
"""

from .alike import read_alike
from .batches import largest_batch, noise, num_steps, plan, rng
from .doors import name_of, read, save
from .federation import (
    ClientData,
    Federation,
    client_scaling,
    describe,
    hold_out,
    load_client,
    load_federation,
    names,
    num_classes,
    raw_client,
    table_of,
)
from .identity import Identity, called, identities, reported
from .npz import read_npz, read_numbered
from .scaling import Scaling, preparation, scaling
from .settings import DATASETS, PARTITIONS, READINGS, SCENARIOS, DataSettings
from .sites import absolute, resolve
from .source import Names, Source
from .sources import load_source, source_of

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "READINGS",
    "SCENARIOS",
    "ClientData",
    "DataSettings",
    "Federation",
    "Identity",
    "Names",
    "Scaling",
    "Source",
    "absolute",
    "called",
    "client_scaling",
    "describe",
    "hold_out",
    "identities",
    "largest_batch",
    "load_client",
    "load_federation",
    "load_source",
    "name_of",
    "names",
    "noise",
    "num_classes",
    "num_steps",
    "plan",
    "preparation",
    "raw_client",
    "read",
    "read_alike",
    "read_npz",
    "read_numbered",
    "reported",
    "resolve",
    "rng",
    "save",
    "scaling",
    "source_of",
    "table_of",
]
