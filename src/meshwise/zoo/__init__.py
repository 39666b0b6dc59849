"""Reference models, the user's own, and real data: a ``Task`` says what is trained, ``data.load`` on what."""

from meshwise.zoo.models import TASKS, get_task
from meshwise.zoo.task import OptimizerDefaults, Task

__all__ = ["TASKS", "OptimizerDefaults", "Task", "get_task"]
