"""`bayflower deploy`: from an empty folder to a running federation, and runs on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..deploy import branches, folders, layout
from ..errors import BayflowerError, ConfigError
from .deployed import hand_over, note, reach, warn_of_expiry
from .options import Overwrite
from .terminal import bar, quiet_logs, values

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Set up and use your own federation: keys, certificates, containers or processes, and "
    "runs. See docs/deployment.md.",
    epilog="Example: `bayflower deploy init fed --clients 3`, then `bayflower deploy up fed`, "
    "then `bayflower deploy submit fed fedmap`",
)
Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="the deployment's folder, or the part on this machine"),
]
Name = Annotated[str, typer.Option(help="name of the run [the newest]")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder to create; it must not exist or be empty")
    ],
    clients: Annotated[int, typer.Option(help="number of clients")] = 3,
    hosts: Annotated[
        str,
        typer.Option(
            help="host names and addresses of the server, separated by commas; clients connect to "
            "the first; leave it out if everything runs on one machine"
        ),
    ] = "",
    port: Annotated[
        int, typer.Option(help="port of the server that clients connect to")
    ] = layout.PORT,
    days: Annotated[int, typer.Option(help="days for which the certificates are valid")] = 365,
    image: Annotated[str, typer.Option(help="container image [bayflower:VERSION]")] = "",
    cpus: Annotated[float, typer.Option(help="cap on the CPU cores of a container")] = 1.0,
    memory: Annotated[
        str, typer.Option(help="cap on the memory of a training container, for example 4g")
    ] = "2g",
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help="clients encrypt states and personal models on their disk"),
    ] = False,
    regions: Annotated[
        int, typer.Option(help="aggregators between clients and server; 0 = none")
    ] = 0,
    region_hosts: Annotated[
        str, typer.Option(help="with --hosts: a host of each region's server, separated by commas")
    ] = "",
) -> None:
    """Create keys, certificates and compose files for one machine or, with --hosts, a folder for
    each machine.

    Example: `bayflower deploy init fed --clients 10 --hosts fl.example.org,192.0.2.7`
    """
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    known: dict[str, Any] = {"clients": clients, "hosts": named, "port": port, "days": days}
    known |= {"image": image, "cpus": cpus, "memory": memory, "encrypt": encrypt}
    if regions:
        below = [host.strip() for host in region_hosts.split(",") if host.strip()]
        branches.init(folder, regions=regions, region_hosts=below, **known)
        print(f"made {folder}/upper and {regions} regions; see docs/deployment.md, Regions")
        return
    made = folders.init(folder, **known)
    print(
        f"certificates are valid until {made.expires}; renew them with: bayflower deploy renew "
        f"{folder}"
    )
    if named:
        print(
            f"server:  copy {folder}/server to the server's machine and run there: bayflower "
            "deploy up server"
        )
        print(
            f"clients: copy {folder}/client-K to the machine of client K, put its data into "
            "client-K/data and run there: bayflower deploy up client-K"
        )
        print(f"keep {folder}/ca here or offline: its private key can sign new certificates")
    else:
        print(
            f"start:   bayflower deploy up {folder}            (containers)  or  bayflower deploy "
            f"up {folder} --local  (processes)"
        )
    print(
        f"run:     bayflower deploy submit {folder if not named else 'server'} fedmap --set "
        "rounds=5"
    )


@app.command()
def up(
    folder: Folder,
    local: Annotated[
        bool, typer.Option("--local", help="start processes on this machine, without Docker")
    ] = False,
) -> None:
    """Start this machine's programs of the deployment that are not running; return when all are
    healthy.
    """
    for part in layout.parts(folder):
        deployment = layout.read(part)
        warn_of_expiry(deployment)
        if local:
            from ..deploy.local import Local

            Local(deployment).up(note)
        else:
            from ..deploy import docker

            docker.up(deployment)
        print(f"{deployment.name} is up; stop it with: bayflower deploy down {folder}")


@app.command()
def down(
    folder: Folder,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="containers: also delete results and client states")
    ] = False,
) -> None:
    """Stop this machine's programs of the deployment; states and results are kept."""
    for part in reversed(layout.parts(folder)):  # regions use the network of the server above
        end(layout.read(part), volumes)


def end(deployment: layout.Deployment, volumes: bool) -> None:
    """Stop the programs of one deployment."""
    from ..deploy.local import local_of

    local = local_of(deployment)
    if local is not None and local.any_alive():
        print(f"stopped {local.down()} programs")
        return
    if local is not None and shutil.which("docker") is None:
        print("nothing is running")
        return
    from ..deploy import docker

    docker.compose(deployment, "down", *(["--volumes"] if volumes else []))


