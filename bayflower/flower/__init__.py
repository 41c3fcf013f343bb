"""Talking through Flower: messages out and replies in, who takes part, Flower's own programs. Few
others import flwr.
"""
