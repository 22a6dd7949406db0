"""Every benchmark program at its smallest size: that it runs, and prints figures and their ratio.

What the figures are depends on the machine; that ratios are those of the figures beside them does
not.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlinf.cli.health.rendering import interpreter_with
from rlinf.envs.installation import State, status

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks"
N = r"\s*(-?[\d.,]+(?:e[-+]?\d+)?|inf|nan)"
"""A number, after spaces."""
TINY_RUN = (
    "env.num_envs=2", "rollout.steps=32", "model.hidden_sizes=[16]", "actor.global_batch_size=16",
    "actor.micro_batch_size=16", "evaluation.episodes=2", "evaluation.periodic_episodes=2",
    "evaluation.num_envs=2", "evaluation.stop_at_success=null", "evaluation.video_episodes=0",
)  # fmt: skip
"""Overrides of the quickstart recipe."""
SMALL = ("--hidden", "32", "--layers", "1")


def printed(program: str, *words: str, directory: Path = ROOT) -> str:
    """What a program prints; a failure shows what it said."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *words], capture_output=True, text=True,
        check=False, cwd=directory, env={"OMP_NUM_THREADS": "1", **os.environ},
    )  # fmt: skip
    assert done.returncode == 0, f"{program} {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers of the first line that has a pattern; ``#`` stands for a number."""
    found = re.search(pattern.replace("#", N), text)
    assert found, f"no line like {pattern!r} in:\n{text}"
    return [float(number.replace(",", "")) for number in found.groups()]


def positive(pattern: str, text: str) -> list[float]:
    """The same, all above 0 and finite."""
    found = numbers(pattern, text)
    assert all(0 < number < math.inf for number in found), f"{pattern!r}: {found}"
    return found


def assert_ratio(ratio: float, one: float, other: float, *, digits: float = 0.02) -> None:
    """Whether it is what two printed figures have, as far as they were rounded."""
    assert ratio == pytest.approx(one / other, rel=0.05, abs=digits)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package}, the peer of this benchmark, is not installed")


def test_every_program_is_run_here() -> None:
    named = set(re.findall(r'printed\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    programs = {
        path.name for path in PROGRAMS.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    assert named == programs


# -- robots -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peer", [False, True])
def test_embodied_throughput(peer: bool, tmp_path: Path) -> None:
    if peer:
        needs("stable_baselines3")
    file = tmp_path / "figures.json"
    words = (
        "throughput",
        *([] if peer else ["--no-peer"]),
        "--seconds",
        "0.5",
        "--json",
        str(file),
    )
    text = printed("embodied.py", *words, *TINY_RUN)
    (ceiling,) = positive("simulator ceiling #", text)
    (rollout,) = positive("rollout  #", text)
    (ratio,) = positive("rollout / ceiling #", text)
    assert_ratio(ratio, rollout, ceiling)
    for line in ("whole training #", "end of first step #", "commit blocks, of a step #"):
        positive(line, text)
    assert json.loads(file.read_text())["ceiling"] == pytest.approx(ceiling, abs=1)
    if peer:
        (training,) = positive("whole training #", text)
        (theirs,) = positive("Stable-Baselines3 #", text)
        assert_ratio(positive("training / SB3 #", text)[0], training, theirs)


@pytest.mark.slow
def test_embodied_learning(tmp_path: Path) -> None:
    needs("stable_baselines3")
    text = printed(
        "embodied.py", "learning", "--seeds", "1", "--sb3-vector", "dummy",
        "--json", str(tmp_path / "figures.json"), *TINY_RUN, "runner.total_env_steps=128",
    )  # fmt: skip
    for side in ("ours", "sb3 same", "sb3 default"):
        assert numbers(rf"seed 0  {side} +# s +# env steps", text)[1] >= 128
    numbers("ours / best of Stable-Baselines3: #", text)


@pytest.mark.slow
def test_recipe(tmp_path: Path) -> None:
    text = printed(
        "recipe.py", "quickstart", "--seeds", "2", "--level", "0", "--picture",
        str(tmp_path / "curves.png"), "--beside", "rollout.max_staleness=1",
        "--", *TINY_RUN, "runner.total_env_steps=128", "evaluation.interval=1",
    )  # fmt: skip
    assert text.count("2 of 2 seeds reach 0.0") == 2
    for seed in (0, 1):
        rate, low, high, steps, _ = numbers(
            rf"\| {seed} \|  \| # \(# to #\) \| # \| # \|", text
        )  # held-out success with its interval
        assert 0 <= low <= rate <= high <= 1
        assert steps == 128
    theirs, ours, ratio = positive("steps per second: # beside #: # x", text)
    assert_ratio(ratio, theirs, ours, digits=0.05)
    assert (tmp_path / "curves.png").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "what"),
    [("quickstart", "observation"), ("embodied/drawer_close_pictures_ppo", "picture")],
)
def test_frozen_observation(recipe: str, what: str, tmp_path: Path) -> None:
    from rlinf.cli.main import main

    run = tmp_path / "run"
    words = ["train", recipe, *TINY_RUN, "rollout.steps=40", "runner.total_env_steps=160"]
    assert main([*words, "--run-dir", str(run)]) == 0
    given = ["--pictures"] if what == "picture" else []
    text = printed("frozen_observation.py", str(run), "--episodes", "2", *given)
    found = numbers(rf"success #, with one {what} for all #, ratio # \(n = #\)", text)
    seeing, unseeing, _, episodes = found
    assert {seeing, unseeing} <= {0.0, 0.5, 1.0}
    assert episodes == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pictures", "own_envs"), [(False, "1"), (False, "2"), (True, "1"), (True, "2")]
)
def test_simulators(pictures: bool, own_envs: str) -> None:
    """Those of this machine, of which MetaWorld needs no environment of its own."""
    given = ("--seconds", "0.3", "--turns", "1", "--envs", "2", "--own-envs", own_envs)
    names = ("metaworld", "dm_control", "panda_gym", "xarm", "pusht", "gymnasium_robotics")
    if pictures:
        names = ("metaworld", "dm_control")
    ready = [name for name in names if status(name).state is State.READY]
    if not ready:
        pytest.skip("no simulator is installed: rlinf env install NAME")
    text = printed("simulators.py", *names, *given, *(["--pictures"] if pictures else []))
    for name in ready:
        line = rf"{name} +own # steps/s  ours #  ratio # by the clock, # by CPU time;  2 envs ready"
        own, ours, clock, _ = positive(line, text)
        assert_ratio(clock, ours, own)
    for name in set(names) - set(ready):
        assert re.search(rf"^{name} +(?!own)\S", text, re.MULTILINE)


