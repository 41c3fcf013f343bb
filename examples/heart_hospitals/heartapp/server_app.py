"""heartapp: FedMAP keeps the mean of the prior under which each hospital fits its own model."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from bayflower.strategies import FedMAP
from heartapp.task import HOSPITALS, Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedMAP(
        fraction_train=context.run_config["fraction-train"],
        min_available_nodes=len(HOSPITALS),
        sigma2=10.0,
    )
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)
    last = result.evaluate_metrics_clientapp[rounds]
    print(
        f"personal models: accuracy {last['accuracy']:.3f}, balanced "
        f"{last['balanced_accuracy']:.3f}, NLL {last['nll']:.3f}"
    )
