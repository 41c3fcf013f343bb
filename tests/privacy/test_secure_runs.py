"""Runs with secure=sum: the same bits as without, with drop-outs at every stage, after a resumed
server; and the server's half never sees an update.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from secureruns import ADDITIVE, BASE, SECURE, dropping, run, same, summed
from typer.testing import CliRunner

from bayflower import methods
from bayflower.cli import app as cli
from bayflower.config import parse
from bayflower.contract import ServerHalf
from bayflower.engines import execute, prepare
from bayflower.errors import BayflowerError, ConfigError
from bayflower.files import checkpoint
from bayflower.files.store import DiskStore, MemoryStore
from bayflower.flower import course, masking, records, summing
from bayflower.flower.loop import run_loop
from bayflower.policy import rules
from bayflower.tree import flatten

FIRST = ("fedavg", "fedmap")


@pytest.mark.parametrize(
    "method",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in ADDITIVE],
)
def test_secure_and_plain_runs_have_the_same_bits_with_drop_outs_at_every_stage(
    method, monkeypatch
):
    secure = run(method, dropping, **SECURE)
    if methods.get(method).server.summand is not ServerHalf.summand:
        summed(monkeypatch, method)
    plain = run(method, dropping)
    assert same(secure, plain)
    numbers = [[one["num_clients"] for one in s.records] for s in (secure, plain)]
    assert numbers == [[4, 3], [4, 3]]
    for ours, theirs in zip(secure.records, plain.records, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-12)
        assert ours["bytes_up"] > theirs["bytes_up"]


@pytest.mark.slow
def test_one_limb_is_near_and_two_are_the_same_for_a_mean_of_models():
    plain, one, two = (
        run("fedavg", **more)
        for more in ({}, {"secure": "sum", "secure_limbs": 1}, {"secure": "sum"})
    )
    assert same(two, plain)
    for name, value in flatten(plain.state).items():
        assert torch.allclose(flatten(one.state)[name], value, rtol=1e-6, atol=1e-11)


def test_the_server_never_sees_an_update(monkeypatch):
    """Canaries: no number of a client's update is in its reply, in any form, and no hook of the
    server's half is handed one.
    """
    replies, updates = [], []
    finish = masking.masked

    def noted(half, broadcast, head, site, trained):
        updates.append((site.client, trained.update, trained.loss))
        return finish(half, broadcast, head, site, trained)

    monkeypatch.setattr(masking, "masked", noted)
    made = methods.get("fedmap").server

    def refused(self, *_):
        raise AssertionError("the server's half was handed an update")

    class Watched(made):
        unpack = check = bounds = refused

        def statistic(self, state, client, update):  # the form of a vector, no client's
            assert update.params is state.params
            return super().statistic(state, client, update)

    initialise = course.Course._initialise

    def watched(self, anatomy, initial):
        initialise(self, anatomy, initial)
        self.half = Watched(self.half.config, self.half.anatomy)

    monkeypatch.setattr(course.Course, "_initialise", watched)
    strategy = run("fedmap", seen=replies, **SECURE)
    assert strategy.faults == []
    assert len(replies) == len(updates) == 10
    for (client, content), (own, update, loss) in zip(replies, updates, strict=True):
        assert client == own
        sent = content[records.UPDATE]
        assert set(sent) == {masking.MASKED, masking.OFFER}
        words = sent[masking.MASKED].numpy().view(np.uint64)
        body = b"".join(array.data for array in sent.values())
        for leaf in flatten(update).values():
            flat = leaf.reshape(-1)
            flat = flat[flat != 0]
            for form in (flat, flat.double(), (flat.double() * 2.0**40).to(torch.int64)):
                raw = form.numpy().tobytes()
                width = form.element_size()
                if width == 8:
                    canaries = np.frombuffer(raw, np.uint64)
                    assert not np.isin(canaries[np.abs(form.numpy()) > 1e-6], words).any()
                else:
                    assert raw[: 4 * width] not in body
        assert set(content[records.METRICS]) == {records.NUM_EXAMPLES}  # no loss either
        assert loss > 0


@pytest.mark.slow
def test_a_share_of_the_clients_in_every_round_gives_the_same_bits():
    some = {"fraction_train": 0.7, "num_clients": 6, "rounds": 2}
    secure, plain = run("fedavg", **some, **SECURE), run("fedavg", **some)
    assert same(secure, plain)
    assert [one["num_clients"] for one in secure.records] == [4, 4]


@pytest.mark.slow
def test_a_resumed_server_goes_on_to_the_same_bits(tmp_path):
    settings = {**BASE, "rounds": 3, "checkpoint_every": 1}
    plain = prepare(parse("fedavg", settings), "loop")
    whole = run_loop(plain.run, plain.federation, plain.halves)
    store = DiskStore(tmp_path / "state")  # the clients' machines go on
    for rounds in (2, 3):
        ready = prepare(parse("fedavg", {**settings, **SECURE, "rounds": rounds}), "loop")
        known = checkpoint.read(tmp_path)
        parts = (ready.run, ready.federation, ready.halves)
        found = run_loop(*parts, out=tmp_path, resume=known, store=store)
    ours, theirs = flatten(found.server_state), flatten(whole.server_state)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    notes = next((tmp_path / "state").glob("*/client-0/secure.json"))
    assert notes.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_fused_engine_makes_the_same_sums_and_counts_the_bytes():
    """To the bit if clients are trained one by one; bytes within 1 % of real messages, in a round
    that needs no cards.
    """
    secure = {**BASE, **SECURE, "secure_threshold": 2 / 3}
    loop, fused = (
        execute(prepare(parse("fedmap", {**secure, "stacking": "no"}), engine))
        for engine in ("loop", "fused")
    )
    ours, theirs = flatten(fused.server_state), flatten(loop.server_state)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key in ("bytes_up", "bytes_down"):
        assert fused.rounds[1][key] == pytest.approx(loop.rounds[1][key], rel=0.01)
    assert any("masks nothing" in text for text in fused.remarks)


def test_too_few_clients_and_unmasked_replies_are_refused(monkeypatch):
    def gone(request, client, round):
        return request == "train" and client > 1

    with pytest.raises(BayflowerError, match="2 of 5 clients sent an update, 4 are needed"):
        run("fedavg", gone, secure="sum", rounds=2, min_replies=2)

    def silent(request, client, round):
        return request == "unmask" and client > 1

    with pytest.raises(BayflowerError, match=r"2 of 5 clients helped .* 4 are needed"):
        run("fedavg", silent, secure="sum", min_replies=2)
    with pytest.raises(BayflowerError, match="secure=sum needs at least 3"):
        run("fedavg", secure="sum", num_clients=2)
    with monkeypatch.context() as other:  # a server that unmasks in another way
        other.setattr(summing, "form_of", lambda window: f"aes256/{window.digest()}")
        with pytest.raises(BayflowerError, match="0 of 5 clients sent an update"):
            run("fedavg", secure="sum", min_replies=2)
    monkeypatch.setattr(masking, "masked", lambda half, *rest: half.pack(rest[-1].update))
    with pytest.raises(BayflowerError, match="0 of 5 clients sent an update"):
        run("fedavg", secure="sum", min_replies=2)


def test_a_site_decides_whom_it_trusts_and_whether_it_takes_part_without_masks(tmp_path):
    store = MemoryStore()
    keys = {str(client): masking.public_key(store, client) for client in range(5)}
    assert keys["0"] == masking.public_key(store, 0)  # made once
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(keys))
    peers, only = masking.told({"peers": str(path), "secure-only": True})
    assert (peers, only) == ({int(one): key for one, key in keys.items()}, True)
    assert masking.told({}) == (None, False)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"peers must name a JSON file .* is none"):
        masking.told({"peers": str(tmp_path / "other.json")})
    node = {"peers": str(path), "secure-only": True}
    assert run("fedavg", store=store, node=node, **SECURE).faults == []
    with pytest.raises(BayflowerError, match="secure sums only"):
        run("fedavg", node={"secure-only": True})
    path.write_text(json.dumps({**keys, "3": keys["2"]}))  # another key than that of client 3
    with pytest.raises(BayflowerError, match="client 3 shows another key than the one in the file"):
        run("fedavg", store=store, node=node, **SECURE)


def test_sites_exchange_keys_by_two_commands(tmp_path):
    said = [
        CliRunner().invoke(cli, ["policy", "key", str(tmp_path / f"{k}"), "--client", f"{k}"])
        for k in range(3)
    ]
    words = [one.stdout.strip() for one in said]
    assert [one.split("=")[0] for one in words] == ["0", "1", "2"]
    file = tmp_path / "peers.json"
    done = CliRunner().invoke(cli, ["policy", "peers", str(file), *words])
    assert done.exit_code == 0
    known, _ = masking.told({"peers": str(file)})
    stores = [DiskStore(tmp_path / f"{k}") for k in range(3)]
    assert known == {k: masking.public_key(store, k) for k, store in enumerate(stores)}
    wrong = CliRunner().invoke(cli, ["policy", "peers", str(file), words[0], words[0]])
    assert isinstance(wrong.exception, ConfigError)
    assert "each site needs one CLIENT=KEY" in str(wrong.exception)


def test_a_site_with_a_policy_and_a_log_takes_part(tmp_path):
    """The log says that a masked vector left, and no tensor of the model; a rule still holds."""
    (tmp_path / "policy.toml").write_text(rules.written())
    node = {"policy": str(tmp_path / "policy.toml"), "audit-dir": str(tmp_path / "log")}
    done = run("fedavg", node=node, **SECURE)
    assert done.faults == []
    lines = [json.loads(one) for one in (tmp_path / "log" / "audit.jsonl").read_text().splitlines()]
    left = [one["records"]["update"] for one in lines if "update" in one.get("records", {})]
    assert left
    assert all(set(one) == {masking.MASKED, masking.OFFER} for one in left)
    policy = rules.written().replace('methods = ["*"]', 'methods = ["fedmap"]')
    assert policy != rules.written()
    (tmp_path / "policy.toml").write_text(policy)
    with pytest.raises(BayflowerError, match="refuses this request"):
        run("fedavg", node=node, **SECURE)


@pytest.mark.parametrize("row", methods.ROWS, ids=lambda row: row.name)
def test_a_method_that_cannot_says_so_before_anything_starts(row):
    if not row.additive:
        assert parse(row.name, {"secure": "sum"}).privacy.on
        return
    with pytest.raises(ConfigError, match=f"secure=sum is not for {row.name}: "):
        parse(row.name, {"secure": "sum"})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weights": "sum"}, "not for fedmap with weights=sum"),
        ({"prior": "learned"}, "not for fedmap with prior=learned"),
        ({"max_share": 0.5}, "max_share cannot cap it"),
        ({"secure_limbs": 5}, "secure_limbs must be 1 to 4"),
        ({"secure_threshold": 0.4}, "secure_threshold must be in"),
        ({"secure_range": 0.0}, "secure_range must be in"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        parse("fedmap", {"secure": "sum", **settings})
