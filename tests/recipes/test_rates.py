"""Optimisers and learning rates of recipes against torch.optim, one client and stacks alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import assert_same_bits, small, small_prepared, some, worst_difference
from torch.func import vmap

from bayflower.config import parse
from bayflower.contract import Work
from bayflower.engines import execute
from bayflower.errors import ConfigError
from bayflower.files.checkpoint import to_resume
from bayflower.flower import wrapped
from bayflower.flower.classes import strategy_class
from bayflower.maths.optim import SHARE, Optimizer
from bayflower.methods import METHODS
from bayflower.recipes import Training
from bayflower.recipes.rates import Schedule, at_share
from bayflower.recipes.step import of

STEPS = 7
OPTIMIZERS = {
    "adamw": (
        Optimizer("adamw", 0.02, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.3),
    ),
    "adam": (
        Optimizer("adam", 0.02, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.3),
    ),
    "nesterov": (
        Optimizer("sgd", 0.1, 0.9, 0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    ),
    "momentum": (Optimizer("sgd", 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "sgd": (
        Optimizer("sgd", 0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    ),
    "rmsprop": (
        Optimizer("rmsprop", 0.01, 0.5),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    ),
}


def problem(clients: int = 3):
    """Parameters and slopes of some clients, in float64."""
    draw = torch.Generator().manual_seed(0)
    values = {
        "w": torch.randn(clients, 4, 3, generator=draw, dtype=torch.float64),
        "b": torch.randn(clients, 3, generator=draw, dtype=torch.float64),
    }
    slopes = [
        {
            name: torch.randn(value.shape, generator=draw, dtype=torch.float64)
            for name, value in values.items()
        }
        for _ in range(STEPS)
    ]
    return values, slopes


def by_torch(make, values, slopes, shares, client):
    """torch.optim's own steps of one client; its rate is set by hand before each step."""
    params = {name: torch.nn.Parameter(value[client].clone()) for name, value in values.items()}
    optimizer = make(list(params.values()))
    lr = optimizer.param_groups[0]["lr"]
    for slope, share in zip(slopes, shares, strict=True):
        optimizer.param_groups[0]["lr"] = lr * share[client]
        for name, param in params.items():
            param.grad = slope[name][client].clone()
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs_alone_and_stacked(name, scheduled):
    optimizer, make = OPTIMIZERS[name]
    optimizer = dataclasses.replace(optimizer, scheduled=scheduled)
    values, slopes = problem()
    shares = [[1.0, 1.0, 1.0]] * STEPS
    if scheduled:  # every client has a rate of its own
        shares = [[0.1 + 0.1 * step, 1.0 / (step + 1), 0.0] for step in range(STEPS)]
    state = vmap(optimizer.init)(values)
    assert bool(state.rate) == scheduled
    together = {key: value.clone() for key, value in values.items()}
    for slope, share in zip(slopes, shares, strict=True):
        if scheduled:
            state.rate[SHARE].copy_(torch.tensor(share, dtype=torch.float64))
        optimizer.update_stack(together, {k: v.clone() for k, v in slope.items()}, state)
    for client in range(3):
        wanted = by_torch(make, values, slopes, shares, client)
        alone = {key: value[client] for key, value in values.items()}
        own = optimizer.init(alone)
        for slope, share in zip(slopes, shares, strict=True):
            if scheduled:
                own = own._replace(rate={SHARE: torch.tensor(share[client], dtype=torch.float64)})
            alone, own = optimizer.update(alone, {k: v[client] for k, v in slope.items()}, own)
        for key, value in wanted.items():
            torch.testing.assert_close(alone[key], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(together[key][client], value, rtol=1e-12, atol=1e-12)


def test_a_rate_that_does_not_change_is_no_tensor():
    for training in (Training(), Training(warmup_rounds=1, warmup_steps=1)):
        assert not training.scheduled
        assert training.make_optimizer().init({"w": torch.ones(2)}).rate == {}


def torch_rates(kind: str, warmup: int, length: int) -> list[float]:
    """The factors of torch's schedulers, one after another."""
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    main = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        "step": lambda: schedulers.StepLR(optimizer, 3, 0.3),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, length - warmup, 0.1),
    }[kind]
    if warmup:
        rise = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, max(warmup - 1, 1))
        scheduler = schedulers.SequentialLR(optimizer, [rise, main()], [warmup])
    else:
        scheduler = main()
    found = []
    for _ in range(length):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warmup", [0, 2, 4])
@pytest.mark.parametrize("kind", ["constant", "step", "cosine"])
def test_schedules_are_torchs(kind, warmup):
    schedule = Schedule(kind, warmup, 3, 0.3, 0.1, 12)
    assert [schedule.at(t) for t in range(12)] == pytest.approx(torch_rates(kind, warmup, 12))


