"""FedBE's distillation at the server: golden vectors, plain torch, both engines, and what the
server's samples are.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import small, small_prepared, worst_difference
from plainsteps import assert_equal, both, half_rounds
from torch import nn

from bayflower.clients.fedbe import Refiner, divergence, sharpened
from bayflower.data import batches, load_federation
from bayflower.data.unlabelled import unlabelled
from bayflower.engines import execute, prepare
from bayflower.errors import ConfigError
from bayflower.files import checkpoint
from bayflower.rounds.refine import SERVER, missing, refiner_of
from bayflower.rounds.result import result
from bayflower.strategies.fedbe import Update
from bayflower.testing.runs import check_goes_on

FAST = {"be_server_epochs": 3, "be_server_batch": 32, "be_server_lr": 0.05, "be_samples": 3}
REST = {"server_data": "rest", "keep": 0.15, **FAST}
SHORT = {**REST, "be_server_epochs": 1, "be_server_batch": 256, "evaluate_every": 0}


def doubles(value):
    return torch.tensor(value, dtype=torch.float64)


def test_golden_sharpening_divergence_and_gradient(baselines):
    """[eq. 4] and the loss of [eq. 5]."""
    known = baselines["fedbe"]["distil"]
    mean = doubles(known["teacher_logits"]).softmax(-1).mean(0)
    torch.testing.assert_close(mean, doubles(known["mean_probability"]), rtol=1e-9, atol=1e-11)
    taught = sharpened(mean, known["temperature"])
    torch.testing.assert_close(taught, doubles(known["sharpened"]), rtol=1e-9, atol=1e-11)
    logits = doubles(known["student_logits"]).requires_grad_()
    loss = divergence(taught, logits).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), doubles(known["kl_batch_mean"]), rtol=1e-9, atol=0)
    torch.testing.assert_close(logits.grad, doubles(known["grad_student"]), rtol=1e-9, atol=1e-11)
    one = doubles([[0.3], [-1.2]])  # of the second class
    two = torch.cat([torch.zeros_like(one), one], -1)
    torch.testing.assert_close(divergence(taught[:, :2], one), divergence(taught[:, :2], two))


def plain_student(case, state, x, start: int, seed: int = 0, round: int = 1):
    """The student in plain torch: teachers one by one, torch's own SGD, iterates in a list."""
    config, model = case.prepared.run.options, case.prepared.halves.model
    keys = {"seed": seed, "client": SERVER, "round": round}
    shapes = {n: (config.be_samples, *v.shape) for n, v in state.params.items()}
    noise = batches.noise(shapes, **keys, stage="train/teach", step=0, dtype=torch.float64)

    def network(numbers):
        made = model.factory().double()
        made.load_state_dict(copy.deepcopy(numbers))
        return made

    teachers = [network(state.params)]
    for m in range(config.be_samples):
        drawn = {
            n: v + config.be_spread * state.variance[n].sqrt() * noise[n][m]
            for n, v in state.params.items()
        }
        teachers.append(network(drawn))
    with torch.no_grad():
        power = sum(one(x).softmax(1) for one in teachers) / len(teachers)
    power = (power ** (1 / config.be_temperature)).clamp(min=1e-8)
    taught = power / power.sum(1, keepdim=True)
    student, kept = network(state.params), []
    steps = torch.optim.SGD(
        student.parameters(), lr=config.be_server_lr, momentum=0.9, weight_decay=1e-5
    )
    phase = Refiner(config, None, model).phases("train")[1]
    assert phase.batch_size == 32
    assert phase.epochs == 3
    for number, (rows,) in enumerate(
        batches.plan(len(x), phase, **keys, purpose="train", coupled=False), start=1
    ):
        steps.zero_grad()
        said = student(x[rows]).log_softmax(1)
        nn.functional.kl_div(said, taught[rows], reduction="batchmean").backward()
        steps.step()
        if number >= start and (number - start) % 25 == 0:
            kept.append({n: v.detach().clone() for n, v in student.named_parameters()})
    last = {n: v.detach() for n, v in student.named_parameters()}
    return {n: sum(one[n] for one in kept) / len(kept) for n in last} if kept else last, len(kept)


