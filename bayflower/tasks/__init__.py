"""What is predicted: classes, ordered or not, numbers, counts, several labels, times to events."""

from .choice import TASKS, make
from .task import EXTRA, Task

__all__ = ["EXTRA", "TASKS", "Task", "make"]
