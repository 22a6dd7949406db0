"""The update is the same whatever the micro batches and ranks, and stops where it must."""

import copy
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import DecoupledPPOConfig, DistillationConfig
from rlinf.algorithms.supervised import Supervised, with_demonstrations
from rlinf.checkpoint.weights import export_weights
from rlinf.errors import ConfigError, RunFailure
from rlinf.models.adapters import adapt_policy
from rlinf.models.config import REGISTRY, MLPConfig
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy_weights import travelling
from rlinf.trainers.config import ActorConfig, LearningRateScheduleConfig, OptimizerConfig
from rlinf.trainers.ranks import Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer, row_order
from tests.models.vla.test_pi0_policy import SPEC

SAMPLES = 64


def train(
    policy, algorithm, trajectory, *, step=0, rank=0, world_size=1, all_reduce=None, **options
):
    trainer = trainer_of(
        policy, algorithm, rank=rank, world_size=world_size, all_reduce=all_reduce, **options
    )
    return trainer, trainer.learn(trajectory, step)


def trainer_of(policy, algorithm, *, rank=0, world_size=1, all_reduce=None, **options):
    config = ActorConfig(**{"global_batch_size": 32, "update_epoch": 2, **options})
    return Trainer(
        {"policy": policy},
        algorithm,
        config,
        ranks=Replicas(rank, world_size, all_reduce=all_reduce),
        rows=SAMPLES,
        total_steps=10,
        seed=5,
    )


def stamped(trajectory, version):
    """The rollout as that of other weights."""
    return dataclasses.replace(trajectory, versions=torch.full_like(trajectory.versions, version))


