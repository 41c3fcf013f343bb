"""Flower's SuperLink with a longer timeout for its database.

In Flower a database write fails after five seconds of waiting for another one ("database is
locked"), and its content is lost: a client's reply, a query for the next task, or a run. On a busy
machine five seconds are sometimes too short; one minute is enough.

    python -m bayflower.deploy.superlink …     as flower-superlink …
"""

from __future__ import annotations

import sys

PATIENCE = "60000"  # milliseconds


def main() -> None:
    """Serve until stopped."""
    from flwr.supercore import sql_mixin

    pragmas = tuple(
        (name, PATIENCE if name == "busy_timeout" else value)
        for name, value in sql_mixin.SQLITE_PRAGMAS
    )
    setattr(sql_mixin, "SQLITE_PRAGMAS", pragmas)  # noqa: B010  (its type has a fixed length)
    from flwr.superlink.cli import flower_superlink

    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