@app.command()
def submit(
    folder: Folder,
    method: Annotated[
        str, typer.Argument(help="see `bayflower methods`; not needed with --resume")
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="any setting; see `bayflower settings METHOD`"
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="name of the run and of its results [by its settings]")
    ] = "",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="continue an interrupted run after its last completed round"),
    ] = False,
    overwrite: Overwrite = False,
    wait: Annotated[float, typer.Option(help="timeout in seconds for missing clients")] = 120.0,
    detach: Annotated[
        bool, typer.Option("--detach", help="return at once; `deploy status` shows the progress")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a method on the deployment's clients. Exit code 0: finished; 1: the run failed or clients
    are missing; 2: invalid setting.

    Example: `bayflower deploy submit fed fedmap --set dataset=synthetic --set rounds=20`
    """
    quiet_logs(False)
    if not method and not resume:
        raise ConfigError("name a method, e.g. fedmap, or give --resume; see: bayflower methods")
    server, watch = reach(folder, again=resume)
    if server is None:
        if resume:  # after a machine has died: one command
            from ..deploy import docker

            docker.up(layout.read(folder))
        flags = {"--resume": resume, "--overwrite": overwrite}
        flags |= {"--detach": detach, "--json": as_json}
        words = [
            "submit",
            "/server",
            *([method] if method else []),
            *(word for text in sets or [] for word in ("--set", text)),
            "--name",
            name,
            "--wait",
            str(wait),
            *(flag for flag, wanted in flags.items() if wanted),
        ]
        hand_over(folder, words)
        return
    from ..deploy import runs

    given = values(sets)
    title = method or "run"
    with bar(
        int(given.get("rounds", 0) or runs.rounds_of(server, method, name, resume)),
        title,
        hidden=as_json,
    ) as progress:
        result = runs.submit(
            server,
            method,
            given,
            name=name,
            resume=resume,
            overwrite=overwrite,
            wait=wait,
            detach=detach,
            watch=watch,
            note=(lambda text: None) if as_json else note,
            show=lambda status: progress(status.get("records", [])),
        )
    if detach:
        return
    if as_json:
        print(json.dumps(result))
        return
    from ..report.text import result_table

    out = Console()
    out.print(result_table(result))
    for line in result["faults"][-5:]:
        out.print(f"note: {line}", style="yellow", markup=False)
    print(
        "copy the results with: bayflower deploy collect DIR "
        f"OUT{f' --name {name}' if name else ''}"
    )


@app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show which clients are online and the state of the newest run. Exit code 1: the run failed,
    or the SuperLink does not answer.
    """
    deployment = layout.read(folder)
    server, _ = reach(folder)
    if server is None:
        hand_over(folder, ["status", "/server", *(["--json"] if as_json else [])])
        return
    from ..deploy import keys, runs

    facts = runs.overview(server)
    certificate = deployment.server / "server.crt"
    facts["certificate_ends"] = (
        keys.expiry(certificate).strftime("%Y-%m-%d") if certificate.exists() else None
    )
    if as_json:
        print(json.dumps(facts))
    else:
        grid = Table(box=None, pad_edge=False, show_header=False)
        run = facts["run"]
        names = run["names"] if run else {}
        for client, state in sorted(facts["clients"].items()):
            grid.add_row(client, state, escape(names.get(client.removeprefix("client-"), "")))
        if run:
            grid.add_row(
                "run",
                f"{run['name']}: {run['state']}, round {run['round'] or 0} of "
                f"{run['rounds'] or '?'}",
            )
            if run["reason"]:
                grid.add_row("reason", escape(run["reason"]))
        grid.add_row(
            "certificate",
            f"until {facts['certificate_ends']}"
            if facts["certificate_ends"]
            else "none: not secure",
        )
        Console().print(grid)
    if runs.failed(facts):
        raise typer.Exit(1)


@app.command()
def logs(
    folder: Folder,
    program: Annotated[
        str, typer.Argument(help="superlink, gate, serverapp, supernode-K, clientapp-K [all]")
    ] = "",
    lines: Annotated[int, typer.Option(help="number of lines of each program")] = 50,
) -> None:
    """Print the last output of Flower's programs."""
    deployment = layout.read(folder)
    from ..deploy.local import local_of

    local = local_of(deployment)
    if local is None:
        from ..deploy import docker

        docker.compose(
            deployment, "logs", "--no-color", "--tail", str(lines), *([program] if program else [])
        )
        return
    files = sorted((local.folder / "logs").glob(f"{program or '*'}.log"))
    if not files:
        raise ConfigError(
            f"there is no log of {program or 'any program'}; the programs are "
            f"{', '.join(local.names())}"
        )
    for file in files:
        for line in file.read_text(errors="replace").splitlines()[-lines:]:
            print(f"{file.stem}: {line}")


@app.command()
def collect(
    folder: Folder,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="a folder for result.json and the checkpoint")
    ],
    name: Name = "",
) -> None:
    """Copy a run's results from the server to OUT; the clients' personal models stay with the
    clients.
    """
    deployment = layout.read(folder)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder")
    server, _ = reach(folder)
    from ..deploy import runs

    if server is not None:
        shutil.copytree(runs.run_folder(server, name), out, dirs_exist_ok=True)
    else:
        from ..deploy import docker

        if not name:
            name = docker.output_inside(deployment, ["newest", "/server"])
        docker.copy_out(deployment, docker.SERVER, f"/results/{name}", out)
    if not (out / "result.json").exists():
        raise BayflowerError(
            f"{out} has no result.json: the run has not finished; see: bayflower deploy status "
            f"{folder}"
        )
    print(f"written: {out / 'result.json'}")


@app.command(hidden=True)
def keep(
    folder: Folder, spool: Annotated[Path, typer.Option(help="the folder of requests")]
) -> None:
    """Keep the runs of a region's own server going."""
    server, _ = reach(folder)
    assert server is not None
    from ..deploy import keeper

    keeper.keep(server, spool, note)


@app.command(hidden=True)
def newest(folder: Folder) -> None:
    """Print the name of the newest run."""
    server, _ = reach(folder)
    assert server is not None
    from ..deploy import runs

    print(runs.run_folder(server, "").name)
