"""What is declared private never appears in a message (loop engine; ray and deployment in
test_flower).
"""

from __future__ import annotations

import pytest
import torch
from conftest import some
from flwr.app import ArrayRecord
from rig import Rig

from bayflower.methods import METHODS
from bayflower.tree import flatten

# one method for each set of private fields; `make slow` has all methods
PRIVATE = set({row.client.private: name for name, row in METHODS.items()}.values())


@pytest.mark.parametrize("method", some(sorted(METHODS), PRIVATE))
def test_canaries_in_private_fields_never_travel(method):
    """Plant a bit pattern in every declared private field of a client's state and look for it in
    every byte of every message.
    """
    canary = torch.tensor(1.2345e-7, dtype=torch.float32)
    pattern = canary.numpy().tobytes()
    # nearly no movement: planted values stay as they are
    settings = {
        # behind BatchNorm a planted network has planted features, whose means are to travel
        "model": "mlp" if method == "fedproto" else "mlp-bn",
        "lr": 1e-30,
        "optimizer": "sgd",
        "keep": 0.1,
        "local_epochs": 1,
    }
    rig = Rig(method, members=[0, 1, 2], rounds=2, **settings)
    original = type(rig.halves.client).finish

    class Planted(type(rig.halves.client)):
        def finish(self, state, work, data):
            new, update = original(self, state, work, data)
            for field in self.private:
                if isinstance(getattr(new, field), dict):
                    new = new._replace(
                        **{
                            field: {
                                k: torch.full_like(v, float(canary)) if v.is_floating_point() else v
                                for k, v in getattr(new, field).items()
                            }
                        }
                    )
            return new, update

    import bayflower.flower.client as base

    row_client = base.make_half
    planted = []

    def make_half(method, instructions, model):
        half = row_client(method, instructions, model)
        half.__class__ = Planted
        planted.append(half)
        return half

    base.make_half = make_half
    try:
        rig.start(rounds=2)
    finally:
        base.make_half = row_client
    assert planted
    private = [
        name
        for field in rig.halves.client.private
        for name in flatten({field: getattr(rig.halves.client.init(*rig.halves.initial), field)})
    ]
    messages = [m for m in rig.seen if m.has_content()]
    assert len(messages) >= 10
    for message in messages:
        for record in message.content.values():
            blocks = (
                [array.data for array in record.values()]
                if isinstance(record, ArrayRecord)
                else [repr(dict(record)).encode()]
            )
            for block in blocks:
                assert pattern not in block, (method, message.metadata.message_type, private[:3])
