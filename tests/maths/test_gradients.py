"""A gradient does not load torch's compiler, and is the same when the compiler is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ASKED = """
import json, sys
import torch
from torch.func import vmap
from bayflower.maths.gradients import grad_and_value, vjp

def both():
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    slope, value = vmap(grad_and_value(lambda x: (x.sin() * x).sum().exp()))(x)
    back = vjp(lambda x: x.exp() * x, x)[1](x)[0]
    return [part.flatten().tolist() for part in (slope, value, back)]

before, loaded = both(), "torch._dynamo" in sys.modules
limit = torch._dynamo.config.recompile_limit  # any other name loads the compiler
real = "torch._dynamo" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
print(json.dumps([loaded, real, limit, before == both(), before[2]]))
"""


@pytest.mark.slow  # test_fit.py sees that a run loads no compiler
def test_a_gradient_loads_no_compiler_and_does_not_need_one():
    out = subprocess.run(
        [sys.executable, "-c", ASKED], check=True, capture_output=True, text=True
    ).stdout
    loaded, real, limit, same, back = json.loads(out)
    assert not loaded
    assert real
    assert limit > 0
    assert same
    assert len(back) == 12
