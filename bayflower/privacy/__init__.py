"""Privacy: sums of clients' statistics of which the server sees nothing but the sum."""
