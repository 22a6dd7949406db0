"""What a server adds to the time that a policy takes to act, and what a robot waits for it.

``python benchmarks/serving.py`` serves small policies from a process of its own on loopback. *Act*
is the forward pass as the server times it, *above* the rest of a round trip: both ways, packing,
checking, batching. Then a control loop with a fixed period executes chunks, once by asking when one
has ended and once in real time (``rlinf.serving.chunks``), with a latency added to each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlinf.envs.spec import EnvSpec
from rlinf.models.config import CNNConfig, MLPConfig
from rlinf.serving.acting import ActingPolicy
from rlinf.serving.chunks import RealTimeChunks
from rlinf.serving.client import ActionClient
from rlinf.serving.server import PolicyServer, ServerSettings

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "states": {"states": (39,)},
    "one picture": {"states": (39,), "main_images": (224, 224, 3)},
}
TYPES = {"states": "float32", "main_images": "uint8"}
TOKEN = "benchmark"


def spec_of(shapes: dict[str, tuple[int, ...]]) -> EnvSpec:
    return EnvSpec(
        observation_shapes=shapes,
        observation_dtypes={name: TYPES[name] for name in shapes},
        action_kind="continuous",
        action_dim=7,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        task_descriptions=(),
        max_episode_steps=100,
    )


def serve(name: str, chunk: int, sender: Any) -> None:
    """In a process of its own, until it is killed."""
    torch.set_num_threads(1)
    spec = spec_of(SHAPES[name])
    config = CNNConfig if "main_images" in SHAPES[name] else MLPConfig
    policy = config(num_action_chunks=chunk, hidden_sizes=(256, 256)).build(spec).eval()
    settings = ServerSettings(port=0, token=TOKEN)
    server = PolicyServer(ActingPolicy(policy, version=0), spec, name=name, settings=settings)
    asyncio.run(server.run(asyncio.Event(), sender.send))


@contextmanager
def served(name: str, chunk: int) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(name, chunk, sender), daemon=True)
    process.start()
    try:
        yield f"ws://{receiver.recv()}"
    finally:
        process.kill()
        process.join()


def observation(name: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        key: (random.normal(size=shape).astype(np.float32) if key == "states"
              else random.integers(0, 256, shape, dtype=np.uint8))
        for key, shape in SHAPES[name].items()
    }  # fmt: skip


def round_trips(url: str, name: str, count: int) -> np.ndarray:
    """[count, 2] seconds of round trips and, of these, of the forward pass."""
    found = []
    with ActionClient(url, TOKEN) as client:
        seen = observation(name, np.random.default_rng(0))
        for number in range(count + 50):
            began = time.perf_counter()
            answer = client.infer(seen)
            whole = time.perf_counter() - began
            if number >= 50:  # the first ones find cold caches
                found.append((whole, answer["policy_timing"]["infer_ms"] / 1e3))
    return np.array(found)


def print_round_trips(count: int) -> None:
    print(f"milliseconds of {count} requests, p50 / p90 / p99")
    for name in SHAPES:
        with served(name, 8) as url:
            whole, act = round_trips(url, name, count).T
            parts = {"round trip": whole, "act": act, "above": whole - act}
            text = "; ".join(
                f"{part} " + " / ".join(f"{1e3 * q:.2f}" for q in np.quantile(s, (0.5, 0.9, 0.99)))
                for part, s in parts.items()
            )
            print(f"{name}: {text}; round trip / act {np.median(whole) / np.median(act):.2f}")
            print(f"{name}: {together(url, name, count)}", flush=True)


def together(url: str, name: str, count: int, clients: int = 4) -> str:
    """How many answers a second several clients get, beside one."""

    def rate(number: int) -> float:
        threads = [threading.Thread(target=round_trips, args=(url, name, count))
                   for _ in range(number)]  # fmt: skip
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return number * (count + 50) / (time.perf_counter() - began)

    one, many = rate(1), rate(clients)
    return f"{clients} clients {many:.0f} answers/s, one {one:.0f}: ratio {many / one:.2f}"


class Delayed:
    """A client whose answers come later."""

    def __init__(self, client: ActionClient, seconds: float) -> None:
        self.metadata, self._client, self._seconds = client.metadata, client, seconds

    def infer(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(self._seconds)
        return self._client.infer(seen)


def control(act: Any, steps: int, period: float) -> tuple[float, list[float]]:
    """Seconds of so many control steps, and what each waited for its action."""
    waits, began = [], time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        act()
        waits.append(time.perf_counter() - asked)
        time.sleep(period)  # the robot moves
    return time.perf_counter() - began, waits


def print_control(steps: int, period: float, added: list[float], chunk: int) -> None:
    name = "states"
    print(f"{steps} control steps of {1e3 * period:.0f} ms, chunks of {chunk}")
    with served(name, chunk) as url, ActionClient(url, TOKEN) as client:
        seen = observation(name, np.random.default_rng(0))
        for seconds in added:
            delayed, left = Delayed(client, seconds), list[np.ndarray]()

            def in_turn(delayed: Delayed = delayed, left: list[np.ndarray] = left) -> None:
                if not left:
                    left.extend(delayed.infer(seen)["actions"])
                left.pop(0)

            slow, waits = control(in_turn, steps, period)
            with RealTimeChunks(delayed) as chunks:
                fast, real = control(lambda chunks=chunks: chunks.act(seen), steps, period)
            print(
                f"added {1e3 * seconds:.0f} ms: waited in turn {sum(waits):.2f} s, at most "
                f"{1e3 * max(waits[1:]):.1f} ms; in real time {sum(real):.2f} s, after the first "
                f"chunk at most {1e3 * max(real[1:]):.1f} ms; time ratio {fast / slow:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200, help="control steps")
    parser.add_argument("--period", type=float, default=0.02, help="seconds of a control step")
    parser.add_argument("--added", type=float, nargs="*", default=[0.0, 0.05, 0.1, 0.2],
                        help="seconds added to each answer")  # fmt: skip
    parser.add_argument("--chunk", type=int, default=16)
    given = parser.parse_args()
    print_round_trips(given.requests)
    print_control(given.steps, given.period, given.added, given.chunk)


if __name__ == "__main__":
    main()
