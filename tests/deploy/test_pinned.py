"""A client runs only what its owner has pinned: a hostile app against real SuperNodes, and the
digest of bundles.
"""

from __future__ import annotations

import io
import json
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
from hostileapp import write_hostile

from bayflower.deploy.supernode import Door, RefusedError
from bayflower.errors import ConfigError
from bayflower.files import audit
from bayflower.flower import bundle, processes
from bayflower.policy import rules


@pytest.mark.flower
@pytest.mark.xdist_group("deploy")
def test_a_hostile_app_gets_the_files_of_a_plain_supernode_and_nothing_of_a_pinned_one(tmp_path):
    """Today's attack: `flwr run` of another app at the server. Flower's own SuperNode hands its
    files out; ours refuses with one line, and runs the app once its owner pins it.
    """
    app, answers = write_hostile(tmp_path / "app"), []
    policy, log = tmp_path / "policy.toml", tmp_path / "audit"
    policy.write_text(rules.written())
    for k in range(2):
        (tmp_path / f"data-{k}").mkdir()
        (tmp_path / f"data-{k}" / "patients.csv").write_text(f"patient {k}: HIV positive")
    with processes.Flower("deployment", 0, tmp_path / "out") as flower:

        def node(k: int, *words: str) -> None:
            place = f'partition-id={k} num-partitions=2 data-dir="{tmp_path / f"data-{k}"}"'
            usual = ["--insecure", "--superlink", f"127.0.0.1:{flower.port}"]
            usual += ["--host", "127.0.0.1", "--port", str(processes.free_port())]
            flower.supernodes[k] = flower.start(
                f"node-{k}", [*words, *usual, "--node-config", place]
            )

        def attack() -> list[dict]:
            out = tmp_path / f"answers-{len(answers)}.json"
            answers.append(flower.submit(app, {"out": str(out), "nodes": 2}))
            deadline = time.monotonic() + 240
            while not out.exists():
                assert time.monotonic() < deadline, flower.tail("superlink")
                time.sleep(0.5)
            time.sleep(0.2)
            return json.loads(out.read_text())

        node(0, "flower-supernode")
        pinned = ["--policy", str(policy), "--audit-dir", str(log)]
        node(1, sys.executable, "-m", "bayflower.deploy.supernode", *pinned)
        found = attack()
        assert [one["files"] for one in found if "files" in one] == [
            {"patients.csv": "patient 0: HIV positive"}
        ]
        (refused,) = [one for one in found if "error" in one]
        assert refused["code"] == 7
        assert "is not pinned in this site's policy" in refused["error"]
        lines = (tmp_path / "out" / "logs" / "node-1.log").read_text().splitlines()
        (said,) = [line for line in lines if "refused: " in line]
        assert bundle.digest_of(app) in said
        assert "bayflower/innocent 1.0.0" in said
        # the owner's own act lets it in, without a restart
        policy.write_text(rules.written(rules.Policy(apps=("bayflower", bundle.digest_of(app)))))
        assert sorted(one["files"]["patients.csv"] for one in attack()) == [
            f"patient {k}: HIV positive" for k in range(2)
        ]
    events = [json.loads(line) for line in (log / "audit.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events] == ["app refused", "app admitted"]
    assert [one["flower_run"] for one in events] == answers
    assert audit.verify(log / "audit.jsonl").lines == 2


def packed(files: dict[str, str], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def test_the_digest_of_a_bundle_is_that_of_its_files(tmp_path):
    files = {"pyproject.toml": "a", "app/client.py": "b", ".info/CONTENT": "follows"}
    want = bundle.digest(packed(files))
    assert want.startswith("sha256:")
    assert bundle.digest(packed(dict(reversed(files.items())), zipfile.ZIP_STORED)) == want
    assert bundle.digest(packed({**files, ".info/CONTENT": "x"})) == want
    for other in (
        {**files, "app/client.py": "c"},
        {**files, "more.py": ""},
        {"pyproject.toml": "a", ".info/CONTENT": "follows"},
        {"pyproject.toml": "a", "app/client2.py": "b", ".info/CONTENT": "follows"},
    ):
        assert bundle.digest(packed(other)) != want
    with zipfile.ZipFile(out := io.BytesIO(), "w") as twice:
        twice.writestr("pyproject.toml", "a")
        with pytest.warns(UserWarning, match="Duplicate name"):
            twice.writestr("pyproject.toml", "b")
    for wrong, text in (
        (out.getvalue(), "two of its files have one name"),
        (b"no archive", "it cannot be unpacked"),
        (packed(files)[:40], "it cannot be unpacked"),
    ):
        with pytest.raises(ValueError, match=text):
            bundle.digest(wrong)
    assert bundle.digest_of(bundle.write_app(tmp_path / "own")) == bundle.own_digest()
    with pytest.raises(ConfigError, match="neither a folder with a Flower app"):
        bundle.digest_of(tmp_path)


def test_a_door_lets_in_what_the_policy_names_and_nothing_else(tmp_path):
    """Also: names that would lead elsewhere, a hash that is not the bundle's, agents, a policy that
    cannot be read.
    """
    from hashlib import sha256

    policy = tmp_path / "policy.toml"
    ours, theirs = packed({"pyproject.toml": "ours"}), packed({"pyproject.toml": "theirs"})
    policy.write_text(f'apps = ["{bundle.digest(ours)}"]\n')
    door = Door(policy, None)

    def asked(content: bytes, **other):
        mark = sha256(content).hexdigest()
        run = {"run_id": 7, "fab_id": "a/b", "fab_version": "1.0", "fab_hash": mark}
        run |= {"primary_task_type": "flwr-serverapp", **other}
        return SimpleNamespace(**run), SimpleNamespace(content=content, hash_str=mark)

    assert door.check(*asked(ours)) == bundle.digest(ours)
    for request, text in (
        (asked(theirs), "not pinned"),
        (asked(ours, fab_version="1/../../data"), "is not its own"),
        (asked(ours, fab_hash="0" * 64), "is not its own"),
        (asked(ours, primary_task_type="flwr-agentapp"), "agent app"),
        (asked(b"junk"), "cannot be unpacked"),
    ):
        with pytest.raises(RefusedError, match=text):
            door.check(*request)
    policy.write_text("apps = [")
    with pytest.raises(RefusedError, match="cannot be read"):
        door.check(*asked(ours))