def weights(policy):
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("micro_batch_size", [4, 8, 16])
def test_micro_batches_do_not_change_the_update(
    make_policy, make_algorithm, rollout, micro_batch_size
):
    results = []
    for size in (32, micro_batch_size):
        policy = make_policy()
        train(policy, make_algorithm(), rollout(policy), micro_batch_size=size)
        results.append(weights(policy))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_give_the_same_bits_as_one_process(make_policy, make_algorithm, rollout, world_size):
    # Another policy acted, so that there is a difference to be measured.
    actor = make_policy()
    with torch.no_grad():
        next(actor.parameters()).add_(0.01)
    wide = {"first_update_kl_bound": 1.0, "first_update_ratio_bound": 10.0, "micro_batch_size": 8}
    reference = make_policy()
    _, expected = train(reference, make_algorithm(), rollout(actor), **wide)
    assert expected["actor/first_update_kl"] > 1e-6

    parts: list[torch.Tensor | None] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def run(rank: int):
        def all_reduce(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            barrier.wait()
            total = sum_ranks(parts)
            barrier.wait()
            return total

        policy = make_policy()
        _, metrics = train(
            policy,
            make_algorithm(),
            rollout(actor),
            rank=rank,
            world_size=world_size,
            all_reduce=all_reduce,
            **wide,
        )
        return weights(policy), metrics

    with ThreadPoolExecutor(world_size) as pool:
        for found, metrics in pool.map(run, range(world_size)):
            assert torch.equal(found, weights(reference))
            assert metrics == expected


def test_the_first_update_has_ratio_one(make_policy, make_algorithm, rollout):
    policy = make_policy()
    _, metrics = train(policy, make_algorithm(), rollout(policy))
    assert abs(metrics["actor/first_update_kl"]) < 1e-6


def test_data_of_another_policy_stops_the_run(make_policy, make_algorithm, rollout):
    actor = make_policy()
    with torch.no_grad():
        next(actor.parameters()).add_(0.5)
    with pytest.raises(RunFailure, match="do not compute the same log-probs"):
        train(make_policy(), make_algorithm(), rollout(actor))


def test_updates_that_are_not_finite_are_skipped_and_then_stop_the_run(
    make_policy, make_algorithm, rollout
):
    policy = make_policy()
    before = weights(policy).clone()
    trajectory = rollout(policy)
    trajectory.rewards[3, 1] = float("nan")
    with pytest.raises(RunFailure, match="not finite"):
        train(policy, make_algorithm(), trajectory, max_skipped_updates=1)
    assert torch.equal(weights(policy), before)


WRONG = {
    "prepare": [
        (
            lambda found: None,
            r"`prepare` of PPO returns NoneType, not a Batch and a dict of metrics",
        ),
        (lambda found: found[0], "returns Batch, not"),
        (lambda found: (found[0], None), r"returns \(Batch, NoneType\), not"),
        (
            lambda found: (dataclasses.replace(found[0], advantages=torch.zeros(3)), {}),
            r"advantages \(3,\) for terms \[N, K\] of shape \(64, ",
        ),
    ],
    "loss": [
        (lambda found: found[::-1], r"the loss `policy` of PPO returns \(dict, Tensor \(\)\), not"),
        (lambda found: (found[0].expand(3), {}), r"is \(3,\), not a scalar: sum it, and divide"),
        (lambda found: (found[0].detach(), {}), "has no gradient"),
        (lambda found: (found[0], {"a": 0.5}), "the metric `a` as float, not as a scalar Tensor"),
        (lambda found: (found[0], {"a": torch.zeros(2)}), r"`a` as Tensor \(2,\), not"),
    ],
}


@pytest.mark.parametrize(
    ("method", "change", "told"),
    [(method, change, told) for method, cases in WRONG.items() for change, told in cases],
)
def test_what_an_algorithm_returns_wrongly_is_said(
    make_policy, make_algorithm, rollout, monkeypatch, method, change, told
):
    policy, algorithm = make_policy(), make_algorithm()
    right = getattr(algorithm, method)
    wrong = lambda *args, **named: change(right(*args, **named))  # noqa: E731
    monkeypatch.setattr(algorithm, method, wrong)
    with pytest.raises(RunFailure, match=told):
        train(policy, algorithm, rollout(policy))


def test_advantages_that_are_no_numbers_are_said_to_be_the_cause(
    make_policy, make_algorithm, rollout, monkeypatch
):
    policy, algorithm = make_policy(), make_algorithm()
    batch, metrics = algorithm.prepare(rollout(policy))
    broken = dataclasses.replace(batch, advantages=batch.advantages * torch.nan)
    monkeypatch.setattr(algorithm, "prepare", lambda _: (broken, metrics))
    with pytest.raises(RunFailure, match="not finite; so were advantages before it: look at what"):
        train(policy, algorithm, rollout(policy), max_skipped_updates=1)


@pytest.mark.parametrize("stale", [False, True])
def test_a_kl_between_equal_policies_is_warned_of_once(
    make_policy, make_algorithm, rollout, monkeypatch, caplog, stale
):
    policy, algorithm = make_policy(), make_algorithm()
    right = algorithm.loss

    def broadcast(evaluation, batch, *, normalizer):
        value, metrics = right(evaluation, batch, normalizer=normalizer)
        return value, metrics | {"actor/approx_kl": torch.tensor(3.0)}

    monkeypatch.setattr(algorithm, "loss", broadcast)
    trainer = trainer_of(policy, algorithm)
    for step in range(2):
        trainer.learn(stamped(rollout(policy), step - stale), step)
    warned = [each.message for each in caplog.records if "between policies" in each.message]
    assert len(warned) == (not stale)
    assert all("`batch.fold`" in message for message in warned)


def test_skipped_updates_in_a_row_stop_the_run_over_phases_and_a_resume(
    make_policy, make_algorithm, rollout
):
    policy, options = make_policy(), {"global_batch_size": SAMPLES, "update_epoch": 1}

    def spoilt():
        trajectory = rollout(policy)
        trajectory.rewards[3, 1] = float("nan")
        return trajectory

    first = trainer_of(policy, make_algorithm(), max_skipped_updates=1, **options)
    assert first.learn(spoilt(), 0)["actor/skipped_updates"] == 1
    second = trainer_of(make_policy(), make_algorithm(), max_skipped_updates=1, **options)
    second.load_state_dict(first.state_dict())
    with pytest.raises(RunFailure, match="2 updates in a row, up to training phase 1,"):
        second.learn(stamped(spoilt(), 1), 1)


def test_target_kl_ends_the_phase(make_policy, make_algorithm, rollout):
    policy = make_policy()
    _, metrics = train(
        policy,
        make_algorithm(),
        rollout(policy),
        update_epoch=50,
        target_kl=0.01,
        optim=OptimizerConfig(lr=0.01),
    )
    assert metrics["actor/optimizer_steps"] < 100


def test_target_kl_needs_a_loss_that_tells_a_kl(make_policy, make_algorithm, rollout):
    def untold(of_policy):
        def loss(*arguments):
            value, metrics = of_policy(*arguments)
            return value, {name: each for name, each in metrics.items() if "kl" not in name}

        return loss

    policy, algorithm = make_policy(), make_algorithm()
    algorithm._of_policy = untold(algorithm._of_policy)
    _, metrics = train(policy, algorithm, rollout(policy))
    assert metrics["actor/optimizer_steps"] == 4
    with pytest.raises(ConfigError, match=r"loss of PPO tells none; return it .*approx_kl") as e:
        train(policy, algorithm, rollout(policy), target_kl=0.01)
    assert e.value.key == "actor.target_kl"


def test_gradients_are_clipped_to_the_norm(make_policy, make_algorithm, rollout):
    policy = make_policy()
    trainer, metrics = train(
        policy,
        make_algorithm(),
        rollout(policy),
        update_epoch=1,
        global_batch_size=SAMPLES,
        optim=OptimizerConfig(max_grad_norm=0.01, beta1=0.9),
    )
    assert metrics["actor/grad_norm"] > 0.01
    # After one step the first moment is a tenth of the gradient that was applied.
    moments = trainer.state_dict()["modules"]["policy"]["exp_avg"].values()
    applied = torch.cat([moment.flatten() for moment in moments]) * 10
    assert applied.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_continuing_from_a_saved_state_gives_the_same_bits(make_policy, make_algorithm, rollout):
    policy = make_policy()
    trajectory = rollout(policy)
    trainer, _ = train(policy, make_algorithm(normalize_rewards=True), trajectory)
    kept = torch.utils._pytree.tree_map(
        lambda x: x.clone() if torch.is_tensor(x) else x, trainer.state_dict()
    )
    second = stamped(rollout(policy, seed=1), 1)
    trainer.learn(second, 1)

    other = make_policy()
    resumed, _ = train(other, make_algorithm(normalize_rewards=True), rollout(other, seed=9))
    resumed.load_state_dict(kept)
    resumed.learn(second, 1)
    assert torch.equal(weights(other), weights(policy))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("constant", [1, 1, 1]), ("linear", [1, 0.5, 0]), ("cosine", [1, 0.5, 0])],
)
def test_learning_rate_schedules(kind, expected):
    schedule = LearningRateScheduleConfig(type=kind)
    assert [schedule.factor(step, 10) for step in (0, 5, 10)] == pytest.approx(expected)


