"""What a container's health check runs: `python -m bayflower.deploy.health URL [AUTHORITY]`. It
imports nothing heavy.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request


def main(words: list[str]) -> int:
    """Return 0 if the URL answers, over TLS with a certificate of AUTHORITY if that is given."""
    context = ssl.create_default_context(cafile=words[1]) if len(words) > 1 else None
    try:
        with urllib.request.urlopen(words[0], timeout=5, context=context):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{words[0]}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
