"""The files of a deployment's folder, made by `bayflower deploy init`.

DIR/deployment.json  compose.yaml (everything on one machine)  ca/ (the authority; its key never
                                                               leaves this folder)
DIR/server/          what the server's machine needs: certificates and keys of SuperLink and gate,
                     the clients' public keys (nodes/), compose.yaml
DIR/client-K/        what client K's machine needs: the authority's certificate, its own node key,
                     compose.yaml, data/ (only read), policy.toml (what its owner allows); its owner
                     may add peers.json (keys of the other clients, for secure sums)

With regions, DIR holds a deployment for each part, and tree.json says which:
DIR/upper/           the server, whose clients are the regions
DIR/region-R/        a region, a server for its clients; server/above/ has its key for the server
                     above
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ..errors import ConfigError
from . import keys

FILE = "deployment.json"
POLICY = "policy.toml"  # of a client
NODE_FILES = {  # of a SuperNode: options and the files that they name
    "--root-certificates": "ca.crt",
    "--auth-supernode-private-key": "node.key",
    "--ssl-ca-certfile": "ca.crt",
    "--ssl-certfile": "runtime.crt",
    "--ssl-keyfile": "runtime.key",
    "--superexec-auth-secret-file": "executor.secret",
}
PEERS = "peers.json"  # keys of the other clients, if its owner has put them there
AUDIT = "audit.jsonl"  # the server's, beside the runs
PORT = 9092
SUPERLINK_PORT, RUNTIME_PORT = 9091, 9094  # inside
# names inside one machine
INNER_HOSTS = ("superlink", "gate", "localhost", "127.0.0.1", "::1")
TREE = "tree.json"  # names the parts of a deployment with regions
ABOVE = "above"  # in the folder of a region's server: what connects it to the server above
UPPER, REGION = "upper", "region"  # kinds of parts
STATE_KEY = "state.key"  # in a client's folder: with it states and personal models are encrypted
CONTAINER_USER = 10001  # user of the containers if root made the folder


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One deployment as one of its folders sees it."""

    name: str
    role: str  # "all" (one machine), "server" or "client"
    clients: int
    hosts: tuple[str, ...]  # names of the server; clients connect to the first
    port: int
    image: str
    user: str  # "uid:gid" of the containers, to whom the private keys belong
    expires: str
    client: int | None = None
    cpus: float = 1.0
    memory: str = "2g"
    encrypt: bool = False  # whether clients encrypt their states and personal models
    kind: str = ""  # "upper" (its clients are regions), "region", or neither
    first: int = 0  # number of its first client
    total: int = 0  # clients of the whole tree; 0: there are no others
    region: int = 0  # number of this region
    regions: int = 0  # of the tree
    above: str = ""  # a region: host:port of the server above
    network: str = ""  # a region on the machine of the server above: the network of both
    folder: Path = dataclasses.field(default=Path(), compare=False)

    @property
    def server(self) -> Path:
        """The folder of the server's machine."""
        if self.role == "client":
            raise ConfigError(
                f"{self.folder} is a client's folder; run this command on the server's machine "
                "with the server's folder"
            )
        return self.folder if self.role == "server" else self.folder / "server"

    def gate_stem(self) -> str:
        """Return the stem of the gate's certificate and key; an older deployment has one for both
        SuperLink and gate.
        """
        return "gate" if (self.server / "gate.key").exists() else "server"

    def client_folders(self) -> dict[int, Path]:
        """Return the folders of the clients on this machine."""
        if self.role == "client":
            assert self.client is not None
            return {self.client: self.folder}
        return (
            {client: self.folder / f"client-{client}" for client in self.numbers()}
            if self.role == "all" and self.kind != UPPER
            else {}
        )

    def numbers(self) -> range:
        """Return the numbers of the clients, or of the regions."""
        return range(self.first, self.first + self.clients)

    def everyone(self) -> int:
        """Return how many clients take part in a run."""
        return self.total or self.clients

    def called(self, name: str) -> str:
        """Return what a registered node is called: the keys of regions are those of clients."""
        return name.replace("client-", "region-") if self.kind == UPPER else name

    def has_server(self) -> bool:
        """Return whether the server is on this machine."""
        return self.role != "client"

    def address(self) -> str:
        """Return the host:port that clients connect to."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def read(folder: Path) -> Deployment:
    """Return the deployment a folder belongs to."""
    if (folder / TREE).exists():
        folder = folder / UPPER
    path = folder / FILE
    try:
        facts = json.loads(path.read_text())
        facts["hosts"] = tuple(facts["hosts"])
        return Deployment(**facts, folder=folder.resolve())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is not a deployment: {path} does not exist; make one with: bayflower deploy "
            f"init {folder}"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); restore it, or make a new deployment"
        ) from None


def parts(folder: Path) -> list[Path]:
    """Return the folders of a deployment's parts in the order in which they start."""
    if not (folder / TREE).exists():
        return [folder]
    try:
        return [folder / str(name) for name in json.loads((folder / TREE).read_text())["parts"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / TREE} cannot be read ({error}); restore it") from None


def write(deployment: Deployment) -> None:
    """Write deployment.json into its folder."""
    facts = {
        name: value for name, value in dataclasses.asdict(deployment).items() if name != "folder"
    }
    keys.new_file(deployment.folder / FILE, (json.dumps(facts, indent=2) + "\n").encode(), 0o644)
