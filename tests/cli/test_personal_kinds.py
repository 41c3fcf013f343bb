"""Personal models: what they say of their uncertainty, by kind of posterior, and the commands that
save and read them.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from personalruns import TRAINED, end_of, trained, using
from safetensors.torch import load_file, save_file

import bayflower
from bayflower import cli
from bayflower.calibration import curves, trust
from bayflower.errors import ConfigError
from bayflower.maths import laplace
from bayflower.networks.model import Batch
from bayflower.personal import export, export_all, keep, load_personal
from bayflower.personal.card import auroc
from bayflower.personal.doubt import answered, tail
from bayflower.personal.runs import finished, open_run
from bayflower.rounds.calibrated import take_home

KINDS = [
    ("fedmap", "laplace", "kronecker"),
    ("fedbps", "own", "diagonal"),
    ("metavd", "own", "sampled"),
    ("pfedvmp", "own", "classes"),
]


# -- uncertainty ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "name", "kind", "formats"),
    [
        (*KINDS[0], ("pt2",)),
        (*KINDS[3], ()),
        *(pytest.param(*one, ("pt2", "onnx"), marks=pytest.mark.slow) for one in KINDS),
    ],
)
def test_a_posterior_in_use_says_what_judge_says(method, name, kind, formats, runs, tmp_path):
    """From the files, by the exported programs, and by `judge`; a scale, a temperature and a bias
    that are not neutral.
    """
    scale = 0.01 if kind == "classes" else 0.7
    own = kind == "diagonal"  # whether doubt is that of the network itself
    end = using(end_of(runs(method), TRAINED), name, scale, plain=own)
    assert end.taken.kinds[name][0] == kind
    card = keep(tmp_path, end, ("safetensors", *formats))
    assert card["uncertainty"]["posterior"]["kind"] == kind
    assert f"scaled down to {scale} times" in card["uncertainty"]["why"]
    model, judged = load_personal(tmp_path), end.taken.one.judged
    y, rows = end.data.test.y.numpy(), np.arange(len(end.data.test.y))
    said = model.uncertainty(end.data.test.x)
    nll = -np.log(said.probabilities[rows, y]).sum()
    assert nll == pytest.approx(float(judged["test"].tallies["calibrated"].nll), abs=1e-6)
    plain = -np.log(said.point[rows, y]).sum()
    assert plain == pytest.approx(float(judged["test"].tallies["point"].nll), abs=1e-5)
    assert abs(nll - plain) > 1e-3  # or the test could not see a posterior
    assert int(said.sets[rows, y].sum()) == int(judged["test"].trusts["calibrated"].covered)
    assert int(said.sets.sum()) == int(judged["test"].trusts["calibrated"].set_size)
    assert card["metrics"]["nll"] == pytest.approx(nll / len(y), abs=1e-6)
    assert np.allclose(said.doubt, 1 - (said.point if own else said.probabilities).max(1))
    assert ("network itself" in card["uncertainty"]["doubt"]) == own
    trusts = judged["test"].trusts["calibrated"]
    wrong = trust.doubt_bin(torch.as_tensor(said.doubt[said.label != y]))
    assert torch.equal(torch.bincount(wrong, minlength=trust.BINS), trusts.wrong)
    # the programs say the same, of many samples and of one
    reader = {"pt2": lambda path: torch.export.load(path).module(), "onnx": onnx}
    for name in formats:
        program = reader[name](tmp_path / card["files"][name])
        for size in (1, len(y)):
            got = program(end.data.test.x[:size])
            for key in ("probabilities", "doubt", "entropy", "distance"):
                want = getattr(said, key)[:size]
                assert np.allclose(got[key].detach().numpy(), want, atol=1e-5, rtol=1e-4), key
            assert np.array_equal(got["sets"].numpy(), said.sets[:size])


def onnx(path):
    """Return an ONNX file as a function of a tensor."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path))
    names = [one.name for one in session.get_outputs()]
    (x,) = session.get_inputs()
    return lambda given: dict(
        zip(names, map(torch.as_tensor, session.run(names, {x.name: given.numpy()})), strict=True)
    )


