"""The ServerApp of a region: it answers the requests in a spool with the clients of its own grid.

It keeps nothing between requests that it needs. One that is killed is started again by the region's
keeper (`deploy/keeper.py`), finds the request that it had not answered, and asks its clients again:
those that have answered do so from their disks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from ...errors import ConfigError, in_one_line
from ...files import journal, lease
from .region import Region
from .spool import Spool

log = logging.getLogger("bayflower")
IDLE_SECONDS = 900.0  # without a request after which it ends; the next one starts it again
POLL_SECONDS = 0.1


def serve_region(grid: Grid, config: Mapping[str, Any]) -> None:
    """Answer the requests of one run until none has come for a while."""
    journal.set_up()
    spool = Spool(Path(str(config["spool"])))
    if not spool.folder.is_absolute() or not spool.folder.is_dir():
        raise ConfigError(f"spool must be the folder of a region's requests, got {spool.folder}")
    region, heard = Region(grid, int(config.get("min_nodes") or 0)), time.monotonic()
    with lease.alone_in(spool.folder, lease.SERVING):
        while time.monotonic() - heard < IDLE_SECONDS:
            for number in spool.waiting():
                answer_one(region, spool, number)
                heard = time.monotonic()
            time.sleep(POLL_SECONDS)


def answer_one(region: Region, spool: Spool, number: str) -> None:
    """Answer one request, or say why not."""
    started = time.perf_counter()
    if spool.answered(number):  # by this program's predecessor, just before it died
        spool.drop(number)
        return
    try:
        content = region.answer(spool.read(number))
    except Exception as error:  # one request must not end the region
        why = in_one_line(error) or type(error).__name__
        log.warning("request %s: %s", number[:12], why)
        lease.check(spool.folder)
        spool.answer(number, None, why[:500] + journal.origin_of(error))
        return
    lease.check(spool.folder)  # another program may have taken over meanwhile
    spool.answer(number, content)
    log.info("request %s answered in %.2f s", number[:12], time.perf_counter() - started)
