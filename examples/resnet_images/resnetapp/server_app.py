"""resnetapp: pFedVMP shares the ResNet's base and Gaussian messages about each class's features."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from bayflower.strategies import PFedVMP
from resnetapp.task import ResNet

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    config = context.run_config
    strategy = PFedVMP(
        fraction_train=config["fraction-train"],
        optimizer="sgd",
        momentum=0.9,
        lr=config["learning-rate"],
        xi=1.0,
        local_epochs=config["local-epochs"],
        batch_size=config["batch-size"],
    )
    result = strategy.start(
        grid, ArrayRecord(ResNet().state_dict()), num_rounds=config["num-server-rounds"]
    )
    last = result.evaluate_metrics_clientapp[config["num-server-rounds"]]
    print(
        f"personal models: accuracy {last['accuracy']:.3f}, worst client "
        f"{last['worst_client_accuracy']:.3f}, ECE {last['ece']:.3f}"
    )
