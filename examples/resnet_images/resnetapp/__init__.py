"""resnetapp: a Flower app."""
