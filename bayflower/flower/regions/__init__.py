"""Trees of aggregators: a region answers the server for its clients, with the exact sum of their
statistics.

bundles.py   several messages in one: what many of them share travels once
partial.py   partial sums, limits, and what a region saw of its clients, as arrays and JSON
grid.py      the server's side: the clients of all regions as the nodes of one grid
joining.py   the server's side: a round whose sum comes in parts
region.py    a region's side: one request to its clients, their replies, and their sum
spool.py     requests and answers as files between the two programs of a region
relay.py     the ClientApp of a region, which hands requests on to its own server
serving.py   the ServerApp of a region, which answers them

Sums are exact, so a tree gives the bits of a flat federation.
"""
