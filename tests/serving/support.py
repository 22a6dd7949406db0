"""Small policies, and servers of them in a thread of the test."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rlinf.envs.spec import EnvSpec
from rlinf.models.config import CNNConfig
from rlinf.models.policy import Policy
from rlinf.serving.acting import ActingPolicy
from rlinf.serving.client import ActionClient
from rlinf.serving.server import PolicyServer, ServerSettings

TASKS = ("Open the drawer.", "Close the drawer.", "Reach the red ball.")
TOKEN = "a token of the tests"
SPEC = EnvSpec(
    observation_shapes={"states": (5,), "main_images": (16, 12, 3), "task_ids": ()},
    observation_dtypes={"states": "float32", "main_images": "uint8", "task_ids": "int64"},
    action_kind="continuous",
    action_dim=3,
    action_low=(-1.0,) * 3,
    action_high=(1.0,) * 3,
    task_descriptions=TASKS,
    max_episode_steps=20,
)


def small_policy(seed: int = 0) -> Policy:
    """A convolutional policy with chunks of 4 actions."""
    config = CNNConfig(
        num_action_chunks=4, channels=(8,), kernel_sizes=(4,), strides=(4,), image_features=16,
        policy_gain=1.0,
    )  # fmt: skip
    return config.build(SPEC, value_dim=1, seed=seed).eval()


def observation(seed: int) -> dict[str, Any]:
    """One that the policy reads."""
    random = np.random.default_rng(seed)
    return {
        "states": random.normal(size=5).astype(np.float32),
        "main_images": random.integers(0, 256, (16, 12, 3), dtype=np.uint8),
        "prompt": TASKS[seed % 3],
    }


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Press Ctrl-C after so many seconds, which ends what is within."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    # What runs in the background of a shell begins with a Ctrl-C that is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


class Running:
    """A server that runs, and what its tests do to it."""

    def __init__(self, server: PolicyServer) -> None:
        self.server, self.address = server, ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        def ready(address: str) -> None:
            self.address = address
            self._ready.set()

        self._loop.run_until_complete(self.server.run(self._stop, ready))
        self._loop.close()

    def pause(self, seconds: float) -> None:
        """Answer nobody for a while."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def begin_to_stop(self) -> None:
        """As a signal does."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait(self) -> None:
        """Until it has stopped."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    def connect(self) -> ActionClient:
        """A client."""
        return ActionClient(f"ws://{self.address}", TOKEN, timeout=30)


@contextmanager
def serving(
    policy: Policy,
    *,
    spec: EnvSpec = SPEC,
    block_size: int | None = None,
    deterministic: bool = True,
    newest: Any = None,
    keys: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server of a policy at a free port."""
    running = Running(
        PolicyServer(
            ActingPolicy(policy, version=7, block_size=block_size, deterministic=deterministic),
            spec,
            name="small",
            settings=ServerSettings(port=0, token=TOKEN, keys=keys, **settings),
            newest=newest,
        )
    )
    try:
        yield running
    finally:
        if running._thread.is_alive():
            running.begin_to_stop()
        running.wait()
