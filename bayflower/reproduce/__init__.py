"""Published tables by one command: what they say (`papers/*.toml`), what was run here (`cache`),
and both side by side (`show`).
"""

from .cache import Cache
from .tables import Table, find, load_tables

__all__ = ["Cache", "Table", "find", "load_tables"]