def test_rounds_and_steps_multiply_and_only_training_has_schedules():
    recipe = of(Training(schedule="cosine", schedule_rounds=10, local_schedule="cosine"), 3)
    half = recipe.share("train", 6, 0, 4)
    assert half == pytest.approx(0.5)
    assert recipe.share("train", 6, 2, 4) == pytest.approx(0.25)
    assert recipe.share("train", 40, 0, 4) == 0  # after its end a cosine stays at its floor
    assert recipe.share("finetune", 6, 2, 4) == recipe.share("new", 6, 2, 4) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule": "step"}, "drop_rounds says how often"),
        ({"drop_steps": 3}, "local_schedule=constant drop_steps=3"),
        ({"schedule": "linear"}, "schedule must be one of constant, step, cosine"),
        ({"lr_floor": 2}, r"lr_floor must be in \[0, 1\]"),
        ({"drop_factor": 0}, r"drop_factor must be in \(0, 1\]"),
        ({"warmup_rounds": -1}, "warmup_rounds must be at least 0"),
        ({"nesterov": True, "optimizer": "sgd"}, "nesterov is for sgd with momentum"),
        ({"optimizer": "adamw", "momentum": 0.9}, "got 0.9 with adamw"),
        ({"optimizer": "lion"}, "optimizer must be sgd, adam, adamw or rmsprop"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        parse("fedavg", values)


def test_methods_that_need_one_rate_say_so_at_the_start():
    with pytest.raises(ConfigError, match=r"^feddc divides by steps × lr"):
        parse("feddc", {"schedule": "cosine"})
    with pytest.raises(ConfigError, match=r"^fedpa samples a posterior by SGD at one rate"):
        parse("fedpa", {"local_schedule": "cosine"})
    parse("fedpa", {"schedule": "cosine"})
    with pytest.raises(ConfigError, match=r"^fedbps takes its prior from weight_decay"):
        parse("fedbps", {"optimizer": "adamw", "weight_decay": 0.1})
    parse("fedbps", {"optimizer": "adamw", "weight_decay": 0.1, "delta": 1.0})


def test_a_cosine_lasts_as_long_as_the_run():
    assert parse("fedavg", {"schedule": "cosine", "rounds": 7}).training.schedule_rounds == 7
    given = {"schedule": "cosine", "rounds": 7, "schedule_rounds": 9}
    assert parse("fedavg", given).training.schedule_rounds == 9
    assert parse("fedavg", {"rounds": 7}).training.schedule_rounds == 0
    strategy = strategy_class("fedavg")(schedule="cosine")
    assert "schedule_rounds" in (wrapped.refusal(METHODS["fedavg"], strategy.training) or "")
    assert strategy.training.lasting(5).schedule_rounds == 5


def test_instructions_name_only_what_is_not_off():
    assert "schedule" not in parse("fedavg").instructions()
    assert '"schedule": "cosine"' in parse("fedavg", {"schedule": "cosine"}).instructions()


def test_a_share_goes_into_the_next_step():
    training = Training(optimizer="sgd", schedule="cosine", schedule_rounds=3)
    phase = training.phase("local")
    start = {"w": torch.ones(2)}
    work = Work(start, {}, {}, phase.optimizer.init(start))
    assert at_share(work, 0.25).opt.rate[SHARE] == 0.25


RATES = {
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": True,
    "schedule": "cosine",
    "warmup_rounds": 1,
    "local_schedule": "step",
    "drop_steps": 2,
    "warmup_steps": 2,
    "rounds": 3,
    "dtype": "float64",
    "keep": 0.15,
    "new_client_epochs": 1,
}


@pytest.mark.parametrize(
    "method", some(["fedavg", "fedmap", "scaffold", "fedrep", "maml"], ["scaffold"])
)
def test_fused_agrees_with_loop(method):
    given = RATES
    states = [
        execute(small_prepared(method, engine=engine, **given)).server_state
        for engine in ("fused", "loop")
    ]
    assert worst_difference(*states) < 1e-9
    other = execute(small_prepared(method, engine="loop", **{**given, "schedule": "constant"}))
    assert worst_difference(states[1], other.server_state) > 1e-6


def test_resume_takes_the_rate_of_its_round(tmp_path):
    for engine in ("loop", "fused"):
        given = {**RATES, "rounds": 4, "checkpoint_every": 2}
        whole = execute(small_prepared("fedavg", engine=engine, **given))
        folder = tmp_path / engine
        first = small_prepared("fedavg", engine=engine, **{**given, "schedule_rounds": 4})
        stopped = dataclasses.replace(
            first.run, settings=dataclasses.replace(first.run.settings, rounds=2)
        )
        execute(first._replace(run=stopped), out=folder)
        rest = execute(first, out=folder, resume=to_resume(folder, first.run))
        assert_same_bits(whole.server_state, rest.server_state)


def test_settings_have_the_same_names_in_a_strategy():
    strategy = strategy_class("fedprox")(optimizer="adamw", warmup_steps=3, weight_decay=0.1)
    assert strategy.training.optimizer == "adamw"
    assert strategy.training.warmup_steps == 3
    assert small("fedprox", warmup_steps=3).training.warmup_steps == 3
