"""Live rescaling: what a move of the trainer takes, what a run gains by it, and at scale.

    python benchmarks/rescale.py move       # 50 M parameters between 1 and 2 ranks

``move`` prints the seconds of a move between one and two processes beside a copy of the same bytes
within a process. One thread per process (``OMP_NUM_THREADS=1``) is set unless given.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from typing import Any

import torch

from rlinf.algorithms.tokens.registry import REGISTRY
from rlinf.trainers.language.company import Company
from rlinf.trainers.language.config import FSDPTrainerConfig
from rlinf.trainers.language.parallel import Ranks


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
    algorithm = REGISTRY.load("grpo").model_validate({"type": "grpo"}).build()
    trainer = FSDPTrainerConfig().build(model, algorithm, ranks=Ranks(), total_steps=1, seed=0)
    return trainer, sum(parameter.numel() for parameter in model.parameters())


def _rank(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    company = Company(rank, 2, rendezvous=f"tcp://127.0.0.1:{port}", timeout_s=120)
    trainer, parameters = _trainer(arguments.hidden, arguments.layers)
    trainer.make_movable(keep=rank == 0)
    reports = []
    for _ in range(arguments.repeats):
        reports.append((company.move(trainer, 1, 2), company.move(trainer, 2, 1)))
    if rank == 0:
        results.put((parameters, reports))
    company.close()


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
            f"{seconds / copied:.1f} times a copy of all bytes ({copied:.3f} s)",
            flush=True,
        )
        found[name] = {"seconds": seconds, "prepared": made, "transferred": travelled}
    return found


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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = arguments.run(arguments)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
