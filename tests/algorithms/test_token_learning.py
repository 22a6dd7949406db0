"""Every algorithm teaches a tiny model to prefer one token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Scores
from tests.algorithms.batches import (
    EVERY_ALGORITHM,
    PROMPT,
    VOCABULARY,
    TinyModel,
    build,
    random_batch,
)

LENGTH, GROUP, PROMPTS = 4, 8, 4
END, WANTED = 0, 3


@torch.no_grad()
def sample(model: TinyModel, generator: torch.Generator, version: int) -> Batch:
    """Answers that end with the end token; the reward is the share of the wanted token."""
    count = PROMPTS * GROUP
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT), generator=generator)
    ids = prompts.repeat_interleave(GROUP, dim=0)
    for _ in range(LENGTH):
        padded = torch.cat([ids, ids[:, :1]], dim=1)
        present = model.embedding[padded[:, -2]]
        hidden = torch.tanh(present + model.embedding[padded[:, -3]] @ model.recurrent)
        probabilities = (hidden @ model.head).softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    response = ids[:, PROMPT:]
    ended = (response == END).cumsum(dim=1)
    mask = ((ended - (response == END).long()) == 0).float()
    log_probs, _, values = model(ids)
    batch = random_batch(sequences=count, length=LENGTH, group_size=GROUP)
    return replace(
        batch,
        inputs={**batch.inputs, "input_ids": ids},
        mask=mask,
        log_probs=log_probs,
        proximal_log_probs=log_probs,
        reference_log_probs=log_probs,
        values=values,
        rewards=((response == WANTED) * mask).sum(dim=1) / LENGTH,
        truncated=ended[:, -1] == 0,
        versions=torch.full((count, LENGTH), version),
        version=version,
    )


def step(algorithm: Algorithm, model: TinyModel, batch: Batch) -> Tensor:
    normalizer = algorithm.normalizer(batch)
    log_probs, entropy, values = model(batch.inputs["input_ids"])
    loss, _ = algorithm.loss(Scores(log_probs, entropy), batch, normalizer=normalizer)
    if algorithm.needs_values:
        loss = loss + algorithm.value_loss(values, batch, normalizer=normalizer)[0]
    return loss


@pytest.mark.parametrize("name", EVERY_ALGORITHM)
def test_rewards_rise(name: str) -> None:
    kind, keys = EVERY_ALGORITHM[name]
    # Here the good answers are those that use all of their tokens.
    unpunished = {"overlong_filter": False} | (
        {"safe_length": None, "max_length": None} if kind == "dapo" else {}
    )
    algorithm = build(kind, **(keys | unpunished))
    model, generator = TinyModel(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rewards = []
    for number in range(20):
        batch, metrics = algorithm.prepare(sample(model, generator, number))
        rewards.append(metrics["rollout/rewards"])
        for _ in range(2):
            optimizer.zero_grad()
            step(algorithm, model, batch).backward()
            optimizer.step()
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.7
