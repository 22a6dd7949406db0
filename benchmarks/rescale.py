"""Live rescaling: what a move of the trainer takes, what a run gains by it, and at scale.

    python benchmarks/rescale.py move       # 50 M parameters between 1 and 2 ranks
    python benchmarks/rescale.py modes      # whole steps beside static placements, 2 CPU slots
    python benchmarks/rescale.py modes --modes again --fixed 64   # where nothing is worth a move
    python benchmarks/rescale.py modes --kinds 61:48 3:1000 --longest 2000   # longer tails
    python benchmarks/rescale.py simulate   # 64 and 128 devices, published lengths

``move`` prints the seconds of a move between one and two processes beside a copy of the same bytes
within a process. ``modes`` runs the same recipe, on ``ray``, collocated, disaggregated and with
``cluster.auto_scheduler``: heavy-tailed lengths, global batches by length. Lengths are geometric,
as an answer of random weights ends at each token with about one chance in ``--vocabulary``, cut at
``--longest``; or with ``--kinds`` a mixture of such, here 61 prompts with answers of 48 tokens on
average and 3 with 1000. The modes take turns step by step, and step i has the same lengths in all
of them; the mode ``again`` is collocated once more, and shows how unlike equal modes come out.
``simulate`` lets the same choices act on the scenario ``math-1.5b`` of the simulator; the
static placement beside it is the best of all divisions, simulated on the same lengths. One thread
per process (``OMP_NUM_THREADS=1``) is set unless given.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import signal
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answer_lengths import write_kinds, write_prompts_of_kinds
from reasoning import write_model, write_prompts
from rescale_simulation import Setting, best_static, play
from scenarios import find_scenario
from suspension import resume, suspend

from rlinf.algorithms.base_config import REGISTRY
from rlinf.data.prompts.loader import PromptLoader
from rlinf.models.language import load_tokenizer
from rlinf.rescale.joining_ranks import JoiningRanks
from rlinf.rescale.movable_trainer import MovableTrainer
from rlinf.runners.groups import Groups
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.trainers.config import FSDPTrainerConfig
from rlinf.trainers.ranks import Ranks


def _trainer(hidden: int, layers: int) -> Any:
    """A trainer of a Qwen2 of random weights, and its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=8192,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=4 * hidden,
        )
    )
    algorithm = REGISTRY.load("grpo").model_validate({"type": "grpo"}).build(family="tokens")
    trainer = FSDPTrainerConfig().build(model, algorithm, ranks=Ranks(), total_steps=1, seed=0)
    return trainer, sum(parameter.numel() for parameter in model.parameters())


def _rank(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    library: Any = torch.distributed
    store = library.TCPStore("127.0.0.1", port, is_master=rank == 0)
    ranks = JoiningRanks(rank, 2, store=store, timeout_s=120)
    built, parameters = _trainer(arguments.hidden, arguments.layers)
    trainer = MovableTrainer(built, keep=rank == 0)
    reports = []
    for _ in range(arguments.repeats):
        reports.append((ranks.move(trainer, 1, 2), ranks.move(trainer, 2, 1)))
    if rank == 0:
        results.put((parameters, reports))
    ranks.close()


def _copy_seconds(count: int) -> float:
    """Best time of a copy of so many float32 numbers."""
    source, target = torch.ones(count), torch.zeros(count)
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - begin)
    return min(found)