def test_a_sampled_posterior_is_the_mean_over_networks_with_drawn_weights(runs, tmp_path):
    """One network after the other, the slow way."""
    end = using(end_of(runs("metavd"), TRAINED), "own", scale=1.0)
    keep(tmp_path, end)
    model, x = load_personal(tmp_path), end.data.test.x
    ((name, std),) = end.taken.fitted.posteriors["own"].items()
    total = 0.0
    for noise in laplace.weight_draws(tuple(std.shape), 0):
        network = end.half.model.module(end.taken.fitted.params, end.taken.fitted.buffers).eval()
        with torch.no_grad():
            dict(network.named_parameters())[name] += std * noise
            total = total + torch.softmax(network(x).double(), 1) / laplace.WEIGHT_DRAWS
    fitted = end.taken.fitted
    added = 0.4 * (1 - 1 / 0.8) * fitted.mean + 0.5 * fitted.bias
    slow = curves.scaled(total.log(), torch.tensor(0.8), added).exp()
    even = float(curves.floor_of(end.taken.one.rows))
    slow = (1 - even) * slow + even / 10
    assert np.abs(model.predict_proba(x) - slow.numpy()).max() < 1e-6


def test_information_is_offered_only_where_it_finds_errors(runs, tmp_path):
    """The AUROC by hand, over all pairs of a right and a wrong held-out prediction. Labels are
    changed so that errors are where information is high, then where it is low.
    """
    end = using(end_of(runs("fedmap"), 2), "laplace", scale=1.0)
    x = torch.cat([end.data.train.x, end.data.test.x])

    def with_labels(y):
        held = Batch(x, y, torch.ones(len(y)))
        card = keep(tmp_path, end._replace(data=end.data._replace(held=held)))
        return card["uncertainty"], load_personal(tmp_path).uncertainty(x)

    for name, std in end.taken.fitted.posteriors["laplace"].items():
        if name == "inverse":
            std *= torch.linspace(0, 40, std.shape[1]) ** 2  # some classes are far less certain
    _, said = with_labels(torch.zeros(len(x), dtype=torch.int64))
    found, _ = with_labels(torch.as_tensor(said.label))
    assert not found["information"]["offered"]
    assert "held-out predictions are wrong; it takes 5" in found["information"]["why"]
    assert "information" not in found["alarms"]
    offered = []
    for flip in (False, True):
        _, said = with_labels(torch.as_tensor(said.label))
        trial = load_personal(tmp_path).ready
        trial.measures = ("information",)
        trial.names.append("alarms/information")
        trial.register_buffer(f"extra_{len(trial.names) - 1}", torch.tensor(0.0))
        with torch.no_grad():
            out = trial(x)
        order = out["information"].argsort(descending=not flip)
        y = torch.as_tensor(said.label).clone()
        y[order[:10]] = (y[order[:10]] + 1) % 10
        found, said = with_labels(y)
        wrong = torch.as_tensor(said.label) != y
        pairs = [
            [float((a > b) + 0.5 * (a == b)) for b in out["information"][~wrong]]
            for a in out["information"][wrong]
        ]
        assert found["information"]["error_auroc"] == pytest.approx(np.mean(pairs))
        own, plain = (found["information"][f"error_auroc{more}"] for more in ("", "_of_doubt"))
        assert found["information"]["offered"] == (own >= plain)
        assert (said.information is not None) == (own >= plain) == ("information" in said.alarms)
        offered.append(own >= plain)
    assert offered == [True, False]


