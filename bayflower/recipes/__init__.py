"""How clients train: the settings of local training, learning rates over rounds and steps, and what
is done to the samples and the loss of a step. Nothing here is about a method.
"""

from .rates import share
from .settings import RECIPE, Training

__all__ = ["RECIPE", "Training", "share"]
