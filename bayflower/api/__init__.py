"""Training from Python: `bayflower.fit` and `bayflower.compare`. The command line shares the path.

Each name is loaded when it is asked for, so that this folder costs nothing to import.
"""