def test_models_without_calibration_are_points_and_say_so(tmp_path):
    out = trained(tmp_path / "run", "fedavg", calibration="off", rounds=1)
    card = export(out, TRAINED, tmp_path / "model", ("safetensors",))
    model, x = load_personal(tmp_path / "model"), end_of(out, TRAINED).data.test.x
    said = model.uncertainty(x)
    assert card["data"]["num_held_out"] == 0
    assert "was not calibrated" in card["uncertainty"]["why"] == said.promise
    assert np.array_equal(said.point, said.probabilities)
    assert said.sets is None and said.alarms == {}  # noqa: PT018
    assert not said.abstains.any()
    with pytest.raises(ConfigError, match="has no held-out samples"):
        model.uncertainty(x, abstain=0.1)
    assert model.drift(x).warning is None


def test_models_of_the_first_format_load_without_their_old_posterior(runs, tmp_path, caplog):
    """A card and extras as the first version wrote them."""
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    card = json.loads((tmp_path / "card.json").read_text())
    want = load_personal(tmp_path).uncertainty(x := end_of(runs("fedmap"), TRAINED).data.test.x)
    old = {key: value for key, value in card.items() if key not in ("uncertainty", "prepared")}
    old["format"] = "bayflower-personal-1"
    old["posterior"] = {"kind": "linear", "origin": "Laplace", "parameters": ["head.bias"]}
    for key in ("last_layer", "input_range", "pixels", "columns"):
        del old["network"][key]
    (tmp_path / "card.json").write_text(json.dumps(old))
    save_file({"std/head.bias": torch.ones(10)}, tmp_path / "extras.safetensors")
    model = load_personal(tmp_path)
    assert np.abs(model.predict_proba(x) - want.point).max() < 1e-7
    assert "Its diagonal posterior made predictions worse" in caplog.text
    assert model.card["uncertainty"]["used"] == "point"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_integers_are_saved_loaded_and_exported(form, tmp_path):
    """An embedding network of the user's own, calibrated, in every format."""
    from bayflower import methods
    from bayflower.config import parse
    from bayflower.data import DataSettings
    from bayflower.networks.model import Model
    from bayflower.personal import Kept
    from bayflower.rounds.solo import Samples

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.fc = torch.nn.Embedding(20, 6), torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(torch.tanh(self.words(x).mean(1)))

    run, draw = parse("local", {}), torch.Generator().manual_seed(0)
    half = methods.get("local").client(run.options, run.settings, Model(Words, 3))
    x, y = torch.randint(20, (90, 7), generator=draw), torch.randint(3, (90,), generator=draw)
    parts = [Batch(x[a:b], y[a:b], torch.ones(b - a)) for a, b in ((0, 40), (40, 60), (60, 90))]
    data, state = Samples(*parts), half.init(*half.model.initial(0))
    sent = methods.get("local").server.broadcast_type({}, {})
    taken = take_home(half, state, sent, data, None, DataSettings(), seed=0, client=0)
    kept = Kept("local", half, state, sent, data, 0, 1, 0, taken=taken)
    card = keep(tmp_path, kept, ("safetensors", "pt2", *(["onnx"] if form == "onnx" else ())))
    assert card["files"][form] == f"model.{form}"
    assert card["network"]["input_dtype"] == "int64"
    model, program = load_personal(tmp_path, model=Words), load_personal(tmp_path)
    nll = -np.log(model.predict_proba(x[40:60])[range(20), y[40:60]]).mean()
    assert nll == pytest.approx(card["metrics"]["nll"], abs=1e-6)
    for given in (x[:4].tolist(), x[:4].numpy().astype(np.int16), x[:4].double().numpy()):
        assert np.allclose(model.predict_proba(given), model.predict_proba(x)[:4], atol=1e-12)
        assert np.allclose(program.predict_proba(given), model.predict_proba(x)[:4], atol=1e-6)
    with pytest.raises(ConfigError, match=r"must be in \[0, 19\], got 0 to 20; use the same voc"):
        model.predict([[20, 0, 0, 0, 0, 0, 0]])
    with pytest.raises(ConfigError, match="must be whole numbers"):
        model.predict([[0.5, 0, 0, 0, 0, 0, 0]])