@pytest.mark.parametrize(
    ("start", "averaged"), [(60, True), pytest.param(10_000, False, marks=pytest.mark.slow)]
)
def test_the_student_equals_plain_torch(start, averaged):
    """[eq. 3] at the server, [eq. 4] and [eq. 5], from the mean and the spread of two rounds."""
    case = both("fedbe", be_swa_start=start, **REST)
    prepared = case.prepared
    state, _, _ = list(half_rounds(case, 2))[-1]
    refine = refiner_of(prepared.run, prepared.halves, prepared.federation.input_shape)
    got = refine(None, state, 1)
    want, number = plain_student(case, state, refine.data.x, start)
    assert (number >= 2) is averaged
    assert_equal(got.params, want)
    assert_equal(got.variance, state.variance)
    assert worst_difference(got.params, state.params) > 1e-3
    assert refine(state, state, 1) is state  # no reply: nothing to distil


@pytest.mark.parametrize("model", ["auto", pytest.param("mlp-bn", marks=pytest.mark.slow)])
def test_engines_agree_and_each_round_is_distilled(model):
    run = {"dtype": "float64", "rounds": 2, "new_clients": 0, "model": model, **SHORT}
    run |= {"optimizer": "sgd", "lr": 0.05}
    loop, fused = (execute(small_prepared("fedbe", engine, **run)) for engine in ("loop", "fused"))
    assert worst_difference(fused.server_state, loop.server_state, zero=1e-9) < 1e-9
    plain = execute(small_prepared("fedbe", "fused", **{**run, "server_data": ""}))
    assert worst_difference(fused.server_state.params, plain.server_state.params) > 1e-3
    again = execute(small_prepared("fedbe", "fused", **run))
    for name, value in again.server_state.params.items():
        assert torch.equal(value, fused.server_state.params[name])


@pytest.mark.slow
def test_the_student_agrees_with_its_teachers_more_than_the_mean_does():
    """What distillation is for: KL(p-hat ‖ student) < KL(p-hat ‖ mean) on the server's samples."""
    case = both("fedbe", be_swa_start=10_000, **{**REST, "be_server_epochs": 10, "be_spread": 3.0})
    prepared = case.prepared
    state, _, _ = list(half_rounds(case, 2))[-1]
    refine = refiner_of(prepared.run, prepared.halves, prepared.federation.input_shape)
    half, data = refine.half, refine.data
    work = half.begin(refine.state, state, data)
    noise = batches.noise(
        half.noise("teach", 2),
        seed=0,
        client=SERVER,
        round=1,
        stage="train/teach",
        step=0,
        dtype=torch.float64,
    )
    taught = half.taught(work, noise)
    far = [
        float(divergence(taught, half.model.forward(p, {}, data.x, train=False)[0]).mean())
        for p in (state.params, refine(None, state, 1).params)
    ]
    assert far[1] < 0.8 * far[0]


