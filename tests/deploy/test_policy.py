"""The site's policy file, its counts and its memory of samples, and the hash chain of logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bayflower.cli import app
from bayflower.cli.policy import unknown
from bayflower.errors import BayflowerError, ConfigError, PolicyError
from bayflower.files import audit
from bayflower.policy import rules
from bayflower.policy.ledger import Ledger
from bayflower.policy.rows import Memory, Part, difference, groups, small_changes

HOUR = 3600.0


def bayflower(*words):
    return CliRunner().invoke(app, list(map(str, words)))


# -- the file -------------------------------------------------------------------------------------
def test_a_policy_is_read_as_it_is_written(tmp_path):
    policy = rules.Policy(
        apps=("bayflower", "sha256:" + "ab" * 32),
        methods=("fed*",),
        networks=("nets:Net",),
        max_rounds=7,
        max_reply_mb=1.5,
        small_change="refuse",
        floor={"min_count": 5.0},
        ceiling={"lr": 0.1},
    )
    (tmp_path / "policy.toml").write_text(rules.written(policy))
    assert rules.read(tmp_path / "policy.toml") == policy
    assert bayflower("policy", "new", tmp_path / "new.toml").exit_code == 0
    assert rules.read(tmp_path / "new.toml") == rules.Policy()
    assert isinstance(bayflower("policy", "new", tmp_path / "new.toml").exception, ConfigError)
    done = bayflower("policy", "check", tmp_path / "policy.toml")
    assert done.exit_code == 0, done.exception
    assert "ceiling of lr: 0.1" in done.stdout
    assert "max_mb_a_day: no limit" in done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_round = 3", "no rule 'max_round'; did you mean 'max_rounds'"),
        ('methods = "fedavg"', "methods must be a list of texts"),
        ("max_rounds = 1.5", "max_rounds must be a whole number"),
        ("max_rounds = true", "max_rounds must be a whole number"),
        ("max_reply_mb = -1", "max_reply_mb must be at least 0"),
        ('apps = ["sha256:12"]', "apps must be bayflower or sha256:"),
        ('send = ["updates"]', "send must name update"),
        ('small_change = "ignore"', "small_change must be notice or refuse"),
        ("[floor]\nlr = 1\n[ceiling]\nlr = 0.1", "above its ceiling"),
        ('[ceiling]\nlr = "0.1"', "ceiling must be a table of numbers"),
        ("[ceiling]\nlearning_rate = 1", "'learning_rate', which is no setting"),
        ("[floor]\nmin_counts = 5", "did you mean 'min_count'"),
        ('methods = ["fedavgg"]', "which no method fits"),
        ("[", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_is_one_line(tmp_path, text, why):
    (tmp_path / "policy.toml").write_text(text)
    done = bayflower("policy", "check", tmp_path / "policy.toml")
    assert isinstance(done.exception, ConfigError)
    assert why in str(done.exception)
    assert len(str(done.exception).splitlines()) == 1


def test_limits_compare_numbers_only():
    policy = rules.Policy(floor={"a": 1.0}, ceiling={"b": 2.0})
    policy.check_settings({"a": 1, "b": 2.0, "c": 1e9})
    for wrong in ({"a": 0.99}, {"a": float("nan")}, {"b": float("inf")}, {"b": None}, {"b": True}):
        with pytest.raises(PolicyError, match=r"rule (floor\.a|ceiling\.b)"):
            policy.check_settings(wrong)


def test_paths_stay_in_the_folder_of_data():
    policy = rules.Policy()
    for good in ("digits", "a+b", "/d[1]/x.npz", "/d[1]/sub/*.csv", "/d[1]/a.csv,/d[1]/b.csv"):
        policy.check_data("/d[1]", good)
    for bad in ("/d1/x.npz", "/d[1]/../x", "/d[1]/./../x", "/d[1]/a,/etc/b", "", "../x"):
        with pytest.raises(PolicyError, match="rule datasets"):
            policy.check_data("/d[1]", bad)
    with pytest.raises(PolicyError, match="rule datasets"):
        policy.check_data("", "/d/x.npz")


# -- counts ---------------------------------------------------------------------------------------
def test_a_day_has_so_many_requests_and_bytes(tmp_path):
    """Whatever run the server names: the site counts, over 24 hours."""
    ledger, policy = Ledger(tmp_path / "ledger.json"), rules.Policy(max_requests_a_day=3)
    start = 1000 * HOUR
    for hours in (0, 5, 10):
        ledger.admit(policy, start + hours * HOUR)
    with pytest.raises(PolicyError, match="rule max_requests_a_day"):
        ledger.admit(policy, start + 23 * HOUR)
    ledger.admit(policy, start + 24 * HOUR)  # the first is a day old
    with pytest.raises(PolicyError, match="rule max_requests_a_day"):
        ledger.admit(policy, start + 24 * HOUR)
    policy = rules.Policy(max_mb_a_day=1)
    ledger.sends(policy, 600_000, start + 24 * HOUR)
    with pytest.raises(PolicyError, match="rule max_mb_a_day"):
        ledger.sends(policy, 400_001, start + 25 * HOUR)
    ledger.sends(policy, 400_000, start + 25 * HOUR)
    with pytest.raises(PolicyError, match="rule max_mb_a_day"):
        ledger.admit(policy, start + 26 * HOUR)
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ledger.admit(policy, start)


# -- samples --------------------------------------------------------------------------------------
def data(rows, seed: int = 0) -> dict[str, Part]:
    """Return parts with these rows of one table; three classes."""
    x = np.random.default_rng(seed).normal(size=(60, 4)).astype("float32")
    y = np.arange(60) % 3
    return {"training samples": Part(x[rows], y[rows]), "test samples": Part(x[:6], y[:6])}


def test_the_difference_of_two_lists_counts_repeated_samples():
    draw = np.random.default_rng(1)
    for _ in range(50):
        one, other = (np.sort(draw.integers(0, 8, draw.integers(0, 12))) for _ in range(2))
        a, b = Counter(one.tolist()), Counter(other.tolist())
        want = sum(((a - b) + (b - a)).values())
        assert difference(one, other) == want


def test_small_changes_are_found_in_every_class_and_against_all_earlier_data(tmp_path):
    everything = list(range(10, 60))
    memory = Memory(tmp_path)
    assert memory.used(data(everything), 5, refuse=True) == []
    assert memory.used(data(everything[::-1]), 5, refuse=True) == []  # the order does not matter
    lacks_one = memory.used(data(everything[1:]), 5, refuse=True)
    assert {(one.group, one.samples) for one in lacks_one} == {
        ("all samples", 1),
        ("training samples, class 1", 1),
    }
    assert memory.used(data(everything[1:]), 5, refuse=True) == lacks_one  # still refused
    # 15 fewer, five of each class: allowed; then one more is too close to that
    assert memory.used(data(everything[15:]), 5, refuse=True) == []
    assert memory.used(data(everything[16:]), 5, refuse=True)
    # five changed, but only one in class 0
    some = [row for row in everything if row not in (12, 13, 16, 19, 22)]
    found = memory.used(data(some), 5, refuse=True)
    found = [one for one in found if one.since == lacks_one[0].since]
    assert [(one.group, one.samples) for one in found] == [
        ("training samples, class 0", 1),
        ("training samples, class 1", 4),
    ]
    # a site that only notices says it once
    assert memory.used(data(everything[1:]), 5, refuse=False)
    assert memory.used(data(everything[1:]), 5, refuse=False) == []
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    key = memory.key()
    other = groups(data(everything), b"another key")
    assert difference(groups(data(everything), key)["all samples"], other["all samples"]) == 2 * 56
    assert small_changes(other, other, "", 5) == []


# -- the chain ------------------------------------------------------------------------------------
@pytest.fixture
def log(tmp_path):
    """A log of eight lines."""
    path = tmp_path / "audit.jsonl"
    for number in range(8):
        audit.Audit(path).write("sent", what=f"line {number}", bytes=number)
    return path


def test_a_whole_log_is_verified_and_goes_on(log):
    done = audit.verify(log)
    assert done.lines == 8
    told = audit.Audit(log).write("sent", what="more")
    assert audit.verify(log) == (9, told)
    assert audit.verify(log, done.last).lines == 9  # an earlier hash is still in it
    assert log.stat().st_mode & 0o777 == 0o600
    out = bayflower("audit", "verify", log)
    assert out.exit_code == 0
    assert told in out.stdout


def tampered(lines, how):
    """Return the lines after an attack."""
    if how == "changed":
        lines[3] = lines[3].replace("line 3", "line 9")
    if how == "rehashed":  # as above, with the right hash of its own
        line = {**json.loads(lines[3]), "what": "line 9"}
        lines[3] = audit.canonical({**line, "hash": audit.digest(line)}).decode()
    if how == "removed":
        del lines[3]
    if how == "first removed":
        del lines[0]
    if how == "swapped":
        lines[3], lines[4] = lines[4], lines[3]
    if how == "repeated":
        lines.insert(4, lines[3])
    if how == "rewritten":  # spaces that change no value
        lines[3] = lines[3].replace('","', '", "')
    if how == "garbage":
        lines[3] = "\x00"
    return lines


@pytest.mark.parametrize(
    ("how", "line"),
    [
        *(("changed", 4), ("rehashed", 5), ("removed", 4), ("first removed", 1)),
        *(("swapped", 4), ("repeated", 5), ("rewritten", 4), ("garbage", 4)),
    ],
)
def test_a_log_that_was_tampered_with_is_found_at_its_line(log, how, line):
    lines = tampered(log.read_text().splitlines(), how)
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(BayflowerError, match=f"line {line} "):
        audit.verify(log)


def test_a_log_that_was_cut_off_is_found_with_the_last_hash(log):
    last = audit.verify(log).last
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:6]) + "\n")
    assert audit.verify(log).lines == 6  # without the hash nothing is noticed
    with pytest.raises(BayflowerError, match="cut off before it, or written anew"):
        audit.verify(log, last)
    assert isinstance(bayflower("audit", "verify", log, "--last", last).exception, BayflowerError)
    log.unlink()
    audit.Audit(log).write("sent", what="a new log")
    with pytest.raises(BayflowerError, match="written anew"):
        audit.verify(log, last)


def test_a_line_that_a_dying_process_left_is_cut_off_and_told(log):
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"before":"ab')
    with pytest.raises(BayflowerError, match="line 9 is not complete"):
        audit.verify(log)
    audit.Audit(log).write("sent", what="after")
    assert audit.verify(log).lines == 10
    torn = json.loads(log.read_text().splitlines()[8])
    assert (torn["event"], torn["bytes"]) == ("torn", 13)


def test_a_log_whose_end_was_changed_takes_no_more_lines(log):
    log.write_text(log.read_text().replace("line 7", "line 8"))
    with pytest.raises(BayflowerError, match="bayflower audit verify"):
        audit.Audit(log).write("sent", what="more")


def test_the_example_of_the_page_is_a_policy(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "site-policy.md").read_text()
    (text,) = [one for one in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "methods" in one]
    (tmp_path / "policy.toml").write_text(text)
    policy = rules.read(tmp_path / "policy.toml")
    assert unknown(policy) == []
    policy.check_data("/data", "/data/stroke.csv")
    with pytest.raises(PolicyError, match=r"floor\.min_count"):
        policy.check_settings({"min_count": 5})
    named = set(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    rows = {rule for row in named for rule in re.findall(r"`\[?(\w+)\]?`", row)}
    assert set(vars(policy)) - {"apps", "small_change"} <= rows