def test_sets_by_class_and_what_too_few_samples_promise(tmp_path):
    """Thresholds by class come back; a client with 8 held-out samples of its own alone can promise
    nothing, and says so.
    """
    out = trained(tmp_path / "run", "fedavg", rounds=1, sets="class")
    card = export(out, TRAINED, tmp_path / "class", ("safetensors",))
    assert len(card["uncertainty"]["sets"]["smallest_probability"]) == 10
    assert "of each class" in card["uncertainty"]["sets"]["promise"]
    end = end_of(out, TRAINED)
    said = load_personal(tmp_path / "class").uncertainty(end.data.test.x)
    assert said.sets.sum() == int(end.taken.one.judged["test"].trusts["calibrated"].set_size)
    out = trained(tmp_path / "alone", "fedavg", rounds=1, calibration="client")
    card = export(out, TRAINED, tmp_path / "own", ("safetensors",))
    assert card["uncertainty"]["sets"]["promise"] == (
        "Every set holds all classes: 8 held-out samples are too few to promise 90%; it takes 16."
    )
    assert load_personal(tmp_path / "own").uncertainty(end.data.test.x).sets.all()


def test_abstention_and_drift_against_slow_oracles():
    """The risk among held-out answers, counted; the tail of the beta-binomial distribution by
    scipy, and by drawing held-out and new samples.
    """
    from scipy.stats import betabinom

    draw = np.random.default_rng(0)
    doubt = draw.random(400) ** 3
    wrong = draw.random(400) < doubt
    from bayflower.calibration.trust import BINS, doubt_bin

    place = doubt_bin(torch.as_tensor(doubt)).numpy()
    right, errors = (
        torch.as_tensor(np.bincount(place[part], minlength=BINS)) for part in (~wrong, wrong)
    )
    for risk in (0.03, 0.1, 0.3):
        best = 0
        for last in range(BINS):
            inside = place <= last
            if (wrong[inside].sum() + 1) / (inside.sum() + 1) <= risk:
                best = inside.sum()
        found = answered(doubt, right, errors, risk)
        assert found.sum() == best > 0
        assert wrong[found].mean() <= risk
    assert not answered(doubt, right, errors, 1e-4).any()
    with pytest.raises(ConfigError, match=r"share of errors in \(0, 1\), got 5"):
        answered(doubt, right, errors, 5)
    for count, number, fired, held in ((3, 10, 0, 8), (9, 40, 5, 100), (1, 1, 2, 30), (0, 5, 1, 9)):
        a, b = fired + 1, held - fired
        assert tail(count, number, a, b) == pytest.approx(betabinom.sf(count - 1, number, a, b))
    # samples that are alike raise a warning in fewer than 1 of 100 batches
    high = 0
    for _ in range(4000):
        held, new = draw.random(40), draw.random(25)
        limit = np.quantile(held, 0.95)
        fired = int((held > limit).sum())
        high += tail(int((new > limit).sum()), 25, fired + 1, 40 - fired) < 0.01
    assert high / 4000 < 0.015
    assert auroc(torch.tensor([1.0, 2, 3, 3]), torch.tensor([False, True, False, True])) == 0.625


# -- files and the command line ------------------------------------------------------------------
def run_cli(*words: str) -> None:
    sys.argv = ["bayflower", *words]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), words