@pytest.mark.parametrize("engine", ["fused", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_run_that_stopped_goes_on_to_the_same_bits(engine, tmp_path):
    def made(rounds):
        settings = {**SHORT, "new_clients": 0, "checkpoint_every": 1, "local_epochs": 1}
        return small_prepared("fedbe", engine, **settings, rounds=rounds)

    check_goes_on(execute(made(3)), made, tmp_path)


def test_a_run_of_a_version_without_distillation_goes_on(tmp_path):
    settings = {"keep": 0.15, "new_clients": 0, "checkpoint_every": 1, "local_epochs": 1}
    execute(small_prepared("fedbe", "fused", **settings, rounds=1), out=tmp_path)
    known = checkpoint.read(tmp_path)
    new = {"server_data", *(name for name in known.config if name.startswith(("be_s", "be_t")))}
    new -= {"be_samples", "be_spread"}
    assert len(new) == 6
    older = {key: value for key, value in known.config.items() if key not in new}
    checkpoint.write(tmp_path, known._replace(config=older))
    rest = small_prepared("fedbe", "fused", **settings, rounds=2)
    assert checkpoint.to_resume(tmp_path, rest.run).round == 1
    other = small("fedbe", **settings, rounds=2, be_temperature=0.7)
    with pytest.raises(ConfigError, match=r"be_temperature is 0\.7 but the run in"):
        checkpoint.to_resume(tmp_path, other)


def test_samples_of_the_server_are_the_rest_or_a_file(tmp_path):
    run = small("fedbe", **REST)
    federation = load_federation(run.data, 0)
    x = unlabelled(run.data, 0, federation.input_shape, "none")
    whole = {
        row.tobytes()
        for one in (*federation.clients, *federation.new_clients)
        for row in (*one.x_train, *one.x_test)
    }
    assert len(x) + federation.partition["kept"] == federation.partition["pooled"]
    # digits has two pairs of equal images at most
    assert sum(row.tobytes() in whole for row in x) <= 2
    path = tmp_path / "more.npz"
    np.savez(path, x=np.arange(5 * 64, dtype=np.float32).reshape(5, 1, 8, 8) / 320)
    for_file = small("fedbe", **{**REST, "server_data": str(path)})
    assert unlabelled(for_file.data, 0, (1, 8, 8), "none").shape == (5, 1, 8, 8)
    with pytest.raises(ConfigError, match="clients have \\(3,\\)"):
        unlabelled(for_file.data, 0, (3,), "none")
    np.savez(tmp_path / "empty.npz", y=np.zeros(3))
    wrong = small("fedbe", **{**REST, "server_data": str(tmp_path / "empty.npz")})
    prepared = prepare(wrong, "loop")
    with pytest.raises(ConfigError, match="no samples in an array x"):
        execute(prepared)
    lost = small("fedbe", **{**REST, "server_data": str(tmp_path / "lost.npz")})
    with pytest.raises(ConfigError, match="file with an array x, or 'rest'"):
        unlabelled(lost.data, 0, (1, 8, 8), "none")
    with pytest.raises(ConfigError, match="keep=1 leaves nothing"):
        small("fedbe", **{**REST, "keep": 1.0})


def test_a_table_at_the_server_is_standardised_by_everyones_numbers(tmp_path):
    table = np.random.default_rng(0).normal(3.0, 2.0, (40, 4)).astype(np.float32)
    np.savez(tmp_path / "t.npz", x=table)
    data = small("fedbe", server_data=str(tmp_path / "t.npz")).data
    own = unlabelled(data, 0, (4,), "client")
    np.testing.assert_allclose(own.mean(0), 0, atol=1e-6)
    scaled = small("fedbe", server_data=str(tmp_path / "t.npz"), input_scale="federation").data
    text = "1.0,2.0,3.0,4.0/2.0,2.0,2.0,2.0"
    want = (table - np.array([1.0, 2, 3, 4])) / 2
    np.testing.assert_allclose(unlabelled(scaled, 0, (4,), text), want, rtol=1e-6)


def test_without_samples_the_result_says_so_in_one_line():
    prepared = small_prepared("fedbe", "fused", rounds=1, new_clients=0, **FAST)
    found = result(prepared.run, "fused", prepared.federation, prepared.halves, execute(prepared))
    assert found["remark"] == (
        "the server has no samples without labels (server_data), so FedBE leaves out its step on "
        "them"
    )
    assert missing(small("fedavg")) is None
    assert missing(small("fedbe", **REST)) is None


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="be_temperature must be positive"):
        small("fedbe", be_temperature=0.0)
    with pytest.raises(ConfigError, match="be_server_epochs must be at least 1"):
        small("fedbe", be_server_epochs=0)
    numbers = small("fedbe", **{**REST, "task": "regression", "dataset": "x.npz"})
    halves = small_prepared("fedbe").halves
    with pytest.raises(ConfigError, match="distils classes"):
        refiner_of(numbers, halves, (1, 8, 8))


def test_an_update_of_the_server_is_a_model():
    case = both("fedbe", **REST)
    server = case.prepared.halves.server
    state, _, _ = next(iter(half_rounds(case, 1)))
    moved = {n: v + 1 for n, v in state.params.items()}
    after = server.refined(state, Update(torch.tensor(3), moved, {}))
    assert_equal(after.params, moved)
    assert_equal(after.variance, state.variance)
