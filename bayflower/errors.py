"""Errors a person can act on. Apart from everything heavy, so that the command line answers at once."""


class BayflowerError(Exception):
    """An error whose text is one line that names the cause and the remedy."""


class ConfigError(BayflowerError):
    """A setting that cannot be used, found before anything starts."""
