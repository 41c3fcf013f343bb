"""The programs that a region has beside those of a server:

above       a SuperNode with the region's key for the server above
aboveapp    its executor, which hands requests on through the volume `spool`
keeper      starts the region's own run, and starts it again if it has died (`keeper.py`)
"""

from __future__ import annotations

from typing import Any

from .layout import ABOVE, NODE_FILES, POLICY, RUNTIME_PORT, SUPERLINK_PORT, Deployment

SPOOL = "/spool"


def node_config(deployment: Deployment, spool: str, audit: str) -> str:
    """Return the configuration of a region's node."""
    return (
        f"partition-id={deployment.region} num-partitions={deployment.regions} "
        f'spool="{spool}" audit-dir="{audit}"'
    )


def add_region(
    maker: Any,  # of the containers
    services: dict[str, dict[str, Any]],
    networks: dict[str, Any],
    volumes: dict[str, Any],
) -> None:
    """Add what a region has beside a server's containers."""
    deployment = maker.deployment
    server = maker.base if deployment.role == "server" else f"{maker.base}/server"
    own, address = f"{server}/{ABOVE}", f"above:{RUNTIME_PORT}"
    command = ["python", "-m", "bayflower.deploy.supernode", "--audit-dir", "/audit"]
    command += ["--policy", f"/client/{POLICY}", "--superlink", deployment.above]
    command += ["--node-config", node_config(deployment, SPOOL, "/audit")]
    command += ["--isolation", "process", "--host", "0.0.0.0"]
    command += ["--port", str(RUNTIME_PORT)]
    command += [word for option, file in NODE_FILES.items() for word in (option, f"/client/{file}")]
    mounts = [f"{own}/{file}:/client/{file}:ro" for file in dict.fromkeys(NODE_FILES.values())]
    log, spool = "audit-above:/audit", f"spool:{SPOOL}"
    services["above"] = maker.service(
        command,
        health=f"localhost:{RUNTIME_PORT}",
        networks=["upstream", "above"],
        volumes=[*mounts, f"{own}/{POLICY}:/client/{POLICY}:ro", log],
        authority="/client/ca.crt",
    )
    services["aboveapp"] = maker.service(
        [
            *["flower-superexec", "--runtime-api-address", address],
            *["--root-certificates", "/client/ca.crt"],
            *["--superexec-auth-secret-file", "/client/executor.secret"],
        ],
        health=address,
        networks=["above"],
        volumes=[
            *[f"{own}/{file}:/client/{file}:ro" for file in ("ca.crt", "executor.secret")],
            *[spool, log],
        ],
        memory=deployment.memory,
        after={"above": "service_healthy"},
        authority="/client/ca.crt",
    )
    services["keeper"] = maker.service(
        ["bayflower", "deploy", "keep", "/server", "--spool", SPOOL],
        health=f"superlink:{SUPERLINK_PORT}",
        networks=["core"],
        volumes=[f"{server}:/server:ro", "results:/results", spool],
        memory="1g",
        after={
            "superlink": "service_healthy",
            "register": "service_completed_successfully",
        },
    )
    services["keeper"]["environment"] = {"BAYFLOWER_INSIDE": "/results"}
    services["serverapp"]["volumes"].append(spool)
    upstream = {"external": True, "name": deployment.network} if deployment.network else {}
    networks |= {"upstream": upstream, "above": {"internal": True}}
    volumes |= {"spool": {}, "audit-above": {}}
