"""The containers of a deployment: SuperLink, gate, executors of the ServerApp and of each
ClientApp, SuperNodes.

Networks limit which containers reach each other: `core` has the SuperLink and the server's own
containers, `federation` the gate and the SuperNodes, `client-K` a SuperNode and its executor. A
client's executor sees its data and its state, not its node key. Only the server's own containers
reach the API that starts runs.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from .. import __version__ as __version__  # of the image
from ..files.audit import VARIABLE
from ..files.vault import VARIABLE as KEY_VARIABLE
from . import keys
from .layout import (
    AUDIT,
    FILE,
    NODE_FILES,
    POLICY,
    REGION,
    RUNTIME_PORT,
    STATE_KEY,
    SUPERLINK_PORT,
    Deployment,
)
from .regional import add_region

HEAD = (
    "# Written by: bayflower deploy init. Start: bayflower deploy up DIR, or docker compose up "
    "-d --wait\n"
)
Service = dict[str, Any]


def write(deployment: Deployment) -> None:
    """Write compose.yaml into the deployment's folder."""
    keys.new_file(
        deployment.folder / "compose.yaml", (HEAD + text(content(deployment))).encode(), 0o644
    )


def text(services: dict[str, Any]) -> str:
    """Return compose's YAML, without anchors."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(services, Dumper=Plain, sort_keys=False, width=140)


def content(
    deployment: Deployment, base: str = ".", user: str = "", build: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the containers of one machine; `base` is the path of the folders, `build` says how to
    build the image.
    """
    maker = Maker(deployment, base, user or deployment.user, build)
    services: dict[str, Service] = {}
    networks: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
    if deployment.has_server():
        services |= maker.server()
        networks |= {
            "core": {"internal": True},
            "federation": {"internal": deployment.role == "all"},
        }
        volumes |= {"database": {}, "results": {}}
    if deployment.role == "client":
        networks["federation"] = {}  # for the connection to the server
    if deployment.kind == REGION and deployment.has_server():
        add_region(maker, services, networks, volumes)
    for client in deployment.client_folders():
        services |= maker.client(client)
        networks[f"client-{client}"] = {"internal": True}
        volumes |= {f"state-{client}": {}, f"audit-{client}": {}}
    return {"name": deployment.name, "services": services, "networks": networks, "volumes": volumes}


