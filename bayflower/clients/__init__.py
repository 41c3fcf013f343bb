"""Client halves, one a method, and Flower ClientApps made of them."""
