"""Tokens per second of the engines beside transformers' ``generate``, in one run.

    python benchmarks/engines.py                          # hf against generate
    python benchmarks/engines.py --engines hf,vllm --lengths heavy --sequences 256

All sides have the same model (random weights, so that only the length limits end a completion), the
same prompts in groups, the same number of sequences per batch, the same length limit of every
completion. ``generate`` runs batch after batch, each to the longest limit within it, as it cannot
take a limit per sequence; only the tokens within the limits count, for every side. ``sorted`` gives
it the completions by length, which no trainer can know beforehand: its best case.

``heavy`` draws the limits from a log-normal distribution, ``fixed`` gives all the same. Rounds of
the sides alternate; printed are the medians and their ratios. One thread (``OMP_NUM_THREADS=1``) is
set unless given.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from rlinf.engines.config import HFEngineConfig, SamplingConfig, VLLMEngineConfig
from rlinf.engines.protocol import Engine, GenerationRequest, ModelSource

VOCABULARY = 512


def tiny_model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    """A Qwen2 of random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=hidden * 8 // 3,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def workload(arguments: argparse.Namespace) -> list[GenerationRequest]:
    """The requests: groups of equal prompts, a length limit each."""
    rng = np.random.default_rng(0)
    sequences, mean = arguments.sequences, arguments.mean_length
    if arguments.lengths == "heavy":
        # Log-normal of shape 1: its mean is exp(1/2) times its median.
        limits = rng.lognormal(np.log(mean) - 0.5, 1.0, sequences).astype(int)
        limits = limits.clip(4, 8 * mean)
    else:
        limits = np.full(sequences, mean)
    requests = []
    prompt = np.zeros(0, np.int64)
    for number in range(sequences):
        if number % arguments.group == 0:
            prompt = rng.integers(2, VOCABULARY, rng.integers(16, 49))
        sampling = SamplingConfig(max_new_tokens=int(limits[number]), stop_token_ids=())
        requests.append(
            GenerationRequest(
                request_id=number, prompt_tokens=prompt, seed=number, sampling=sampling
            )
        )
    return requests


def with_generate(model: Any, requests: list[GenerationRequest], batch: int) -> float:
    """Seconds that ``generate`` takes for the requests, batch after batch."""
    begin = time.perf_counter()
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        longest = max(len(request.prompt_tokens) for request in part)
        inputs = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(inputs)
        for row, request in enumerate(part):
            length = len(request.prompt_tokens)
            inputs[row, longest - length :] = torch.from_numpy(request.prompt_tokens)
            mask[row, longest - length :] = 1
        limit = max(request.sampling.max_new_tokens for request in part)
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=limit, pad_token_id=0
        )
        with torch.inference_mode():
            found = model.generate(inputs, attention_mask=mask, generation_config=settings)
        assert found.shape == (len(part), longest + limit)
    return time.perf_counter() - begin


def with_engine(engine: Engine, requests: list[GenerationRequest]) -> float:
    """Seconds that an engine takes for the requests."""
    begin = time.perf_counter()
    finished = engine.generate(requests)
    seconds = time.perf_counter() - begin
    for request, item in zip(requests, finished, strict=True):
        assert len(item.completion) == request.sampling.max_new_tokens
    return seconds


def sides(
    arguments: argparse.Namespace, model: Any, requests: list[GenerationRequest], folder: str
) -> dict[str, Callable[[], float]]:
    """What is measured, by name; each gives its seconds for the requests."""
    batch = arguments.batch
    by_length = sorted(requests, key=lambda request: request.sampling.max_new_tokens)
    measured: dict[str, Callable[[], float]] = {
        "generate": lambda: with_generate(model, requests, batch),
        "generate, sorted": lambda: with_generate(model, by_length, batch),
    }
    names = arguments.engines.split(",")
    if "hf" in names:
        plain = HFEngineConfig(max_running_requests=batch).build(ModelSource(module=model))
        measured["hf"] = lambda: with_engine(plain, requests)
    if "hf-deterministic" in names:
        config = HFEngineConfig(max_running_requests=batch, deterministic=True)
        exact = config.build(ModelSource(module=model))
        measured["hf, deterministic"] = lambda: with_engine(exact, requests)
    if "vllm" in names:
        model.save_pretrained(folder)
        served = VLLMEngineConfig(
            max_running_requests=batch,
            max_model_len=2048,
            log_probs="raw",
            enforce_eager=not arguments.compile,
            options={"skip_tokenizer_init": True},
        ).build(ModelSource(path=Path(folder)))
        measured["vllm"] = lambda: with_engine(served, requests)
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--engines", default="hf,hf-deterministic", help="hf, hf-deterministic, vllm"
    )
    parser.add_argument("--lengths", choices=("heavy", "fixed"), default="heavy")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    model = tiny_model(arguments.hidden, arguments.layers, getattr(torch, arguments.dtype))
    requests = workload(arguments)
    limits = [request.sampling.max_new_tokens for request in requests]
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{millions:.2f} M parameters, {arguments.dtype}, {len(requests)} sequences in groups of "
        f"{arguments.group}, {arguments.batch} at a time\n"
        f"lengths ({arguments.lengths}): median {statistics.median(limits):.0f}, mean "
        f"{statistics.mean(limits):.0f}, longest {max(limits)}; {sum(limits)} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        measured = sides(arguments, model, requests, folder)
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(arguments.rounds + 1):
            for name, run in measured.items():
                took = run()
                if number:  # the first round warms up
                    seconds[name].append(took)
    reference = statistics.median(seconds["generate"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:20s} {sum(limits) / median:8.0f} tokens/s  (rounds "
            f"{min(values):.2f}-{max(values):.2f} s)  {reference / median:5.2f} × generate"
        )


if __name__ == "__main__":
    main()
