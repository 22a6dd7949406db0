"""Vision-language-action policies beside the bare passes of their networks, in one run.

``OMP_NUM_THREADS=1 python benchmarks/vla.py`` takes turns between the two of each pair and prints
the median of their processor times and of the ratios of neighbouring turns:

- *act* and *evaluate* of each model without values, beside the passes of its network that they
  take, given the same tensors: what remains are pixels, prompts, units, draws and log-probs.
- what both take where these passes are answered from memory, as the least of all turns, which other
  work on the machine disturbs little: that part alone.
- *evaluate* of a chain of four random denoising steps, beside one that reads pictures and prompt
  again at each step.
- pictures into pixels, beside torch's own resize of the same pictures.
- what training an adapter sends, beside the numbers of the adapter.

Models are of the preset ``tiny``, or of ``--path MODEL=DIRECTORY``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.config.component import Component
from rlinf.envs.spec import EnvSpec
from rlinf.models.adapters import adapt_policy
from rlinf.models.config import REGISTRY
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy import Policy, draw_noise
from rlinf.models.policy_weights import travelling
from rlinf.models.vla.preprocessing import square_pixels
from rlinf.processes.allocator import keep_freed_memory

MODELS: dict[str, dict[str, Any]] = {
    "openvla": {"num_action_chunks": 1},
    "openvla_oft": {"num_action_chunks": 8},
    "qwen_vl": {"num_action_chunks": 1},
    **{
        name: {"num_action_chunks": 8, "random_steps": "all", "denoising_steps": 4}
        for name in ("pi0", "pi05", "smolvla", "gr00t", "wall_oss")
    },
}
SPEC = EnvSpec(
    observation_shapes={"states": (8,), "main_images": (64, 64, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8"},
    action_kind="continuous",
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    task_descriptions=("push the drawer shut",),
    max_episode_steps=100,
)


def observations(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (rows, *SPEC.observation_shapes["main_images"])
    return {
        "states": torch.randn(rows, *SPEC.observation_shapes["states"], generator=generator),
        "main_images": torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),
    }


def build(name: str, path: Path | None) -> Policy:
    source = {"preset": "tiny"} if path is None else {"path": path}
    section: Any = Component(REGISTRY).section({"type": name, **source, **MODELS[name]})
    policy: Policy = section.build(SPEC, value_dim=0, seed=0).eval()
    return policy


# -- the bare passes ----------------------------------------------------------------------------

PASSES = ("prefix", "denoise", "prompt", "embed", "causal", "at_once", "action_logits")


@dataclass(frozen=True)
class Call:
    """A pass that was taken, with what it was given, and what it gave."""

    name: str
    method: Callable[..., Any]
    given: tuple[Any, ...]
    named: dict[str, Any]
    result: Any


def passes(policy: Any, work: Callable[[], Any]) -> list[Call]:
    """The passes of its network that some work of a policy takes."""
    network, found, inside = policy.network, list[Call](), False

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def record(*given: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*given, **named)
            inside = True
            result = method(*given, **named)
            inside = False
            found.append(Call(name, method, given, named, result))
            return result

        return record

    names = [name for name in PASSES if hasattr(network, name)]
    for name in names:
        setattr(network, name, recording(name, getattr(network, name)))
    work()
    for name in names:
        delattr(network, name)
    return found


def again(policy: Any, calls: list[Call]) -> None:
    """These passes once more; what a cache held is read anew."""
    cache = policy.network.new_cache() if any("cache" in each.named for each in calls) else None
    for each in calls:
        fresh = {"cache": cache} if "cache" in each.named else {}
        each.method(*each.given, **(each.named | fresh))


def answered(policy: Any, work: Callable[[], Any], calls: list[Call], turns: int) -> float:
    """Least seconds of the work where its passes are answered from memory."""
    answers, names = cycle(calls), {each.name for each in calls}
    for name in names:
        setattr(policy.network, name, lambda *_, **__: next(answers).result)
    found = []
    for _ in range(turns + 1):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    for name in names:
        delattr(policy.network, name)
    return min(found[1:])


def unshared(calls: list[Call]) -> list[Call]:
    """Passes that read pictures and prompt before each denoising step."""
    first, *steps = calls
    return [call for step in steps for call in (first, step)]


# -- turns --------------------------------------------------------------------------------------


def in_turns(first: Callable[[], Any], second: Callable[[], Any], turns: int) -> tuple[float, ...]:
    """Median seconds of both, and the median of the ratios of neighbouring turns."""
    times: list[tuple[float, float]] = []
    for _ in range(turns + 1):
        pair = []
        for call in (first, second):
            begun = time.process_time()
            call()
            pair.append(time.process_time() - begun)
        times.append((pair[0], pair[1]))
    del times[0]
    ones, others = zip(*times, strict=True)
    ratio = statistics.median(one / other for one, other in times)
    return statistics.median(ones), statistics.median(others), ratio


def rows_of(name: str, policy: Policy, rows: int, turns: int) -> Iterator[tuple[str, str]]:
    seen = observations(rows)
    noise = draw_noise(policy.noise, (rows,), torch.Generator().manual_seed(1))
    with torch.inference_mode():
        inputs = seen | policy.sample(seen, noise).forward_inputs
        works: dict[str, Callable[[], Any]] = {
            "act": lambda: policy.sample(seen, noise),
            "evaluate": lambda: policy.evaluate_actions(inputs),
        }
        for title, work in works.items():
            calls = passes(policy, work)
            mine, its, ratio = in_turns(work, partial(again, policy, calls), turns)
            yield (
                f"{name}: {title}, {rows} rows, beside the bare network",
                f"{mine * 1e3:8.2f} ms {its * 1e3:8.2f} ms   ratio {ratio:.3f}",
            )
            own = answered(policy, work, calls, 4 * turns)
            yield (
                f"{name}: {title} alone, passes answered from memory",
                f"{own * 1e3:8.2f} ms {its * 1e3:8.2f} ms   part {own / its:.3f}",
            )
        if hasattr(policy.network, "prefix"):
            mine, its, ratio = in_turns(work, partial(again, policy, unshared(calls)), turns)
            yield (
                f"{name}: evaluate, prefix read again at each of {len(calls) - 1} steps",
                f"{mine * 1e3:8.2f} ms {its * 1e3:8.2f} ms   {1 / ratio:.2f} × as fast",
            )


def pixels_rows(rows: int, turns: int) -> Iterator[tuple[str, str]]:
    for height, width, side in ((480, 640, 224), (256, 256, 224), (64, 64, 64)):
        pictures = torch.randint(0, 256, (rows, height, width, 3), dtype=torch.uint8)
        ratio = max(height, width) / side
        size = (int(height / ratio), int(width / ratio))

        def resize(given: Tensor = pictures, size: tuple[int, int] = size) -> Tensor:
            planes = given.permute(0, 3, 1, 2).float()
            return functional.interpolate(planes, size=size, mode="bilinear")

        mine, its, compared = in_turns(partial(square_pixels, pictures, side), resize, turns)
        yield (
            f"pixels: {height} x {width} to {side}, beside torch's resize",
            f"{mine * 1e3:8.2f} ms {its * 1e3:8.2f} ms   ratio {compared:.3f}",
        )


def adapter_rows(name: str, policy: Policy) -> Iterator[tuple[str, str]]:
    adapt_policy(policy, AdapterConfig(rank=8), seed=0)
    sent = travelling(policy)
    values = {id(parameter) for parameter in policy.trained_beside_adapters()}
    kept = {key: each for key, each in sent.items() if id(each) not in values}
    adapter = sum(t.nbytes for key, t in kept.items() if key.endswith(("lora_A", "lora_B")))
    total = sum(tensor.nbytes for tensor in kept.values())
    whole = sum(parameter.nbytes for parameter in policy.parameters())
    yield (
        f"{name}: bytes sent for an adapter of rank 8, beside the adapter's",
        f"{total:,} {adapter:,}   ratio {total / adapter:.3f}; all weights {whole:,}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--path", nargs="*", default=[], metavar="MODEL=DIRECTORY")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    paths = {name: Path(place) for name, _, place in (p.partition("=") for p in arguments.path)}
    print(f"{'':60s} ours        beside it")
    for name in arguments.models:
        policy = build(name, paths.get(name))
        for title, figures in rows_of(name, policy, arguments.rows, arguments.turns):
            print(f"{title:60s} {figures}", flush=True)
        for title, figures in adapter_rows(name, policy):
            print(f"{title:60s} {figures}", flush=True)
    for title, figures in pixels_rows(arguments.rows, arguments.turns):
        print(f"{title:60s} {figures}", flush=True)


if __name__ == "__main__":
    main()
