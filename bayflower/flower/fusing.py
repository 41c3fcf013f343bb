"""A Flower app at the speed of the fused engine: the clients of a round are trained as one stack.

Strategy, messages, mods and the app's own code run as in the loop engine. Each client's call of the
app pauses where `make_client_app` would train or test. When all calls of the round wait there, the
fused engine trains these clients together, and each call goes on when its reply is pulled. A call
that trains in other code never pauses: such clients run one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from . import client
from .calls import Call
from .crew import Crew, Options
from .loop import InProcessGrid

OWN_CODE = (
    "clients were trained one by one because the app trains in its own code; make_client_app "
    "without a training loop of one's own can be stacked"
)


class FusedGrid(InProcessGrid):
    """A grid in this process whose clients are trained together where the app allows it."""

    def __init__(
        self, app: ClientApp, contexts: Iterable[Context], options: Options | None = None
    ) -> None:
        super().__init__(app, contexts)
        self.crew = Crew(options or Options())
        self.calls: dict[str, Call] = {}  # by message id: calls that wait for their reply's pull

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the first reply of `message_ids`; all queued messages of its type are answered
        together.
        """
        wanted = set(message_ids)
        for number in [*self.calls, *self.inbox]:
            if number in wanted:
                kind = self.inbox[number].metadata.message_type if number in self.inbox else ""
                if kind == MessageType.QUERY:
                    return super().pull_messages([number])
                if kind:
                    self._start(number, kind)
                call = self.calls.pop(number)
                if not call.over:
                    call.resume()
                return [] if call.result is None else [call.result]
        return []

    def _start(self, first: str, kind: str) -> None:
        """Begin the calls of all queued messages of a type; those that pause are worked on. If the
        first one does not pause, the others are left until they are pulled.
        """
        others = [number for number in self.inbox if number != first]
        paused = []
        for number in [first, *others]:
            if self.inbox[number].metadata.message_type != kind:
                continue
            message = self.inbox.pop(number)
            call = self.calls[number] = Call(partial(self._called, message))
            if not call.resume():
                paused.append(call)
            elif number == first:
                if kind == MessageType.TRAIN and not call.result.has_error():
                    self.crew.remark(OWN_CODE)
                return
        self.crew.work(paused)

    def _called(self, message: Message, call: Call) -> Message | None:
        client.TOGETHER.set(partial(self.crew.join, call))
        return self._answer(message)

    def close(self) -> None:
        """End the calls whose reply nobody pulled, and free the device's memory."""
        for call in self.calls.values():
            call.drop()
        self.calls.clear()
        self.crew.close()
