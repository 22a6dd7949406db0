"""An engine whose steps go wrong, in a child process."""

from __future__ import annotations

from typing import Any

from rlinf.engines.config import HFEngineConfig
from rlinf.engines.hf import HFEngine


class FailingEngine(HFEngine):
    """Takes requests and then cannot compute."""

    def step(self) -> Any:
        raise ValueError("shapes of the cache differ")


class FailingConfig(HFEngineConfig):
    implementation = "tests.engines.failing_engine:FailingEngine"
