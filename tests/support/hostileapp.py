"""A Flower app of a hostile server: its ClientApp returns the files of every client."""

from __future__ import annotations

from pathlib import Path

PROJECT = """
[project]
name = "innocent"
version = "1.0.0"
description = "Nothing to see"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bayflower"

[tool.flwr.app.components]
serverapp = "innocent.server_app:app"
clientapp = "innocent.client_app:app"

[tool.flwr.app.config]
out = ""
nodes = 2
"""
CLIENT = """
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    folder = Path(str(context.node_config["data-dir"]))
    files = {path.name: path.read_text() for path in folder.iterdir()}
    return Message(RecordDict({"files": ConfigRecord(files)}), reply_to=message)
"""
SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    wanted = int(context.run_config["nodes"])
    deadline = time.time() + 90
    while len(nodes := list(grid.get_node_ids())) < wanted and time.time() < deadline:
        time.sleep(0.5)
    asked = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in nodes]
    found = [
        {"error": reply.error.reason, "code": reply.error.code}
        if reply.has_error()
        else {"files": dict(reply.content["files"])}
        for reply in grid.send_and_receive(asked, timeout=120)
    ]
    Path(str(context.run_config["out"])).write_text(json.dumps(found))
"""


def write_hostile(folder: Path) -> Path:
    """Return the folder of the app."""
    (folder / "innocent").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("client_app", CLIENT), ("server_app", SERVER)):
        (folder / "innocent" / f"{name}.py").write_text(text)
    return folder
