"""Write docker/requirements.lock: every package of the image with its version and SHA-256.

    pip install --dry-run --ignore-installed --only-binary :all: --report report.json \
        -c constraints.txt -r requirements.txt
    python docker/lock.py report.json >docker/requirements.lock

requirements.txt has the dependencies of pyproject.toml, as docker/Dockerfile takes them. Use
the Python and the kind of machine of the image, where pip offers torch for the CPU.
"""

from __future__ import annotations

import json
import sys

HEAD = """\
# Every package of the image (Python 3.11, Linux x86-64, torch for the CPU) with the SHA-256 of its
# wheel. Written by docker/lock.py; pip installs nothing that is not in it (--require-hashes).
"""


def lines(report: dict) -> list[str]:
    """Return the lines of the lock file for a report of pip."""
    found = {}
    for one in report["install"]:
        name, version = one["metadata"]["name"], one["metadata"]["version"].split("+")[0]
        sha = one["download_info"]["archive_info"]["hashes"]["sha256"]
        found[name.lower().replace("_", "-")] = f"{name}=={version} --hash=sha256:{sha}"
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(HEAD + "\n".join(lines(json.load(file))))
