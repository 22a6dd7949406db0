"""Reasoning steps beside TRL's GRPOTrainer and beside a floor, in one run.

    python benchmarks/reasoning.py                      # heavy-tailed and fixed lengths
    python benchmarks/reasoning.py --lengths heavy --engine vllm
    python benchmarks/reasoning.py --slots 2            # ours collocated on two slots of the cores

All sides train the same Qwen2 of random weights on the same prompts, 8 answers to each, float32,
with AdamW at the same rate. Prompts have 8 to 16 tokens, or as ``--prompt`` says. Logits of random
weights are almost equal, so a completion ends at each token with the probability of the end token:
``heavy`` has geometric lengths of about 64 tokens, cut at 256; ``fixed`` has 64 tokens each. The
floor is a generation by the engine alone plus one forward and backward pass of transformers over
the same number of tokens. TRL has one thread and then as many as there are cores; the better
counts. Ours has one process of rollout and trainer, or with ``--slots`` one of each on every slot.

Needs ``pip install trl==1.16.0``. One thread per process (``OMP_NUM_THREADS=1``) is set unless
given.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import statistics
import string
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.data.prompts.loader import PromptLoader
from rlinf.data.tokenizer import train_tokenizer
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import GenerationRequest, ModelSource
from rlinf.models.language import (
    build_language_model,
    build_network,
    load_tokenizer,
    save_language_model,
)
from rlinf.models.language_config import ArchitectureConfig, LanguageModelConfig
from rlinf.runners.groups import Groups
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig

LETTERS = string.ascii_letters + "0123"
FIXED, LONGEST, CACHE = 64, 256, 200
PROMPTS, GROUP, RATE = 8, 8, 1e-6
WARM = 4  # steps of every side before those measured: the allocator's pools fill during them


def write_model(directory: Path, hidden: int, layers: int, tokens: int = 64) -> LanguageModelConfig:
    """A model of random weights with so many tokens, in the format of transformers."""
    more = "".join(chr(0x4E00 + number) for number in range(tokens - 64))
    tokenizer = train_tokenizer([LETTERS + more], directory)
    architecture = ArchitectureConfig(
        hidden_size=hidden,
        layers=layers,
        intermediate_size=hidden * 8 // 3,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )
    config = LanguageModelConfig(path=directory, architecture=architecture)
    model = build_network(config, seed=0, tokenizer=tokenizer)
    save_language_model(model, directory, tokenizer=tokenizer)
    return LanguageModelConfig(path=directory)


def write_prompts(path: Path, count: int, shortest: int = 8, longest: int = 16) -> list[str]:
    """Prompts of so many letters, which are tokens, as JSON lines."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(shortest, longest + 1, count)
    texts = ["".join(rng.choice(list(LETTERS), size)) for size in sizes]
    path.write_text("".join(json.dumps({"prompt": t, "solutions": "x"}) + "\n" for t in texts))
    return texts


def sampling(lengths: str) -> dict[str, int]:
    """Token limits of a kind of lengths."""
    if lengths == "heavy":
        return {"max_new_tokens": LONGEST}
    return {"max_new_tokens": FIXED, "min_new_tokens": FIXED}


def penalty(length: int) -> float:
    """The reward of both sides: DAPO's penalty of long answers."""
    if length <= LONGEST - CACHE:
        return 0.0
    return max((LONGEST - CACHE - length) / CACHE, -1.0)


