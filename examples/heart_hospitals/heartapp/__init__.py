"""heartapp: a Flower app."""
