"""`bayflower policy`: write and check what a site allows, and pin an app."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..policy import rules

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="What a site allows, whatever the server asks for. See docs/site-policy.md.",
    epilog="Example: `bayflower policy check client-3/policy.toml`",
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="a policy, a TOML file")]


@app.command()
def new(file: File) -> None:
    """Write a policy with every rule, its meaning and its default."""
    if file.exists():
        raise ConfigError(f"{file} exists already and is not overwritten; choose another name")
    file.write_text(rules.written(), encoding="utf-8")
    print(f"wrote {file}; check a change with: bayflower policy check {file}")


@app.command()
def check(file: File) -> None:
    """Check a policy and print what it allows. Exit code 2: it cannot be used."""
    policy = rules.read(file)
    for line in unknown(policy):
        raise ConfigError(f"{file}: {line}")
    from ..flower.bundle import resolved

    print("apps:")
    for digest, entry in resolved(policy.apps).items():
        print(f"  {digest}" + (" (the installed version)" if digest != entry else ""))
    for name, value in vars(policy).items():
        if name == "apps":
            continue
        if isinstance(value, tuple):
            print(f"{name}: {', '.join(value) or 'none'}")
        elif isinstance(value, (str, int, float)):
            print(f"{name}: {value if value else 'no limit'}")
        else:
            for setting, limit in value.items():
                print(f"{name} of {setting}: {limit:g}")
    print(f"{file} can be used")


@app.command("app")
def digest_of_app(
    bundle: Annotated[
        Path, typer.Argument(metavar="APP", help="the folder of a Flower app, or a .fab file")
    ],
) -> None:
    """Print the digest of an app, for `apps` in a policy."""
    from ..flower.bundle import digest_of

    print(digest_of(bundle))


@app.command("key")
def key_of_site(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="the site's folder of states")],
    client: Annotated[int, typer.Option(help="number of the client")] = 0,
) -> None:
    """Print CLIENT=KEY: the key by which other sites know this one in secure sums."""
    from ..files.store import DiskStore
    from ..flower.masking import public_key

    print(f"{client}={public_key(DiskStore(state), client)}")


@app.command()
def peers(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="e.g. client-3/peers.json")],
    keys: Annotated[
        list[str], typer.Argument(metavar="CLIENT=KEY", help="as `bayflower policy key` prints it")
    ],
) -> None:
    """Write the keys of all sites, for secure sums that no server can stand in for."""
    from ..files.texts import write_json

    found: dict[str, str] = {}
    for one in keys:
        client, _, key = one.partition("=")
        if not (client.isdigit() and re.fullmatch("[0-9a-f]{64}", key)) or client in found:
            raise ConfigError(
                f"each site needs one CLIENT=KEY with 64 hexadecimal digits, got {one[:80]!r}"
            )
        found[client] = key
    write_json(file, found)
    print(f"wrote {file}: {len(found)} sites; compare the keys by another way than the server's")


def unknown(policy: rules.Policy) -> list[str]:
    """Return what is wrong with the names in a policy: methods and settings that do not exist."""
    import difflib

    from .. import methods
    from ..config import names

    known = {name for method in methods.METHODS for name in names(method)}
    found = []
    for pattern in policy.methods:
        if not any(rules.fits(method, (pattern,)) for method in methods.METHODS):
            found.append(f"methods has {pattern!r}, which no method fits; see: bayflower methods")
    for rule, limits in (("floor", policy.floor), ("ceiling", policy.ceiling)):
        for name in sorted(set(limits) - known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see: bayflower settings METHOD"
            found.append(f"[{rule}] has {name!r}, which is no setting of any method; {hint}")
    return found