@pytest.mark.slow
def test_simulators_beside_a_vector_env() -> None:
    text = printed("simulators.py", "--vector", "--seconds", "0.5")
    ours, theirs, ratio = positive("ours # steps/s, AsyncVectorEnv #, ratio #", text)
    assert_ratio(ratio, ours, theirs)


@pytest.mark.slow
def test_starts_of_env_processes() -> None:
    text = printed("starts.py", "--processes", "2", "--turns", "1")
    cart = text.partition("MetaWorld")[0]
    forks = positive(r"  forks: first start # s, second # s, # MiB each", cart)
    for way in ("interpreters", "AsyncVectorEnv"):
        found = positive(
            rf"  {way}: first start # s, second # s, # MiB each; # and # of forks, memory #", cart
        )
        for value, ratio, other in zip(found[:3], found[3:], forks, strict=True):
            assert_ratio(ratio, value, other, digits=0.2)
    positive(r"  interpreters: first start # s", text.partition("MetaWorld")[2])


@pytest.mark.slow
def test_states() -> None:
    text = printed("states.py", "metaworld", "--steps", "10", "--turns", "1")
    pattern = r"metaworld: # s by its state \(# kB\), # s by 10 actions, # x"
    by_state, _, by_actions, ratio = positive(pattern, text)
    assert_ratio(ratio, by_actions, by_state, digits=0.06)


@pytest.mark.slow
def test_renderers() -> None:
    packages = [name for name in ("mujoco", "sapien", "pybullet") if interpreter_with(name)]
    if not packages:
        pytest.skip("no package that draws is installed: rlinf env install NAME")
    text = printed("renderers.py", "--sizes", "32", "--seconds", "0.1", "--turns", "1")
    for package in packages:
        assert (
            len(re.findall(rf"^{package} .* 32  (?:with shadows|without)", text, re.MULTILINE)) > 1
        )
    positive("# frames/s, # per CPU second", text)


