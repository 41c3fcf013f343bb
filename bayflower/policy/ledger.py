"""What a site was asked in the last 24 hours, counted by the site itself: nothing that the server
says changes these numbers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from ..errors import ConfigError
from ..files.audit import locked
from ..files.texts import write_json
from .rules import Policy, refused

HOURS = 24


class Ledger:
    """Requests and bytes by hour, in a file of the site."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def admit(self, policy: Policy, now: float | None = None) -> None:
        """Count a request; raise, and do not count it, if the day's requests or bytes are used
        up.
        """
        with locked(self.path):
            hours, this = self._read(now)
            requests, sent = (sum(hour[i] for hour in hours.values()) for i in (0, 1))
            if policy.max_requests_a_day and requests >= policy.max_requests_a_day:
                raise refused(
                    "max_requests_a_day", f"{requests} requests were answered in {HOURS} hours"
                )
            if policy.max_mb_a_day and sent >= policy.max_mb_a_day * 1e6:
                raise refused("max_mb_a_day", f"{sent} bytes have left in {HOURS} hours")
            hours[this] = [hours[this][0] + 1, hours[this][1]]
            write_json(self.path, hours)

    def sends(self, policy: Policy, number: int, now: float | None = None) -> None:
        """Count the bytes of a reply; raise, and do not count them, if the day's bytes would not
        last for them.
        """
        with locked(self.path):
            hours, this = self._read(now)
            sent = sum(hour[1] for hour in hours.values()) + number
            if policy.max_mb_a_day and sent > policy.max_mb_a_day * 1e6:
                raise refused(
                    "max_mb_a_day", f"with this reply {sent} bytes would have left in {HOURS} hours"
                )
            hours[this] = [hours[this][0], hours[this][1] + number]
            write_json(self.path, hours)

    def _read(self, now: float | None) -> tuple[dict[str, list[int]], str]:
        """Return (requests, bytes) by hour, and the hour it is. A damaged file is an error: a new
        one would lift the caps.
        """
        this = int((time.time() if now is None else now) // 3600)
        try:
            known = json.loads(self.path.read_text())
            hours = {
                hour: [int(counts[0]), int(counts[1])]
                for hour, counts in known.items()
                if this - HOURS < int(hour) <= this + 1
            }
        except FileNotFoundError:
            hours = {}
        except (OSError, ValueError, TypeError, AttributeError, IndexError):
            raise ConfigError(
                f"{self.path} cannot be read; the owner of this site may remove it, which sets the "
                "counts of the day to 0"
            ) from None
        hours.setdefault(str(this), [0, 0])
        return hours, str(this)
