"""How a training step may be split: the shared vocabulary. Pure values, no torch."""

from meshwise.strategy.mesh import AXES, Mesh
from meshwise.strategy.schedule import Action, Schedule, schedule_for
from meshwise.strategy.strategy import PRESETS, Request, Strategy, parse, parse_list

__all__ = [
    "AXES",
    "PRESETS",
    "Action",
    "Mesh",
    "Request",
    "Schedule",
    "Strategy",
    "parse",
    "parse_list",
    "schedule_for",
]