# -- language models ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peer", [False, True])
def test_reasoning(peer: bool, tmp_path: Path) -> None:
    if peer:
        needs("trl")
    more = [] if peer else ["--no-peer"]
    text = printed(
        "reasoning.py", *more, "--threads", "1", *SMALL, "--steps", "1", "--lengths", "fixed",
        "--json", str(tmp_path / "figures.json"),
    )  # fmt: skip
    ours, tokens = positive("ours # s # tokens per completion", text)
    floor, ratio = positive("floor # s  ours / floor #", text)
    assert tokens == 64
    assert_ratio(ratio, ours, floor, digits=0.2)
    if peer:
        theirs, tokens, _ = positive("TRL # s # tokens per completion, # threads", text)
        assert tokens == 64
        assert_ratio(positive("ours / TRL #", text)[0], theirs, ours, digits=0.5)


@pytest.mark.slow
def test_engines() -> None:
    text = printed(
        "engines.py", *SMALL, "--sequences", "8", "--batch", "4", "--group", "2",
        "--mean-length", "8", "--rounds", "1",
    )  # fmt: skip
    rates = {}
    for name in ("generate", "generate, sorted", "hf", "hf, deterministic"):
        rate, _, _, ratio = positive(rf"{name} +# tokens/s  \(rounds #-# s\) # × generate", text)
        rates[name] = rate
        assert_ratio(ratio, rate, rates["generate"])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_weight_sync(runtime: str) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    text = printed("weight_sync.py", "--runtime", runtime, "--megabytes", "8", "--rounds", "1")
    (copied,) = positive("memcpy # GB/s", text)
    ways = ["shared_memory, copy", "shared_memory, view", "bucket 64 MiB", "bucket 8 MiB", "patch"]
    for way in [*ways, "reference" if runtime == "local" else "bucket, gloo"]:
        rate, ratio = positive(rf"{way} +# GB/s  x# of memcpy", text)
        assert_ratio(ratio, rate, copied)
    megabytes, density, fewer = positive("# MB at density #: #x fewer bytes", text)
    assert density <= 0.02
    assert fewer * megabytes == pytest.approx(positive("# MB of float32", text)[0], rel=0.05)


@pytest.mark.slow
def test_rescale() -> None:
    pytest.importorskip("ray")
    moved = printed("rescale.py", "move", *SMALL, "--repeats", "1")
    for way in ("1 to 2", "2 to 1"):
        seconds, times, copied = positive(
            rf"{way}: # s \(.*\), # times a copy of all bytes \(# s\)", moved
        )
        assert_ratio(times, seconds, copied, digits=times)
    stepped = printed(
        "rescale.py", "modes", *SMALL, "--prompts", "8", "--group", "2", "--longest", "16",
        "--batches", "2", "--steps", "2", "--modes", "disaggregated",
    )  # fmt: skip
    seconds = {
        mode: positive(rf"{mode} +# s per step", stepped)[0]
        for mode in ("collocated", "disaggregated", "rescaled")
    }
    best = min(("collocated", "disaggregated"), key=lambda mode: seconds[mode])
    (less,) = numbers("rescaled takes # % less than", stepped)
    ratio = seconds["rescaled"] / seconds[best]  # of figures that are rounded
    assert less / 100 == pytest.approx(1 - ratio, abs=0.02 * (1 + ratio))
    assert numbers("largest relative difference of metrics: #", stepped)[0] < 1e-3
    simulated = printed(
        "rescale.py", "simulate", "--devices", "8", "--sequences", "256", "--seeds", "1"
    )
    positive(r"rescaled # s, # x the best static placement \(.*\), # x taking turns", simulated)


# -- both ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory() -> None:
    text = printed("memory.py", "quickstart", *TINY_RUN, "runner.total_env_steps=128")
    found = json.loads(text)
    assert found["ratio"] == pytest.approx(found["preflight_mib"] / found["run_mib"], abs=0.02)
    assert 0.2 < found["ratio"] < 5


@pytest.mark.slow
def test_scheduler() -> None:
    pytest.importorskip("ray")
    text = printed("scheduler.py", "--count", "100", "--rounds", "1")
    for name in (
        "group call of one worker", "first contact of a pair", "channel ping-pong p50",
        "stream of 64 MB tensors", "four workers up",
    ):  # fmt: skip
        ours, peer, ratio = positive(rf"{name} +# \S+ +[\w. ]+: +#  x#", text)
        assert_ratio(ratio, ours, peer)


