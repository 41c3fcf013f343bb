"""The image: what is installed is named with its digest, and nothing comes from a second index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"([A-Za-z0-9._-]+)==([^ ]+) --hash=sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    lines = (ROOT / "docker" / "requirements.lock").read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "every line has one package, its version and its digest"
    return {canonicalize_name(one[1]): one[2] for one in found}


def test_the_lock_file_has_what_the_package_asks_for_in_the_versions_that_are_tested(locked):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        asked = Requirement(text)
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)]), text
    known = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    tested = {canonicalize_name(name): version for name, version in known}
    assert set(locked) - set(tested) <= {"setuptools"}  # which an environment has anyway
    assert {name: version for name, version in locked.items() if name in tested} == {
        name: tested[name] for name in locked if name in tested
    }


def test_the_image_is_built_from_the_lock_file_and_a_base_that_can_be_pinned():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"${BASE}", "packages"}
    assert "ARG BASE=python:3.11-slim-bookworm" in text
    assert "--require-hashes --no-deps -r $LOCK" in text
    assert "EXTRA_INDEX" not in text
    assert "--extra-index-url" not in text
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text()
    assert "!docker/requirements.lock" in ignored
