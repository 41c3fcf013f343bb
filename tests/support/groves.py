"""Trees of aggregators in one process: two regions, each with a grid of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from bayflower.flower.loop import InProcessGrid
from bayflower.flower.regions.grid import Tree
from bayflower.flower.regions.region import Region

Answering = Callable[[int, RecordDict], RecordDict]


def above(answer: Answering, regions: int) -> InProcessGrid:
    """Return the upper grid, whose nodes are regions."""
    app = ClientApp()

    def both(message: Message, context: Context) -> Message:
        return Message(answer(context.node_id, message.content), reply_to=message)

    app.query()(both)
    app.train()(both)
    app.evaluate()(both)
    nodes = [Context(1, 7 + one, {}, RecordDict(), {}) for one in range(regions)]
    return InProcessGrid(app, nodes)


class Grove:
    """Makes the tree of a run; its regions get every other client."""

    def __init__(self, number: int = 2, **more: Any) -> None:
        self.number, self.more = number, more
        self.regions: list[Region] = []
        self.asked: list[tuple[RecordDict, RecordDict]] = []  # requests and answers

    def __call__(self, app: ClientApp, contexts: list[Context]) -> Grid:
        self.app, self.contexts = app, contexts
        shares = [contexts[place :: self.number] for place in range(self.number)]
        self.grids = [InProcessGrid(app, share, **self.more) for share in shares]
        self.regions = [Region(grid, len(list(grid.contexts))) for grid in self.grids]
        self.upper = above(self.answer, self.number)
        self.tree = Tree(self.upper)
        return self.tree

    def answer(self, node: int, content: RecordDict) -> RecordDict:
        said = self.answered(self.regions[node - 7], content)
        self.asked.append((content, said))
        return said

    def answered(self, region: Region, content: RecordDict) -> RecordDict:
        """Return a region's answer; tests change it."""
        return region.answer(content)