@pytest.mark.slow
def test_trees(tmp_path: Path) -> None:
    """Beside a checkout that is this one."""
    if not (ROOT / ".venv").is_dir():
        pytest.skip("this checkout has no environment of its own: make .venv/.dev")
    for name in (".venv", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    more = (f"--override={word}" for word in (*TINY_RUN, "runner.total_env_steps=256"))
    text = printed("trees.py", str(tmp_path), "--recipe", "quickstart", "--rounds", "1", *more)
    positive("this checkout # s a step, the other # s", text)
    positive("ratio #", text)
    here, there = numbers("actor/policy_loss: # here, # there", text)
    assert here == there
    text = printed(
        "trees.py", str(tmp_path), "--rounds", "1", "--program",
        "engines.py --hidden 32 --layers 1 --sequences 4 --batch 2 --group 2 --mean-length 8 "
        "--rounds 1",
    )  # fmt: skip
    # Of each line the text is printed with # for its numbers, and below it what differs.
    ours, theirs, ratio = positive(r"hf \x23 tokens/s .*\n +# +# +#", text)
    assert_ratio(ratio, ours, theirs)


@pytest.mark.slow
def test_serving() -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("websockets")
    text = printed(
        "serving.py", "--requests", "20", "--steps", "20", "--period", "0.005",
        "--added", "0", "0.01",
    )  # fmt: skip
    for name in ("states", "one picture"):
        whole, act, ratio = positive(
            rf"{name}: round trip # / .*; act # / .*; round trip / act #", text
        )
        assert_ratio(ratio, whole, act)
        many, one, ratio = positive(rf"{name}: 4 clients # answers/s, one #: ratio #", text)
        assert_ratio(ratio, many, one)
    positive("added 10 ms: waited in turn # s, .* time ratio #", text)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["chunks", "rendering", "reasoning"])
def test_modes(workload: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "figures.json"
    text = printed("modes.py", workload, "--small", "--steps", "4", "--rounds", "1", "--json",
                   str(file))  # fmt: skip
    for mode, row in json.loads(file.read_text())[workload]["modes"].items():
        seconds, speed = positive(rf"  {mode} +# s ± [\d.]+ +# x", text)
        assert seconds == pytest.approx(row["seconds"], abs=1e-3)
        assert speed == pytest.approx(row["speed"], abs=0.01)
    positive("limit: two sequential at once # x", text)
    numbers("median absolute error, temporal, simulated: # %", text)


@pytest.mark.slow
def test_simulation() -> None:
    text = printed("simulation.py", "--scenario", "math-1.5b", "--steps", "2")
    assert "SIMULATED, not measured: math-1.5b" in text
    positive("planned and simulated in # s", text)


# -- vision-language-action models ----------------------------------------------------------------


@pytest.mark.slow
def test_vla() -> None:
    text = printed("vla.py", "--rows", "2", "--turns", "1")
    names = "openvla openvla_oft qwen_vl pi0 pi05 smolvla gr00t wall_oss"
    for model in names.split():
        for what in ("act", "evaluate"):
            line = f"{model}: {what}, 2 rows, beside the bare network # ms # ms   ratio #"
            mine, its, ratio = positive(line, text)
            assert_ratio(ratio, mine, its)
            own, its, part = positive(f"{model}: {what} alone, .* # ms # ms   part #", text)
            assert_ratio(part, own, its)
        sent, adapter, ratio, _ = positive(
            f"{model}: bytes sent .* beside the adapter's # #   ratio #; all weights #", text
        )
        assert_ratio(ratio, sent, adapter)
    for model in ("pi0", "pi05", "smolvla", "gr00t", "wall_oss"):
        positive(f"{model}: evaluate, prefix read again .* # ms # ms   # × as fast", text)
    mine, its, ratio = positive("pixels: 480 x 640 to 224, .* # ms # ms   ratio #", text)
    assert_ratio(ratio, mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["pi0", "act", "diffusion"])
def test_vla_training(model: str) -> None:
    """Ours beside ours: lerobot cannot be installed where this project is."""
    text = printed("vla_training.py", "--side", "ours", "--model", model, "--steps", "2")
    of_clock, of_processor, trained = positive("# # #", text)
    assert of_clock > 0
    assert of_processor > 0
    assert trained > 1e5
    theirs = os.environ.get("RLINF_LEROBOT")
    if not theirs:
        pytest.skip("RLINF_LEROBOT is not set: no lerobot to stand beside")
    text = printed(
        "vla_training.py", "--lerobot", theirs, "--model", model, "--steps", "2", "--turns", "1"
    )
    ours, its, ratio = positive("median: rlinf #, lerobot # steps/s; ratio #", text)
    assert_ratio(ratio, ours, its)
