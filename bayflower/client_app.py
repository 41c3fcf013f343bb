"""Flower's ClientApp: one client of the federation named in the run-config, known by its partition id."""

from bayflower.clients.base import client_app
from bayflower.flower.remote import site_of

app = client_app(site_of)