def move(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of moves from one rank to two and back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, port, arguments, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    parameters, reports = results.get(timeout=300)
    for process in ranks:
        process.join()
    copied = _copy_seconds(3 * parameters)
    print(f"{parameters / 1e6:.1f} M parameters with two moments, {12 * parameters / 1e6:.0f} MB")
    found: dict[str, Any] = {"parameters": parameters, "copy_seconds": copied}
    for name, column in (("1 to 2", 0), ("2 to 1", 1)):
        chosen = [pair[column] for pair in reports]
        seconds = statistics.median(report.seconds for report in chosen)
        made = statistics.median(report.prepared for report in chosen)
        travelled = statistics.median(report.transferred for report in chosen)
        print(
            f"{name}: {seconds:.3f} s ({made:.3f} s groups and layout, {travelled:.3f} s transfer; "
            f"slowest {max(report.seconds for report in chosen):.3f} s), "
            f"{seconds / copied:.1f} times a copy of all bytes ({copied:.6f} s)",
            flush=True,
        )
        found[name] = {"seconds": seconds, "prepared": made, "transferred": travelled}
    return found


PLACED = {
    "collocated": {"rollout,actor": "0-1", "reward": "0"},
    # The reward shares the rollout's slot: on the actor's it would keep that from beginning early.
    "disaggregated": {"rollout,reward": "0", "actor": "1"},
    "rollout on both": {"rollout": "0-1", "actor": "1", "reward": "0"},
    "rescaled": {"rollout,actor": "0-1", "reward": "0"},
}
CONTROL = "again"
"""Collocated a second time: what differs between these two is the machine's doing."""
PLACED[CONTROL] = PLACED["collocated"]


def _recipe(model: Any, prompts: Path, mode: str, arguments: argparse.Namespace) -> ReasoningConfig:
    sampling = {"max_new_tokens": arguments.longest}
    if arguments.fixed:
        sampling = {"max_new_tokens": arguments.fixed, "min_new_tokens": arguments.fixed}
    data = {
        "task": "reasoning",
        "runner": {"total_steps": 1000},
        "data": {"files": {"train": [str(prompts)]}, "shuffle": not arguments.kinds},
        "model": {"path": str(model.path)},
        "rollout": {
            "prompts": arguments.prompts,
            "group_size": arguments.group,
            "sampling": sampling,
            "engine": {"type": "hf", "max_running_requests": arguments.running},
        },
        "reward": {
            "processes": 1,
            "functions": {
                "length": {
                    "type": "length",
                    "max_length": arguments.longest,
                    # Every token counts: otherwise most groups would have equal rewards, and no
                    # gradient that could differ between the modes.
                    "cache_length": arguments.longest,
                }
            },
        },
        "algorithm": {"type": "grpo"},
        "actor": {
            "type": "fsdp",
            "optim": {"lr": 1e-7},  # lengths are to stay as they are
            "n_minibatches": arguments.batches,
            "shuffle": False,
            "order": "length",
            "max_tokens_per_micro_batch": 2048,
        },
        "cluster": {
            "runtime": "ray",
            "cpu_devices_per_node": 2,
            "component_placement": PLACED[mode],
            "auto_scheduler": mode == "rescaled",
        },
    }
    return ReasoningConfig.model_validate(data)


def _serve(config: ReasoningConfig, link: Any) -> None:
    """Take a step whenever asked to; answers seconds, metrics and what was decided."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(config.model)
    loader = PromptLoader(config.data.build(tokenizer).train, shuffle=config.data.shuffle)
    wanted = config.rollout.prompts
    with (
        tempfile.TemporaryDirectory() as directory,
        Groups(Reasoning(config, Path(directory))) as groups,
    ):
        while (step := _next_step(link)) is not None:
            drawn = {"rollout": {"positions": wanted, "prompts": loader.take(wanted)}}
            begin = time.perf_counter()
            report = groups.start_step(step, synchronise=True, draw=partial(dict, drawn)).wait()
            seconds = time.perf_counter() - begin
            found = dict(report.results("actor")[0])
            made = found.pop("choices", [])
            generated = report.results("rollout")
            made = [choice for part in generated for choice in part.choices] + made
            found["tokens"] = sum(part.tokens for part in generated)
            found["rollout"] = report.seconds("rollout")
            link.send((seconds, found, made))


def _next_step(link: Any) -> int | None:
    """Number of the step that is asked for; None: no more."""
    try:
        return int(link.recv())
    except EOFError:
        return None


def _take_turns(configs: dict[str, ReasoningConfig], steps: int) -> dict[str, dict[str, list[Any]]]:
    """Every step under each mode in turn, so that all meet the same state of the machine.

    Each mode runs in a process of its own; the others are stopped meanwhile. The first two steps
    warm up and give rescaling its times. A mode that fails says why, and ends the others.
    """
    context = multiprocessing.get_context("spawn")
    links, processes = {}, []
    found: dict[str, dict[str, list[Any]]] = {
        mode: {"seconds": [], "metrics": [], "choices": []} for mode in configs
    }
    for mode, config in configs.items():
        links[mode], end = context.Pipe()
        processes.append(context.Process(target=_serve, args=(config, end)))
        processes[-1].start()
        end.close()  # so that the end of the process is seen here
    pids = {mode: int(process.pid or 0) for mode, process in zip(configs, processes, strict=True)}
    try:
        for step in range(steps + 2):
            order = list(configs) if step % 2 else list(reversed(configs))
            for mode in order:
                resume(pids[mode])
                links[mode].send(step)
                answer = links[mode].recv()
                if step:  # before the first ones all are busy with their start
                    suspend(pids[mode])
                if step > 1:
                    for name, value in zip(found[mode], answer, strict=True):
                        found[mode][name].append(value)
    finally:
        for mode, link in links.items():
            resume(pids[mode])
            link.close()  # the end of its steps for a mode
        for process in processes:
            process.join()
    return found


def modes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of a step under every mode."""
    wanted = {"rescaled", "collocated", *arguments.modes}
    with tempfile.TemporaryDirectory() as directory:
        place, prompts = Path(directory) / "model", Path(directory) / "prompts.jsonl"
        size = arguments.hidden, arguments.layers
        if arguments.kinds:
            counts, means = zip(*arguments.kinds, strict=True)
            arguments.prompts = sum(counts)
            model = write_kinds(place, *size, means)
            write_prompts_of_kinds(prompts, arguments.steps + 2, counts)
        else:
            model = write_model(place, *size, arguments.vocabulary)
            write_prompts(prompts, 512)
        chosen = [mode for mode in PLACED if mode in wanted]
        configs = {mode: _recipe(model, prompts, mode, arguments) for mode in chosen}
        found = _take_turns(configs, arguments.steps)
    answers = arguments.prompts * arguments.group
    tokens = statistics.mean(m["tokens"] for m in found["rescaled"]["metrics"])
    print(f"{tokens / answers:.0f} tokens per answer, {answers} answers a step")
    seconds = {mode: statistics.mean(each["seconds"]) for mode, each in found.items()}
    for mode, each in found.items():
        rollout = statistics.mean(m["rollout"] for m in each["metrics"])
        update = statistics.mean(m["time/update"] for m in each["metrics"])
        print(
            f"{mode:16} {seconds[mode]:7.3f} s per step (rollout {rollout:.3f}, update "
            f"{update:.3f}; steps {', '.join(f'{s:.2f}' for s in each['seconds'])})",
            flush=True,
        )
    statics = (mode for mode in seconds if mode not in ("rescaled", CONTROL))
    static = min(statics, key=lambda mode: seconds[mode])
    steps = {mode: each["seconds"] for mode, each in found.items()}
    if CONTROL in steps:
        _compare(CONTROL, steps[CONTROL], "collocated", steps["collocated"])
    pairs = _compare("rescaled", steps["rescaled"], f"{static}, the best", steps[static])
    print(f"largest relative difference of metrics: {_difference(found):.1e}")
    made = [c for step in found["rescaled"]["choices"] for c in step]
    for action in ("release", "resize"):
        of = [c for c in made if c["action"] == action]
        print(f"{action}: {len(of)} times; {of[-1]['reason'] if of else ''}")
    return {"seconds": seconds, "static": static, "pairs": pairs, "choices": made[-8:]}


def _compare(mode: str, own: list[float], beside: str, others: list[float]) -> list[float]:
    """Print how much less the steps of a mode take, in all and step by step; returns the latter."""
    pairs = [1 - mine / other for mine, other in zip(own, others, strict=True)]
    saved = 100 * (1 - sum(own) / sum(others))
    spread = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
    print(
        f"{mode} takes {saved:.1f} % less than {beside}, with a standard error of "
        f"{100 * spread:.1f} %; step by step {100 * statistics.median(pairs):.1f} % (median)"
    )
    return pairs


def _difference(found: dict[str, dict[str, list[Any]]]) -> float:
    """Between the first steps of rescaled and collocated, where neither has rounding to add up."""
    names = ("actor/loss", "actor/grad_norm", "rollout/rewards", "tokens")
    pairs = zip(found["rescaled"]["metrics"], found["collocated"]["metrics"], strict=True)
    return max(
        abs(float(one[name]) - float(other[name])) / max(abs(float(other[name])), 1e-3)
        for one, other in pairs
        for name in names
        if name in one
    )


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulated steps of the published lengths at several sizes."""
    scenario = find_scenario("math-1.5b")
    parts = scenario.components
    trained = [parts[name] for name in ("inference", "actor")]
    # Device-seconds of a sequence, as published for 8 devices and 512 sequences.
    per_sequence = sum(p.seconds * p.devices / p.items for p in trained)
    model = scenario.generation()["rollout"]
    model = model.model_copy(
        update={"lengths": model.lengths.model_copy(update={"sigma": arguments.sigma})}
    )
    found = {}
    for devices in arguments.devices:
        for sequences in arguments.sequences:
            setting = Setting(
                generation=model,
                devices=devices,
                groups=sequences // scenario.group_size,
                group_size=scenario.group_size,
                batches=arguments.batches,
                train_seconds=per_sequence * sequences,
                trainer_sizes=tuple(2**n for n in range(1, devices.bit_length())),
                move_seconds=arguments.move,
            )
            ratios, places, slowest, most = [], [], 0.0, []
            # The recipe with `auto_scheduler` places actor and inference on half of the devices.
            half = devices // 2
            for seed in range(arguments.seeds):
                rng = np.random.default_rng(seed)
                *before, drawn = (
                    model.lengths.draw(rng, setting.groups, setting.group_size) for _ in range(3)
                )
                played = play(setting, drawn, trainer=None, before=before)
                place, static = best_static(setting, drawn)
                turns = play(setting, drawn, trainer=0)
                apart = play(setting, drawn, trainer=half)
                others = (static, turns, apart)
                ratios.append([other.seconds / played.seconds for other in others])
                places.append(place)
                most.append(turns.seconds / turns.rollout_seconds)
                slowest = max(slowest, played.decision_seconds)
            best, turn, published = (
                statistics.mean(column) for column in zip(*ratios, strict=True)
            )
            name = statistics.mode(places)
            print(
                f"{devices} devices, {sequences} sequences: rescaled {played.seconds:.0f} s, "
                f"{best:.2f} x the best static placement ({name}), {turn:.2f} x taking turns, "
                f"{published:.2f} x that of the published recipe ({half} of them train), "
                f"at most {statistics.mean(most):.2f} x if all training were hidden; "
                f"slowest choice {1000 * slowest:.1f} ms",
                flush=True,
            )
            found[f"{devices}/{sequences}"] = {
                "best": best,
                "turns": turn,
                "published": published,
                "static": name,
            }
    return found


def _kind(text: str) -> tuple[int, float]:
    """Number of prompts and mean tokens of their answers."""
    count, _, mean = text.partition(":")
    return int(count), float(mean)


def main() -> None:
    """Measure and print; with ``--json`` the figures are also written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="file for the figures")
    commands = parser.add_subparsers(dest="command", required=True)
    moving = commands.add_parser("move", help="the trainer's move")
    moving.add_argument("--hidden", type=int, default=512)
    moving.add_argument("--layers", type=int, default=11)
    moving.add_argument("--repeats", type=int, default=5)
    moving.set_defaults(run=move)
    whole = commands.add_parser("modes", help="whole steps beside static placements")
    whole.add_argument("--hidden", type=int, default=96)
    whole.add_argument("--layers", type=int, default=4)
    whole.add_argument("--prompts", type=int, default=96)
    whole.add_argument("--group", type=int, default=4)
    whole.add_argument("--longest", type=int, default=448, help="most tokens of an answer")
    whole.add_argument("--vocabulary", type=int, default=64, help="tokens of the model, 64 or more")
    whole.add_argument(
        "--kinds",
        nargs="+",
        type=_kind,
        metavar="PROMPTS:MEAN",
        help="prompts of a step and mean tokens of their answers, in place of --prompts",
    )
    whole.add_argument("--running", type=int, default=512, help="sequences of an engine at once")
    whole.add_argument("--batches", type=int, default=8)
    whole.add_argument("--steps", type=int, default=12, help="measured steps of each mode")
    others = [mode for mode in PLACED if mode not in ("rescaled", "collocated")]
    usual = [mode for mode in others if mode != CONTROL]
    whole.add_argument("--modes", nargs="*", default=usual, choices=others, help="beside")
    whole.add_argument("--fixed", type=int, help="tokens of every answer: nothing is to be moved")
    whole.set_defaults(run=modes)
    at_scale = commands.add_parser("simulate", help="64 and 128 devices")
    at_scale.add_argument("--devices", type=int, nargs="+", default=[64, 128])
    at_scale.add_argument("--sequences", type=int, nargs="+", default=[2048, 4096, 8192])
    at_scale.add_argument("--batches", type=int, default=4, help="optimizer steps of a step")
    at_scale.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of lengths")
    at_scale.add_argument("--move", type=float, default=1.0, help="seconds of a trainer's move")
    at_scale.add_argument("--seeds", type=int, default=3)
    at_scale.set_defaults(run=simulate)
    arguments = parser.parse_args()
    if arguments.command == "modes" and arguments.vocabulary < 64:
        parser.error(f"--vocabulary {arguments.vocabulary}: too few tokens; nearest: 64")
    torch.set_num_threads(1)
    # So that no stopped process outlives this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found = arguments.run(arguments)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
