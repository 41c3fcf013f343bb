"""Flower's ServerApp: `flwr run .` runs the methods in the run-config on all connected nodes."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every method in turn and write their results."""
    # not before it is needed: Flower imports this module to look at it
    from .flower.app import serve

    serve(grid, context.run_config)
