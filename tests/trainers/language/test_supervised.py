"""Supervised fine-tuning, alone and as the warm start of a policy."""

from __future__ import annotations

import pytest
import torch

from rlinf.errors import RunFailure
from rlinf.trainers.language.config import ComputeConfig, SupervisedConfig
from rlinf.trainers.language.supervised import SupervisedTrainer, target_batch
from tests.trainers.language.models import algorithm, model, random_batch, trainer

EXAMPLES = [([3 + a, 3 + b, 12], [3 + (a + b) % 8, 2]) for a in range(8) for b in range(8)]
CONFIG = SupervisedConfig.model_validate(
    {"steps": 60, "batch_size": 32, "optim": {"lr": 5e-3}, "lr_sched": {"type": "cosine"}}
)


def test_examples_are_padded_on_both_sides():
    batch = target_batch([([5, 6, 7], [8]), ([5], [6, 7])])
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 0], [0, 0, 5, 6, 7]]
    assert batch.inputs["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.mask.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_loss_falls_and_the_model_answers(param):
    of = model(hidden_size=64)
    compute = ComputeConfig.model_validate({"precision": {"param": param}})
    teacher = SupervisedTrainer.of_model(of, CONFIG, seed=0, compute=compute)
    losses = [m["supervised/loss"] for m in teacher.fit(target_batch(EXAMPLES))]
    assert len(losses) == 60
    assert losses[-1] < 0.1 * losses[0]
    teacher.finish()
    assert {p.dtype for p in of.parameters()} == {torch.float32}
    of.set_attn_implementation("sdpa")
    prompts = torch.tensor([prompt for prompt, _ in EXAMPLES])
    answers = of(prompts).logits[:, -1].argmax(-1)
    right = (answers == torch.tensor([target[0] for _, target in EXAMPLES])).float().mean()
    assert right > 0.9


def test_one_step_is_the_mean_cross_entropy():
    batch = target_batch(EXAMPLES[:10])
    plain = model()
    ids = batch.inputs["input_ids"]
    logits = plain(ids).logits[:, 2:4]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 3:].flatten())
    compute = ComputeConfig(max_tokens_per_micro_batch=9)
    teacher = SupervisedTrainer.of_model(model(), CONFIG, seed=0, compute=compute)
    metrics = teacher.step(batch, 0)
    assert metrics["supervised/loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in plain.parameters())
    assert metrics["supervised/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_same_seed_same_losses():
    def losses(seed):
        teacher = SupervisedTrainer.of_model(model(), CONFIG, seed=seed)
        fit = teacher.fit(target_batch(EXAMPLES))
        return [next(fit)["supervised/loss"] for _ in range(3)]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_warm_start_leaves_a_fresh_optimizer_and_the_reference_behind_it():
    one = trainer(keys={"kl_beta": 0.1})
    batch = random_batch()
    before = one.log_probs(batch)
    metrics = one.fine_tune(CONFIG, EXAMPLES, seed=0)
    assert metrics["supervised/loss_end"] < 0.5 * metrics["supervised/loss_begin"]
    after = one.log_probs(batch)
    assert (after - before).abs().max() > 0.1
    assert torch.equal(one.reference_log_probs(batch), after)
    assert one.version == 0
    state = one.state_dict()["model"]
    assert state["steps"] == 0
    assert not any(moment.any() for moment in state["exp_avg"].values())
    metrics = one.train(algorithm().prepare(batch)[0], 0)
    assert metrics["actor/optimizer_steps"] == 1


def test_skipped_steps_are_bounded():
    of = model()
    of.model.norm.weight.data[0] = torch.nan
    config = SupervisedConfig(steps=5, max_skipped_updates=1)
    teacher = SupervisedTrainer.of_model(of, config, seed=0)
    with pytest.raises(RunFailure, match="2 supervised steps"):
        list(teacher.fit(target_batch(EXAMPLES)))
