"""Flower's ClientApp: one client of the federation named in the run-config, known by its partition
id.
"""

from .flower.app import site_of
from .flower.client import client_app

app = client_app(site_of)
