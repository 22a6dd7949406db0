"""Which tasks exist: a literal table, and entry points of packages outside.

A package adds a task by an entry point in the group ``rlinf.data_tasks`` that names its config
class, a subclass of :class:`~rlinf.data.tasks.base_config.TaskConfig`.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.data.tasks.base_config import TaskConfig

TASKS = {
    "arithmetic": "rlinf.data.tasks.config:ArithmeticConfig",
    "sorting": "rlinf.data.tasks.config:SortingConfig",
    "reversal": "rlinf.data.tasks.config:ReversalConfig",
}

REGISTRY = Registry("task", "rlinf.data_tasks", TASKS, TaskConfig)