def test_warmup_rises_linearly():
    schedule = LearningRateScheduleConfig(type="constant", warmup_steps=3)
    assert [schedule.factor(step, 10) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])


def test_both_learning_rates_of_a_policy_are_told(make_policy, make_algorithm, rollout):
    policy, rates = make_policy(), OptimizerConfig(lr=1e-3, value_lr=4e-3)
    schedule = LearningRateScheduleConfig(type="linear")
    _, metrics = train(
        policy, make_algorithm(), rollout(policy), step=5, optim=rates, lr_sched=schedule
    )
    assert (metrics["actor/lr"], metrics["critic/lr"]) == pytest.approx((5e-4, 2e-3))


def test_stale_rows_are_not_compared_and_their_age_is_told(make_policy, make_algorithm, rollout):
    actor = make_policy()
    trajectory = rollout(actor)
    ages = torch.zeros(16, 4, dtype=torch.int64)
    ages[:8] = 2
    policy = make_policy()
    with torch.no_grad():
        next(policy.parameters()).add_(0.5)  # no row is of these weights
    late = trainer_of(policy, make_algorithm())
    late.version = 3
    metrics = late.learn(trajectory, 3)
    assert "actor/first_update_kl" not in metrics
    assert metrics["rollout/staleness"] == 3
    fresh = dataclasses.replace(rollout(make_policy()), versions=3 - ages)
    late = trainer_of(make_policy(), make_algorithm())
    late.version = 3
    metrics = late.learn(fresh, 3)
    assert abs(metrics["actor/first_update_kl"]) < 1e-6
    assert metrics["rollout/staleness_share/0"] == metrics["rollout/staleness_share/2"] == 0.5
    assert metrics["rollout/staleness_max"] == 2


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_decoupled_ppo_gets_what_it_needs(make_policy, rollout, proximal):
    acted = rollout(make_policy())
    policy = make_policy()
    with torch.no_grad():
        next(policy.parameters()).add_(0.01)
    algorithm = DecoupledPPOConfig(proximal=proximal).build(family="actions")
    before = weights(policy)
    trainer = trainer_of(policy, algorithm)
    trainer.version = 1
    metrics = trainer.learn(acted, 1)
    assert not torch.equal(weights(policy), before)
    assert metrics["actor/proximal_ratio"] != 1
    assert metrics["actor/behave_approx_kl"] > 0


