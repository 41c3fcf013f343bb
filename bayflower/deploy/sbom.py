"""A list of the software that an installation consists of (SBOM), in CycloneDX's JSON, made from
what the packages say of themselves.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import uuid
from importlib import metadata
from typing import Any

from .. import __version__


def components() -> list[dict[str, Any]]:
    """Return every installed package with version, licence and, if known, the digest of its list of
    files, which has a digest of each.
    """
    found: dict[str, dict[str, Any]] = {}
    for package in metadata.distributions():
        name = str(package.metadata["Name"] or "")
        if not name:
            continue
        plain = name.lower().replace("_", "-")
        one: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{plain}@{package.version}",
        }
        told = package.metadata
        names = [name for name in ("License-Expression", "License") if name in told]
        licence = str(told[names[0]]) if names else ""
        if licence and len(licence) <= 100:
            one["licenses"] = [{"license": {"name": " ".join(licence.split())}}]
        if record := package.read_text("RECORD"):
            sha = hashlib.sha256(record.encode()).hexdigest()
            one["properties"] = [{"name": "sha256 of RECORD", "value": sha}]
        found.setdefault(plain, one)
    return [found[name] for name in sorted(found)]


def document() -> dict[str, Any]:
    """Return the list as a CycloneDX document."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "application", "name": "bayflower", "version": __version__},
            "properties": [
                {"name": "python", "value": platform.python_version()},
                {"name": "platform", "value": platform.platform()},
            ],
        },
        "components": components(),
    }
