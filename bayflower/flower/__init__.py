"""Everything that uses Flower: messages and replies, the clients of a run, Flower's programs. Few
others import flwr.
"""