def test_every_epoch_and_phase_has_its_own_order_of_samples():
    orders = [
        tuple(row_order(SAMPLES, seed=5, step=step, epoch=epoch).tolist())
        for step in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len(set(orders)) == len(orders)


def test_the_critic_warms_up_alone(make_policy, make_algorithm, rollout):
    policy = make_policy()
    before = {name: p.clone() for name, p in policy.named_parameters()}
    trainer = trainer_of(policy, make_algorithm(critic_warmup_steps=1))
    trainer.learn(rollout(policy), 0)
    changed = {n.split(".")[0] for n, p in policy.named_parameters() if not p.equal(before[n])}
    assert changed == {"critic"}
    trainer.learn(stamped(rollout(policy), 1), 1)
    changed = {n.split(".")[0] for n, p in policy.named_parameters() if not p.equal(before[n])}
    assert changed == {"critic", "actor", "log_std"}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_warm_up_is_continued_and_leaves_no_step_behind(
    make_policy, make_algorithm, rollout, tmp_path, cut
):
    def begun():
        algorithm = make_algorithm(critic_warmup_steps=2)
        wide = {"first_update_kl_bound": 1e6, "first_update_ratio_bound": 1e6}
        return trainer_of(make_policy(), algorithm, optim={"weight_decay": 0.1}, **wide)

    def go_on(trainer, steps):
        for step in steps:
            trainer.learn(stamped(rollout(make_policy(), seed=step), step), step)
        return weights(trainer.modules.modules["policy"])

    whole, cut_off, first, second = (begun() for _ in range(4))
    expected = go_on(whole, range(4))
    go_on(cut_off, range(cut))
    first.load_state_dict(copy.deepcopy(cut_off.state_dict()))
    cut_off.save_sharded(tmp_path / "parts")
    second.load_sharded(tmp_path / "parts")
    for resumed in (first, second):
        assert torch.equal(go_on(resumed, range(cut, 4)), expected)
    optimizer = whole.modules.held["policy"].optimizer
    assert optimizer.steps == 2 * optimizer.values_alone > 0


def test_a_state_from_before_values_were_stepped_alone_is_read(
    make_policy, make_algorithm, rollout
):
    before, after = (trainer_of(make_policy(), make_algorithm()) for _ in range(2))
    before.learn(rollout(make_policy()), 0)
    state = copy.deepcopy(before.state_dict())
    del state["values_alone"]
    after.load_state_dict(state)
    assert after.state_dict()["values_alone"] == {"policy": 0}


def test_demonstrations_do_not_move_the_policy_while_the_critic_warms_up(
    make_policy, make_algorithm, rollout
):
    policy, algorithm = make_policy(), make_algorithm(critic_warmup_steps=1)
    algorithm.imitation = Supervised("squared_error")
    recorded = rollout(policy, seed=7).forward_inputs
    inputs = {name: column.flatten(0, 1) for name, column in recorded.items()}
    shown = Batch.of(inputs=inputs, mask=torch.ones(SAMPLES, 2))
    trainer = trainer_of(policy, algorithm)
    before = policy.actor.layers[0].weight.clone()
    for step, moves in ((0, False), (1, True)):
        metrics = trainer.learn(
            stamped(rollout(policy), step),
            step,
            lambda batch: with_demonstrations(batch, shown, weight=1.0, rows=32),
        )
        assert metrics["actor/imitation_loss"] > 0
        parts = [metrics[n] for n in ("actor/policy_loss", "actor/imitation_loss")]
        values = algorithm.config.value_coefficient * metrics["critic/value_loss"]
        expected = moves * sum(parts) + values  # without a bonus for entropy
        assert metrics["actor/loss"] == pytest.approx(expected, rel=1e-4)
        assert policy.actor.layers[0].weight.equal(before) is not moves


def test_nothing_moves_where_nothing_counts(make_policy, make_algorithm, rollout):
    policy = make_policy()
    trainer = trainer_of(policy, make_algorithm())
    trainer.learn(rollout(policy), 0)  # the optimizer has momentum
    batch, _ = trainer.prepare(stamped(rollout(policy, seed=1), 1))
    before = weights(policy).clone()
    metrics = trainer.train(dataclasses.replace(batch, weights=torch.zeros(len(batch))), 1)
    assert torch.equal(weights(policy), before)
    assert metrics["actor/empty_updates"] == 4


def test_observations_of_environments_that_wait_do_not_count(make_policy, make_algorithm, rollout):
    policy = make_policy()
    # The states are not those that were acted on.
    wide = {"first_update_kl_bound": 1e6, "first_update_ratio_bound": 1e6}
    trainer = trainer_of(policy, make_algorithm(), **wide)
    trajectory = rollout(policy)
    ends = torch.zeros_like(trajectory.terminations)
    ends[5, 1] = True  # the others play to the end
    states = trajectory.forward_inputs["states"].clone()
    states[6:, 1] = 1e3
    waiting = dataclasses.replace(
        trajectory,
        terminations=ends,
        forward_inputs={**trajectory.forward_inputs, "states": states},
    )
    trainer.learn(waiting, 0)
    seen = [trajectory.forward_inputs["states"][:, [0, 2, 3]].flatten(0, 1), states[:6, 1]]
    torch.testing.assert_close(
        policy.normalizer.mean, torch.cat(seen).mean(0).to(policy.normalizer.mean)
    )


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_a_student_comes_to_its_teacher(make_policy, rollout, env_spec, tmp_path, lora):
    teacher = MLPConfig(hidden_sizes=(16, 16), policy_gain=1.0).build(env_spec, seed=8)
    path = export_weights(tmp_path / "policy.safetensors", teacher.state_dict())
    student = make_policy()
    algorithm = DistillationConfig(teacher=path).build(family="actions")
    trainer = trainer_of(student, algorithm, optim=OptimizerConfig(lr=0.01), lora=lora)
    acting, gaps = make_policy(), []
    for step in range(12):
        acting.load_state_dict(dict(trainer.weights()))
        trajectory = stamped(rollout(acting, seed=step), step)
        rows, told = trainer.prepare(trajectory)
        # Advantages are what the teacher says of the actions, in the loss.
        assert not any("advantages" in name for name in told)
        theirs = teacher.evaluate_actions(rows.inputs).log_probs.flatten(1)
        torch.testing.assert_close(rows.reference_log_probs, theirs, rtol=0, atol=1e-5)
        gaps.append(trainer.learn(trajectory, step)["actor/teacher_kl"])
    assert gaps[-1] < 0.5 * gaps[0]


def test_a_teacher_may_have_values_that_its_student_has_not(env_spec, tmp_path):
    sizes = {"hidden_sizes": (8, 8)}
    teacher = MLPConfig(**sizes).build(env_spec, value_dim=1, seed=8)
    path = export_weights(tmp_path / "policy.safetensors", teacher.state_dict())
    algorithm = DistillationConfig(teacher=path).build(family="actions")
    trainer_of(MLPConfig(**sizes).build(env_spec, value_dim=0, seed=9), algorithm)


def test_adapters_of_a_teacher_have_the_base_of_the_student(tmp_path):
    def adapted(seed):
        config = REGISTRY.load("pi0")(preset="tiny", num_action_chunks=2, denoising_steps=2)
        policy = config.build(SPEC, value_dim=0, seed=seed)
        adapt_policy(policy, AdapterConfig(rank=2), seed=0)
        return policy

    teacher = adapted(0)
    path = export_weights(
        tmp_path / "policy.safetensors", travelling(teacher), metadata={"base": str(teacher.base)}
    )
    algorithm = DistillationConfig(teacher=path).build(family="actions")
    trainer_of(adapted(0), algorithm)
    with pytest.raises(ConfigError, match="was trained from other weights") as error:
        trainer_of(adapted(3), algorithm)
    assert error.value.key == "algorithm.teacher"


def test_the_teacher_is_a_policy_of_this_kind(make_policy, env_spec, tmp_path):
    other = MLPConfig(hidden_sizes=(8, 8)).build(env_spec, seed=8)
    path = export_weights(tmp_path / "policy.safetensors", other.state_dict())
    algorithm = DistillationConfig(teacher=path).build(family="actions")
    with pytest.raises(ConfigError, match="of another model") as error:
        trainer_of(make_policy(), algorithm)
    assert error.value.key == "algorithm.teacher"
