"""The bundle of our Flower app, and the digest by which the owner of a site pins a bundle.

Flower sends an app as a bundle (FAB), a zip archive. Ours holds one file, pyproject.toml, which
names the ServerApp and the ClientApp of the installed package: it brings no code. Nothing here
imports torch: a SuperNode reads it.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError

OWN = "bayflower"  # in a policy: the bundle of the installed version of this package
MARK = "sha256:"
MOST_FILES, MOST_BYTES = 10_000, 64_000_000  # of a bundle, unpacked
MANIFEST = ".info/CONTENT"  # Flower's list of a bundle's files, which follows from them

# Keys of a run-config besides settings. "" means the default.
APP_KEYS = {
    "method": "one method, or several separated by commas; see `bayflower methods`",
    "out": "absolute path of the folder for results, checkpoints and (one machine) client states",
    "resume": "true: continue from the last checkpoint in `out`",
    "min_nodes": "clients to wait for before the first round; default num_clients + new_clients",
    "wait": "timeout in seconds for these clients to connect",
    "timeout": "timeout in seconds for the replies of a round",
    "tree": "true: the nodes are regions, each of which answers for its clients",
    "spool": "of a region's own run: the folder of the requests that it answers",
    "set": "any other settings, as KEY=VALUE KEY=VALUE; see `bayflower settings METHOD`; "
    "preset=paper takes the values of each method's paper",
}
# settings with their own key in a run-config; all others go into `set`
USUAL = (
    *("dataset", "data_dir", "num_clients", "partition", "model"),
    *("rounds", "local_epochs", "batch_size", "lr", "seed"),
)


def config_table(**values: str) -> str:
    """Return the table [tool.flwr.app.config] of an app that runs our methods, as TOML."""
    groups = {"app": list(APP_KEYS), "settings that most people set": list(USUAL)}
    lines = [
        '# Written by `bayflower settings METHOD --run-config`. "" means: the default.',
        "[tool.flwr.app.config]",
    ]
    for title, keys in groups.items():
        lines.append(f"# {title}")
        lines += [f'{key} = "{values.get(key, "")}"' for key in keys]
    return "\n".join(lines) + "\n"


def app_text() -> str:
    """Return the pyproject.toml of a Flower app whose code is this installed package."""
    return (
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        '[project]\nname = "bayflower-run"\nversion = "1.0.0"\ndescription = "A run of Bayflower"\n'
        'license = "Apache-2.0"\ndependencies = []\n\n'
        '[tool.flwr.app]\npublisher = "bayflower"\n\n'
        '[tool.flwr.app.components]\nserverapp = "bayflower.server_app:app"\nclientapp = '
        '"bayflower.client_app:app"\n\n' + config_table()
    )


def write_app(folder: Path) -> Path:
    """Return the folder of a Flower app whose code is this installed package."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(app_text())
    return folder


def digest(bundle: bytes) -> str:
    """Return the digest of a bundle: "sha256:" and the SHA-256 over the sorted names and hashes of
    its files. It does not depend on how the archive was packed. Raise ValueError if the bundle is
    not a plain archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if len(entries) > MOST_FILES or sum(one.file_size for one in entries) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_FILES} files or {MOST_BYTES} bytes")
            if len(set(names)) < len(names):
                raise ValueError("two of its files have one name")
            lines = sorted(
                f"{hashlib.sha256(archive.read(entry)).hexdigest()} {entry.filename}"
                for entry in entries
                if entry.filename != MANIFEST
            )
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise ValueError(f"it cannot be unpacked ({error})") from None
    return MARK + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of(app: Path) -> str:
    """Return the digest of an app: a folder with a pyproject.toml, or a .fab file."""
    try:
        if app.is_dir():
            from flwr.cli.build import build_fab_from_disk

            with quiet():
                return digest(build_fab_from_disk(app))
        return digest(app.read_bytes())
    except OSError as error:
        raise ConfigError(f"{app} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(
            f"{app} is neither a folder with a Flower app nor a .fab file: {error}"
        ) from None


@lru_cache(maxsize=1)
def own_digest() -> str:
    """Return the digest of the bundle that this installed package submits."""
    from flwr.cli.build import build_fab_from_files

    with quiet():
        return digest(build_fab_from_files({"pyproject.toml": app_text().encode()})[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings that are for Flower's developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def resolved(apps: tuple[str, ...]) -> dict[str, str]:
    """Return the digests that a policy's `apps` stand for, each with its entry."""
    return {own_digest() if one == OWN else one: one for one in apps}
