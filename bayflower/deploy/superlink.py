"""Flower's SuperLink with more patience for its own database.

A write that waits longer than five seconds for another one fails in Flower ("database is locked"),
and what failed is lost: a client's reply, the question for the next task, a run. A busy machine
needs five seconds now and then; a minute is enough.

    python -m bayflower.deploy.superlink …     as flower-superlink …
"""

from __future__ import annotations

import sys

PATIENCE = "60000"  # milliseconds


def main() -> None:
    """Serve until ended."""
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
