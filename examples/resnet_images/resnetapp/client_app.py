"""resnetapp: the client is Bayflower's, the network and the data are ours."""

from flwr.app import Context

from bayflower.clients import make_client_app
from resnetapp.task import ResNet, load_data


def load(context: Context):
    """Return (train, test) of this node."""
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"], context.run_config["data-dir"])


# the head that stays with each client is found by name
app = make_client_app("pfedvmp", model=ResNet, data=load, head="fc")
