"""Which tools exist: a literal table, and entry points of packages outside.

A package adds a tool by an entry point in the group ``rlinf.tools`` that names its config class, a
subclass of :class:`~rlinf.agents.tool.ToolConfig`.
"""

from __future__ import annotations

from rlinf.agents.tool import ToolConfig
from rlinf.config.registry import Registry

TOOLS = {
    "calculator": "rlinf.agents.calculator:CalculatorConfig",
}

REGISTRY = Registry("tool", "rlinf.tools", TOOLS, ToolConfig)
