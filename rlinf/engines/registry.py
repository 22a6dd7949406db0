"""Which engines exist: a literal table, and entry points of packages outside.

A package adds an engine by an entry point in the group ``rlinf.engines`` that names its config
class, a subclass of :class:`~rlinf.engines.config.EngineConfig`.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.engines.config import EngineConfig

ENGINES = {
    "hf": "rlinf.engines.config:HFEngineConfig",
    "vllm": "rlinf.engines.config:VLLMEngineConfig",
    "sglang": "rlinf.engines.config:SGLangEngineConfig",
}

REGISTRY = Registry("engine", "rlinf.engines", ENGINES, EngineConfig)
