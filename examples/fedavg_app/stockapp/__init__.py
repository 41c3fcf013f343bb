"""stockapp: a Flower app."""