def trial(clients: int, image: str, build: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a quick trial on one machine without TLS, keys or gate."""
    deployment = Deployment(
        "bayflower-insecure-trial",
        "all",
        clients,
        ("superlink",),
        SUPERLINK_PORT,
        image,
        "10001:10001",
        "never",
        cpus=1.0,
    )
    maker = Maker(deployment, ".", deployment.user, build, secure=False)
    services = maker.server()
    for client in range(clients):
        services |= maker.client(client)
    networks = {
        "core": {"internal": True},
        **{f"client-{client}": {"internal": True} for client in range(clients)},
    }
    volumes: dict[str, Any] = {
        "database": {},
        "results": {},
        **{
            f"{kind}-{client}": {}
            for client in range(clients)
            for kind in ("state", "data", "audit")
        },
    }
    facts = {
        "name": deployment.name,
        "role": "server",
        "clients": clients,
        "hosts": ["superlink"],
        "port": SUPERLINK_PORT,
        "image": image,
        "user": deployment.user,
        "expires": "never",
    }
    configs = {"deployment": {"content": json.dumps(facts)}}
    return {
        "name": deployment.name,
        "services": services,
        "networks": networks,
        "volumes": volumes,
        "configs": configs,
    }


class Maker:
    """Makes the services of one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        base: str,
        user: str,
        build: dict[str, Any] | None,
        secure: bool = True,
    ) -> None:
        self.deployment, self.base, self.user, self.build, self.secure = (
            deployment,
            base,
            user,
            build,
            secure,
        )

    def service(
        self,
        command: list[str],
        *,
        health: str,
        networks: list[str],
        volumes: list[str],
        memory: str = "512m",
        cpus: float = 0,
        after: dict[str, str] | None = None,
        authority: str = "/server/ca.crt",
    ) -> Service:
        """Return a container with minimal rights."""
        of_authority = [authority] if self.secure else []
        made: Service = {
            "image": self.deployment.image,
            **({"build": self.build} if self.build else {}),
            **({} if self.build or "/" in self.deployment.image else {"pull_policy": "never"}),
            "command": command,
            "user": self.user,
            "init": True,
            "read_only": True,
            "tmpfs": ["/tmp:mode=1777,size=512m"],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "restart": "unless-stopped",
            "networks": networks,
            "volumes": volumes,
            "pids_limit": 512,
            "mem_limit": memory,
            "cpus": cpus or self.deployment.cpus,
            "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}},
            "healthcheck": {
                "test": [
                    "CMD",
                    "python",
                    "-m",
                    "bayflower.deploy.health",
                    f"{self.scheme()}://{health}/health",
                    *of_authority,
                ],
                "interval": "30s",
                "timeout": "10s",
                "retries": 3,
                "start_period": "60s",
                "start_interval": "2s",
            },
        }
        if after:
            made["depends_on"] = {
                name: {"condition": condition} for name, condition in after.items()
            }
        return made

    def scheme(self) -> str:
        """Return the URL scheme: https, or http without TLS."""
        return "https" if self.secure else "http"

    def server(self) -> dict[str, Service]:
        """Return the containers of the server's machine."""
        own = self.base if self.deployment.role == "server" else f"{self.base}/server"
        folder = [f"{own}:/server:ro"] if self.secure else []
        secret = ["--superexec-auth-secret-file", "/server/executor.secret"] if self.secure else []
        tls = [
            "--ssl-ca-certfile",
            "/server/ca.crt",
            "--ssl-certfile",
            "/server/server.crt",
            "--ssl-keyfile",
            "/server/server.key",
        ]
        superlink = self.service(
            [
                *["python", "-m", "bayflower.deploy.superlink"],
                "--host",
                "0.0.0.0",
                "--port",
                str(SUPERLINK_PORT),
                "--isolation",
                "process",
                "--database",
                "/database/superlink.db",
                *(["--enable-supernode-auth", *tls, *secret] if self.secure else ["--insecure"]),
            ],
            health=f"localhost:{SUPERLINK_PORT}",
            networks=["core"],
            volumes=[*folder, "database:/database"],
            memory="1g",
        )
        trust = (
            ["--root-certificates", "/server/ca.crt", *secret] if self.secure else ["--insecure"]
        )
        ready = {
            "superlink": "service_healthy",
            **({"register": "service_completed_successfully"} if self.secure else {}),
        }
        serverapp = self.service(
            ["flower-superexec", "--runtime-api-address", f"superlink:{SUPERLINK_PORT}", *trust],
            health=f"superlink:{SUPERLINK_PORT}",
            networks=["core"],
            volumes=[*folder, "results:/results"],
            memory=self.deployment.memory,
            after=ready,
        )
        inside = {"BAYFLOWER_INSIDE": "/results"}
        serverapp["environment"] = {**inside, VARIABLE: f"/results/{AUDIT}"}
        if not self.secure:
            serverapp["configs"] = [{"source": "deployment", "target": f"/server/{FILE}"}]
            return {"superlink": superlink, "serverapp": serverapp}
        register = self.service(
            ["bayflower", "deploy", "register", "/server"],
            health="",
            networks=["core"],
            volumes=[*folder, "results:/results"],
            after={"superlink": "service_healthy"},
        )
        register |= {
            "environment": {"BAYFLOWER_INSIDE": "/results"},
            "restart": "on-failure:5",
            "healthcheck": {"disable": True},
        }
        gate = self.service(
            [
                *["python", "-m", "bayflower.deploy.gate"],
                "--port",
                str(self.deployment.port),
                "--superlink",
                f"superlink:{SUPERLINK_PORT}",
                *["--nodes", "/server/nodes"],
                *["--certificate", "/server/gate.crt", "--key", "/server/gate.key"],
                *["--authority", "/server/ca.crt"],
            ],
            health=f"localhost:{self.deployment.port}",
            networks=["core", "federation"],
            volumes=[  # its own key and no other
                f"{own}/{file}:/server/{file}:ro"
                for file in ("ca.crt", "gate.crt", "gate.key", "nodes")
            ],
            after={"superlink": "service_healthy"},
        )
        if self.deployment.role == "server":
            gate["ports"] = [f"{self.deployment.port}:{self.deployment.port}"]
        return {"superlink": superlink, "register": register, "gate": gate, "serverapp": serverapp}

    def client(self, client: int) -> dict[str, Service]:
        """Return the two containers of a client: the SuperNode with its key, and the executor with
        its data and state.
        """
        own = self.base if self.deployment.role == "client" else f"{self.base}/client-{client}"
        name = f"supernode-{client}"
        address = f"{name}:{RUNTIME_PORT}"
        node = (
            f"partition-id={client} num-partitions={self.deployment.everyone()} "
            'state-dir="/state" data-dir="/data" audit-dir="/audit"'
        )
        log = f"audit-{client}:/audit"
        if self.secure:
            node += ' policy="/client/policy.toml"'
        command = [
            *["python", "-m", "bayflower.deploy.supernode", "--audit-dir", "/audit"],
            *(["--policy", f"/client/{POLICY}"] if self.secure else []),
            "--superlink",
            self.deployment.address() if self.secure else f"superlink:{SUPERLINK_PORT}",
            "--node-config",
            node,
            "--isolation",
            "process",
            "--host",
            "0.0.0.0",
            "--port",
            str(RUNTIME_PORT),
        ]
        if not self.secure:
            supernode = self.service(
                [*command, "--insecure"],
                health=f"localhost:{RUNTIME_PORT}",
                networks=["core", f"client-{client}"],
                volumes=[log],
                after={"superlink": "service_healthy"},
            )
            executor = self.service(
                ["flower-superexec", "--runtime-api-address", address, "--insecure"],
                health=address,
                networks=[f"client-{client}"],
                volumes=[f"data-{client}:/data:ro", f"state-{client}:/state", log],
                memory=self.deployment.memory,
                after={name: "service_healthy"},
            )
            return {name: supernode, f"clientapp-{client}": executor}
        command += [
            word for option, file in NODE_FILES.items() for word in (option, f"/client/{file}")
        ]
        after = (
            {"gate": "service_healthy", "register": "service_completed_successfully"}
            if self.deployment.role == "all"
            else None
        )
        needed = dict.fromkeys([*NODE_FILES.values(), POLICY])
        mounts = [f"{own}/{file}:/client/{file}:ro" for file in needed]
        supernode = self.service(
            command,
            health=f"localhost:{RUNTIME_PORT}",
            networks=["federation", f"client-{client}"],
            volumes=[*mounts, log],
            after=after,
            authority="/client/ca.crt",
        )
        executor = self.service(
            [
                "flower-superexec",
                "--runtime-api-address",
                address,
                "--root-certificates",
                "/client/ca.crt",
                "--superexec-auth-secret-file",
                "/client/executor.secret",
            ],
            health=address,
            networks=[f"client-{client}"],
            memory=self.deployment.memory,
            after={name: "service_healthy"},
            volumes=[
                f"{own}/ca.crt:/client/ca.crt:ro",
                f"{own}/executor.secret:/client/executor.secret:ro",
                f"{own}/{POLICY}:/client/{POLICY}:ro",
                f"{own}/data:/data:ro",
                f"state-{client}:/state",
                log,
            ],
            authority="/client/ca.crt",
        )
        if self.deployment.encrypt:
            executor["volumes"].append(f"{own}/{STATE_KEY}:/client/{STATE_KEY}:ro")
            executor["environment"] = {KEY_VARIABLE: f"/client/{STATE_KEY}"}
        return {name: supernode, f"clientapp-{client}": executor}
