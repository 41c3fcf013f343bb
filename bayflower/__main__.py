"""`python -m bayflower`."""

from .cli import main

main()