def configuration(
    model: LanguageModelConfig, prompts: Path, lengths: str, engine: str, slots: int
) -> ReasoningConfig:
    """Our recipe."""
    cluster: dict[str, Any] = {}
    if slots > 1:
        every = f"0-{slots - 1}"
        cluster = {
            "runtime": "ray",
            "cpu_devices_per_node": slots,
            "component_placement": {"rollout,actor": every, "reward": "0"},
        }
    # A least length is a filter that vLLM's processed log-probs do not know; at temperature 1 the
    # raw ones are the same.
    log_probs = {"log_probs": "raw"} if engine == "vllm" and lengths == "fixed" else {}
    data = {
        "task": "reasoning",
        "runner": {"total_steps": 1000},
        "data": {"files": {"train": [str(prompts)]}},
        "model": {"path": str(model.path)},
        "rollout": {
            "prompts": PROMPTS,
            "group_size": GROUP,
            "sampling": sampling(lengths),
            "engine": {"type": engine, **log_probs},
        },
        "reward": {
            "processes": 1,
            "functions": {
                "length": {"type": "length", "max_length": LONGEST, "cache_length": CACHE}
            },
        },
        "algorithm": {"type": "grpo"},
        "actor": {"type": "fsdp", "optim": {"lr": RATE}},
        "cluster": cluster,
    }
    return ReasoningConfig.model_validate(data)