def test_commands(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    run_cli("export", str(runs("fedmap")), str(tmp_path / "a"), "--client", "1")
    said = capsys.readouterr().out
    assert "client 1, FedMAP: the client's own MAP model" in said
    assert "uncertainty: The posterior is withheld: on the client's 8 held-out samples" in said
    assert "sets: For about 90% of new samples" in said
    assert (tmp_path / "a" / "model.pt2").exists()
    run_cli(
        "export", str(runs("fedmap")), str(tmp_path / "b.safetensors"), "--client", "1", "--json"
    )
    assert json.loads(capsys.readouterr().out)["client"] == 1
    one, other = (
        load_file(tmp_path / "b.safetensors"),
        load_file(tmp_path / "a" / "model.safetensors"),
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert bayflower.load_personal(tmp_path / "a" / "card.json").card["method"] == "fedmap"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "RUN", "out", "--client", "99"], r"client must be in \[0, 6\], got 99"),
        (
            ["export", "nowhere", "out", "--client", "0"],
            "has no checkpoint.safetensors; give the --out of a run",
        ),
        (["personalise", "RUN", "out", "--data", "none.npz"], "no file none.npz"),
        (["export", "RUN", "out"], "takes one client (--client 3) or every client"),
        (["export", "RUN", "out", "--all", "--client", "1"], "takes one client"),
        (["export", "RUN", "out.pt2", "--all"], "a folder of models, got out.pt2"),
    ],
)
def test_what_cannot_be_exported_is_said_with_exit_code_2(
    words, text, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["bayflower", *(str(runs("fedmap")) if word == "RUN" else word for word in words)],
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    import re

    said = " ".join(capsys.readouterr().err.split())
    assert text in said or re.search(text, said)


def test_files_that_are_not_ours_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="json cannot be read"):
        load_personal(tmp_path)
    export(runs("fedmap"), TRAINED, tmp_path, ("safetensors",))
    with pytest.raises(ConfigError, match="the network does not fit"):
        load_personal(tmp_path, model=lambda: torch.nn.Linear(2, 2))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_personal(tmp_path)
    (tmp_path / "card.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="is not the card of a personal model"):
        load_personal(tmp_path)


@pytest.mark.slow
def test_every_clients_model_at_once(runs, tmp_path, capsys, monkeypatch):
    """Written once: a second call leaves finished models, and goes on with the rest."""
    monkeypatch.setattr(sys, "argv", [])
    for client in range(7):
        assert not (tmp_path / f"client-{client}").exists()
    list(export_all(str(runs("fedmap")), str(tmp_path), ("safetensors",)))
    done = [(tmp_path / f"client-{n}" / "card.json").stat().st_mtime_ns for n in range(7)]
    (tmp_path / "client-3" / "card.json").unlink()
    found = list(export_all(runs("fedmap"), tmp_path, ("safetensors",)))
    assert [now for _, now in found] == [n == 3 for n in range(7)]
    assert [card["client"] for card, _ in found] == list(range(7))
    again = [(tmp_path / f"client-{n}" / "card.json").stat().st_mtime_ns for n in range(7)]
    assert [a == b for a, b in zip(done, again, strict=True)] == [n != 3 for n in range(7)]
    with pytest.raises(ConfigError, match="is of another run \\(method fedmap, not fedbps\\)"):
        list(export_all(runs("fedbps"), tmp_path, ("safetensors",)))
    opened, formats = open_run(runs("fedmap")), ("safetensors",)
    assert finished(opened, 0, tmp_path, formats)["client"] == 0
    assert finished(opened, 0, tmp_path, (*formats, "pt2")) is None  # it has yet to be written
    monkeypatch.setattr("bayflower.cli.personal.wanted", lambda into, onnx: (into, formats))
    run_cli("export", str(runs("fedmap")), str(tmp_path), "--all")
    said = capsys.readouterr().out
    assert "client 6 was there" in said
    assert "nll_point" in said
    run_cli("export", str(runs("fedmap")), str(tmp_path), "--all", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["new"] for row in rows] == [False] * 5 + [True] * 2
    card = json.loads((tmp_path / "client-2" / "card.json").read_text())
    assert rows[2]["nll"] == card["metrics"]["nll"]
    assert rows[2]["nll_point"] == card["uncertainty"]["tests"]["test"]["point"]["nll"]
