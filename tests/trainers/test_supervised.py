"""Supervised fine-tuning: texts that a language model learns, and actions that a policy copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf.algorithms.supervised import Supervised
from rlinf.data.prompts.loader import Draws
from rlinf.errors import RunFailure
from rlinf.trainers.config import ActorConfig, FSDPTrainerConfig
from rlinf.trainers.language_trainers import policy_trainer, text_batch
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.trainer import Trainer
from tests.trainers.language_models import model

EXAMPLES = [([3 + a, 3 + b, 12], [3 + (a + b) % 8, 2]) for a in range(8) for b in range(8)]


def test_examples_are_padded_on_both_sides():
    batch = text_batch([([5, 6, 7], [8]), ([5], [6, 7])])
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 0], [0, 0, 5, 6, 7]]
    assert batch.inputs["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.mask.tolist() == [[1, 0], [1, 1]]


def fit(of, steps=60, seed=0, **compute):
    """Losses of a model that is taught the examples."""
    config = FSDPTrainerConfig.model_validate(
        {"optim": {"lr": 5e-3}, "lr_sched": {"type": "cosine"}, **compute}
    )
    one = policy_trainer(of, Supervised(), config, ranks=Ranks(), total_steps=60, seed=seed)
    texts, draws = text_batch(EXAMPLES), Draws(len(EXAMPLES), seed=seed)
    rows = (texts.select(torch.from_numpy(draws.batch(step, 32))) for step in range(steps))
    losses = [one.train([batch], step)["actor/loss"] for step, batch in enumerate(rows)]
    one.modules.held["policy"].release_parameters()
    return losses


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_loss_falls_and_the_model_answers(param):
    of = model(hidden_size=64)
    losses = fit(of, precision={"param": param})
    assert losses[-1] < 0.1 * losses[0]
    assert {p.dtype for p in of.parameters()} == {torch.float32}
    of.set_attn_implementation("sdpa")
    prompts = torch.tensor([prompt for prompt, _ in EXAMPLES])
    answers = of(prompts).logits[:, -1].argmax(-1)
    right = (answers == torch.tensor([target[0] for _, target in EXAMPLES])).float().mean()
    assert right > 0.9


def test_one_step_is_the_mean_cross_entropy():
    batch = text_batch(EXAMPLES[:10])
    plain = model()
    ids = batch.inputs["input_ids"]
    logits = plain(ids).logits[:, 2:4]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 3:].flatten())
    config = FSDPTrainerConfig(max_tokens_per_micro_batch=9)
    one = policy_trainer(model(), Supervised(), config, ranks=Ranks(), total_steps=1, seed=0)
    metrics = one.train([batch], 0)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in plain.parameters())
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_same_seed_same_losses():
    assert fit(model(), 3) == fit(model(), 3)
    assert fit(model(), 3) != fit(model(), 3, seed=1)


def test_skipped_steps_are_bounded():
    of = model()
    of.model.norm.weight.data[0] = torch.nan
    with pytest.raises(RunFailure, match=r"2 updates in a row.*lower actor\.optim\.lr"):
        fit(of, 5, max_skipped_updates=1)


def test_a_policy_copies_actions(make_policy, make_algorithm, rollout):
    """Behaviour cloning: the likelihood of demonstrated actions rises, of the others' not."""
    teacher, pupil = make_policy(), make_policy()
    with torch.no_grad():
        next(teacher.parameters()).mul_(3.0)
    batch = make_algorithm().prepare(rollout(teacher))[0]
    half = batch.mask.clone()
    half[::2] = 0
    batch = replace(batch, mask=half)
    config = ActorConfig(global_batch_size=64, optim={"lr": 0.01})
    one = Trainer({"policy": pupil}, Supervised(), config, total_steps=50, seed=0)
    before = one.log_probs(batch)
    losses = [one.train([batch], step)["actor/loss"] for step in range(50)]
    gain = one.log_probs(batch) - before
    assert losses[-1] < losses[0] - 0.1
    assert gain[1::2].mean() == pytest.approx(losses[0] - losses[-1], rel=0.1)
    assert gain[1::2].mean() > gain[::2].mean()