def ours(config: ReasoningConfig, steps: int) -> dict[str, float]:
    """Median seconds of a step, start-up seconds and tokens of a completion."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(config.model)
    loader = PromptLoader(config.data.build(tokenizer).train)
    seconds, tokens = [], 0
    with (
        tempfile.TemporaryDirectory() as directory,
        Groups(Reasoning(config, Path(directory))) as groups,
    ):
        for step in range(WARM + steps):
            step_begin = time.perf_counter()
            prompts = {"rollout": {"positions": PROMPTS, "prompts": loader.take(PROMPTS)}}
            report = groups.start_step(step, synchronise=True, draw=partial(dict, prompts)).wait()
            if step == 0:
                start = time.perf_counter() - begin
            if step >= WARM:
                seconds.append(time.perf_counter() - step_begin)
                tokens += sum(part.tokens for part in report.results("rollout"))
    return {
        "seconds": statistics.median(seconds),
        "start": start,
        "tokens": tokens / (steps * PROMPTS * GROUP),
    }


def floor(config: ReasoningConfig, rounds: int) -> float:
    """Median seconds of a bare generation and a bare forward and backward pass of its tokens."""
    model, tokenizer = build_language_model(config.model, seed=0)
    loader = PromptLoader(config.data.build(tokenizer).train)
    seconds = []
    source = ModelSource(path=config.model.path, module=model, tokenizer=tokenizer)
    with config.rollout.engine.build(source) as engine:
        for number in range(WARM + rounds):
            requests = [
                GenerationRequest(
                    request_id=place + GROUP * position,
                    prompt_tokens=prompt.tokens,
                    seed=number * 1000 + place + GROUP * position,
                    sampling=SamplingConfig(**config.rollout.sampling.model_dump()),
                )
                for position, (_, prompt) in enumerate(loader.take(PROMPTS))
                for place in range(GROUP)
            ]
            begin = time.perf_counter()
            found = engine.generate(requests)
            generated = time.perf_counter() - begin
            rows = [
                np.concatenate([request.prompt_tokens, item.completion.tokens])
                for request, item in zip(requests, found, strict=True)
            ]
            seconds.append(generated + _pass(model, rows))
    return statistics.median(seconds[WARM:])


def _pass(model: Any, rows: list[np.ndarray]) -> float:
    """Seconds of a forward and backward pass, sequences of similar length side by side."""
    rows = sorted(rows, key=len)
    begin = time.perf_counter()
    for first in range(0, len(rows), 8):
        part = rows[first : first + 8]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(part):
            ids[number, : len(row)] = torch.from_numpy(row)
            mask[number, : len(row)] = 1
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - begin


def trl(model: LanguageModelConfig, texts: list[str], lengths: str, steps: int) -> dict[str, float]:
    """Median seconds of a step of TRL's trainer, and tokens of a completion."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    limits = sampling(lengths)
    kwargs = {"min_new_tokens": FIXED} if lengths == "fixed" else {}
    lengths_seen: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths_seen.extend(len(ids) for ids in completion_ids)
        return [penalty(len(ids)) for ids in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter() - self.begin)

    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model.path),
            processing_class=load_tokenizer(model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=directory,
                max_steps=WARM + steps,
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                max_completion_length=limits["max_new_tokens"],
                generation_kwargs=kwargs,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                beta=0.0,
                temperature=1.0,
                top_k=0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return {
        "seconds": statistics.median(clock.times[WARM:]),
        "tokens": sum(lengths_seen) / len(lengths_seen),
    }


def measure(arguments: argparse.Namespace, lengths: str) -> dict[str, Any]:
    """All sides for one kind of lengths, in turn."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", arguments.hidden, arguments.layers)
        texts = write_prompts(Path(directory) / "prompts.jsonl", 512, *arguments.prompt)
        config = configuration(
            model,
            Path(directory) / "prompts.jsonl",
            lengths,
            arguments.engine,
            arguments.slots,
        )
        rounds = [one_round(arguments, config, texts, lengths) for _ in range(arguments.rounds)]
    medians = {side: middle(rounds, side) for side in rounds[0]}
    ratios = {
        side: [found[side]["seconds"] / found["ours"]["seconds"] for found in rounds]
        for side in medians
    }
    mine, floored = medians["ours"], statistics.median(ratios["floor"])
    sequences = PROMPTS * GROUP
    where = f"{arguments.slots} slots" if arguments.slots > 1 else "one process"
    shortest, longest = arguments.prompt
    print(
        f"\n{lengths} lengths, {sequences} sequences a step, prompts of {shortest} to {longest} "
        f"tokens, engine {arguments.engine}, {where}"
    )
    print(f"ours    {mine['seconds']:7.2f} s  {mine['tokens']:5.1f} tokens per completion")
    print(f"floor   {medians['floor']['seconds']:7.2f} s  ours / floor {1 / floored:5.2f}")
    if "trl" in medians:
        peer, others = medians["trl"], ratios["trl"]
        tokens = f"{peer['tokens']:5.1f} tokens per completion"
        print(f"TRL     {peer['seconds']:7.2f} s  {tokens}, {peer['threads']:.0f} threads")
        every = ", ".join(f"{ratio:.2f}" for ratio in others) if len(others) > 1 else ""
        middling = statistics.median(others)
        print(f"        completions per second, ours / TRL {middling:5.2f}  {every}")
    print(f"start to the end of our first step {mine['start']:.1f} s", flush=True)
    return {"lengths": lengths, **medians, "ratios": ratios.get("trl", [])}


def one_round(
    arguments: argparse.Namespace, config: ReasoningConfig, texts: list[str], lengths: str
) -> dict[str, dict[str, float]]:
    """Every side once; of TRL's thread settings the better one."""
    found = {"ours": ours(config, arguments.steps)}
    found["floor"] = {"seconds": floor(config, arguments.steps)}
    for threads in () if arguments.no_peer else arguments.threads:
        torch.set_num_threads(threads)
        peer = trl(config.model, texts, lengths, arguments.steps) | {"threads": threads}
        if "trl" not in found or peer["seconds"] < found["trl"]["seconds"]:
            found["trl"] = peer
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return found


def middle(rounds: list[dict[str, dict[str, float]]], side: str) -> dict[str, float]:
    """Medians of one side's figures."""
    return {key: statistics.median(found[side][key] for found in rounds) for key in rounds[0][side]}


def main() -> None:
    """Measure and print; the figures are also written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", choices=["heavy", "fixed", "both"], default="both")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--slots", type=int, default=1, help="slots that the cores are divided in")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each side")
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that the sides take turns; ratios are medians"
    )
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=(8, 16), metavar=("MIN", "MAX"), help="tokens"
    )
    parser.add_argument("--no-peer", action="store_true", help="ours and the floor alone")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), help="of TRL"
    )
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "reasoning.json")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kinds = ["heavy", "fixed"] if arguments.lengths == "both" else [arguments.lengths]
    arguments.json.write_text(json.dumps([measure(arguments, kind) for kind in kinds], indent=2))


if __name__ == "__main__":
    main()
