"""How long it takes to bring an env back into the middle of an episode: by the state of its
simulator, and by repeating its actions since the reset.

    python benchmarks/states.py                      # robosuite and libero, 200 actions
    python benchmarks/states.py dm_control --steps 500 --turns 3

One env with the options of `rlinf check env --installed`, without pictures, in turns; printed are
medians, both with the reset, and the bytes of the state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import fields
from typing import Any

import numpy as np

from rlinf.envs.base import REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.supervised.vector import SupervisedVectorEnv

CHUNK = 10


def measured(name: str, steps: int, turns: int) -> tuple[float, float, int]:
    """Seconds by state, seconds by actions, and bytes of the state."""
    adapter = REGISTRY.load(name)
    options = dict(adapter.example)
    if "images" in (field.name for field in fields(adapter.Options)):
        options["images"] = False
        options.pop("image_size", None)
    config = EnvConfig(
        type=name, options=options, max_episode_steps=steps + 1, ignore_terminations=True,
        processes=1, start_deadline=900.0, step_deadline=900.0,
    )  # fmt: skip
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as env:
        env.reset()
        spec = env.env_spec
        generator = np.random.default_rng(0)
        for _ in range(steps // CHUNK):
            given = generator.uniform(
                spec.action_low, spec.action_high, (1, CHUNK, spec.action_dim)
            )
            env.chunk_step(given.astype(np.float32))
        state = env.state_dict()
        size = int(state["simulator"]["size"][0])
        nothing: dict[str, Any] = {
            "state": np.zeros((1, 0), np.uint8),
            "size": np.zeros(1, np.int64),
        }
        ways: list[dict[str, Any]] = [state, {**state, "simulator": nothing}]
        seconds: list[list[float]] = [[], []]
        for _ in range(turns):
            for way, taken in zip(ways, seconds, strict=True):
                begin = time.perf_counter()
                env.load_state_dict(way)
                taken.append(time.perf_counter() - begin)
    by_state, by_actions = map(statistics.median, seconds)
    return by_state, by_actions, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", default=["robosuite", "libero"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    for name in asked.names:
        by_state, by_actions, size = measured(name, asked.steps, asked.turns)
        print(
            f"{name}: {by_state:.4f} s by its state ({size / 1e3:.1f} kB), {by_actions:.4f} s by "
            f"{asked.steps} actions, {by_actions / by_state:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
