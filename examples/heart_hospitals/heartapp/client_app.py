"""heartapp: a training loop of our own between the two calls that FedMAP needs."""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bayflower.clients import Plug
from heartapp.task import Net, load_data


def load(context: Context):
    """Return (train, test) of this hospital."""
    return load_data(context.run_config["data-dir"], context.node_config["partition-id"])


plug = Plug("fedmap", model=Net, data=load)
app = ClientApp()
app.query()(plug.query)
app.evaluate()(plug.evaluate)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train on local data: AdamW on FedMAP's objective, batches drawn anew in every epoch."""
    job = plug.begin(msg, context)
    optimizer = torch.optim.AdamW(
        job.parameters(), lr=context.run_config["learning-rate"], weight_decay=0.01
    )
    draw = torch.Generator().manual_seed(job.round)
    for _ in range(context.run_config["local-epochs"]):
        for rows in torch.randperm(len(job.train.y), generator=draw).split(
            context.run_config["batch-size"]
        ):
            optimizer.zero_grad()
            job.loss(job.train.x[rows], job.train.y[rows]).backward()
            optimizer.step()
    return job.reply()
