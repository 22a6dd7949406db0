"""The conformance suite of policies for actions: ``rlinf check model``.

Every check builds its policies from the config section alone, so a user's own is checked as it is
used.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import Supervised
from rlinf.conformance import CheckResult, outcome, require
from rlinf.envs.base import INSTRUCTION_KEY, instruction_bytes
from rlinf.envs.results import TASK_IDS
from rlinf.envs.spec import EnvSpec
from rlinf.models.adapters import adapt_policy, in_precision, without_adapter
from rlinf.models.config import ModelConfig
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy import RAW_ACTIONS, ActionSample, Policy, draw_noise
from rlinf.models.policy_weights import load_travelling, merged_adapters, travelling
from rlinf.trainers.config import RowTrainerConfig
from rlinf.trainers.modules import POLICY
from rlinf.trainers.ranks import Ranks, Replicas
from rlinf.trainers.trainer import Trainer

_ROWS = 4
_BOUND = 1e-5
_HALF_BOUND = 0.2
_LONGER = "this is another and a much longer instruction than the first one of the table"


@dataclass(frozen=True)
class PolicySubject:
    """A model section with the kind of environment that it is to act in."""

    config: ModelConfig
    env_spec: EnvSpec

    @property
    def value_dim(self) -> int:
        """V: one value, none of what steers, which has Q functions alone."""
        return 0 if self.config.steers else 1

    def policy(self, *, seed: int = 0, spec: EnvSpec | None = None) -> Policy:
        """A fresh one in float32, which the bounds are for: published weights may be stored in half
        of it."""
        built = self.config.build(spec or self.env_spec, value_dim=self.value_dim, seed=seed)
        return in_precision(built, torch.float32).eval()

    @property
    def imitates(self) -> bool:
        """Whether the policy learns by a loss of its own alone, as its actions have no log-probs;
        it then acts by its mode."""
        return self.config.without_log_probs is not None

    def compared(self, sample: ActionSample) -> Tensor:
        """[B, C, A] by which what was done is held against the same by other ways."""
        return sample.actions if self.imitates else sample.log_probs

    @property
    def difference(self) -> str:
        """What it is in which they differ."""
        return "|Δ action|" if self.imitates else "|Δ log-prob|"

    @cached_property
    def seen(self) -> dict[str, Tensor]:
        """Observations of some rows."""
        return _observations(self.env_spec, _ROWS)

    def acted(self, policy: Policy, rows: int = _ROWS) -> tuple[dict[str, Tensor], ActionSample]:
        """What was seen and what the policy did, with the same noise for the same row."""
        seen = {name: each[:rows] for name, each in self.seen.items()}
        if self.imitates:
            return seen, policy.sample(seen, None)
        generator = torch.Generator().manual_seed(1)
        noise = draw_noise(policy.noise, (_ROWS,), generator)
        return seen, policy.sample(seen, {name: each[:rows] for name, each in noise.items()})

    @cached_property
    def batch(self) -> Batch:
        """What a fresh policy did, or was shown, as it is trained on."""
        if self.imitates:
            inputs = self.shown(self.policy())
            return Batch.of(inputs=inputs, mask=torch.ones(inputs[RAW_ACTIONS].shape).flatten(1))
        seen, sample = self.acted(self.policy())
        inputs = {name: each.clone() for name, each in (seen | sample.forward_inputs).items()}
        return Batch.of(inputs=inputs, mask=torch.ones(_ROWS, sample.log_probs[0].numel()))

    def shown(self, policy: Policy) -> dict[str, Tensor]:
        """Recorded actions with what was seen, and the noise by which they are imitated."""
        shape, spec = (_ROWS, sum(policy.imitated), policy.action_dim), self.env_spec
        noise = draw_noise(policy.imitation_noise, (_ROWS,), torch.Generator().manual_seed(2))
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(3))
        return {**self.seen, RAW_ACTIONS: low + (high - low) * drawn, **noise}


def check_policy(
    config: ModelConfig, env_spec: EnvSpec, *, ranks: bool = True
) -> list[CheckResult]:
    """Run every check on a model section, with ``ranks`` also on two processes; ConfigError where
    no policy can be built of it."""
    subject = PolicySubject(config, env_spec)
    subject.policy()
    checks = [
        _check_acts, _check_mode, _check_replays, _check_batch_size, _check_gradients,
        _check_save_and_load, _check_adapters, _check_checkpointing,
    ]  # fmt: skip
    if subject.imitates:
        checks = [each for each in checks if each not in (_check_replays, _check_gradients)]
    if config.steers:
        checks.remove(_check_adapters)  # what steers is small, and refuses them
    if ranks:
        checks.append(_check_two_ranks)
    if hasattr(config, "preset") and INSTRUCTION_KEY not in env_spec.observation_shapes:
        checks.insert(checks.index(_check_batch_size) + 1, _check_padding)
    if subject.policy().imitates:
        checks.append(_check_imitation)
    if config.half_precision and not subject.imitates:
        checks.append(_check_bfloat16)
    if torch.accelerator.is_available():
        checks.append(_check_device)
    # What a policy raises is its fault, and says nothing of the other checks.
    return [outcome(f.__name__.removeprefix("_check_"), f, subject, (Exception,)) for f in checks]


def _check_acts(subject: PolicySubject) -> str:
    policy = subject.policy()
    _, sample = subject.acted(policy)
    shape, spec = (_ROWS, policy.chunk, policy.action_dim), subject.env_spec
    for name in ("actions", "log_probs"):
        found: Tensor = getattr(sample, name)
        require(tuple(found.shape) == shape, f"{name} {tuple(found.shape)}, expected {shape}")
        require(found.dtype == torch.float32, f"{name} are {found.dtype}, expected float32")
        require(found.isfinite().all(), f"{name} are not finite")
        require(not found.requires_grad, f"{name} have a graph of gradients, though acting")
    low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
    inside = (sample.actions >= low) & (sample.actions <= high)
    require(inside.all(), "actions leave the box of the environment")
    values = policy.value(subject.seen) if sample.values is None else sample.values
    wanted = (_ROWS, subject.value_dim)
    require(tuple(values.shape) == wanted, f"values {tuple(values.shape)}, expected {wanted}")
    _near(values, policy.value(subject.seen), "values of sample and of value")
    _, again = subject.acted(policy)
    require(torch.equal(again.actions, sample.actions), "the same noise gives other actions")
    noise = "no log-probs" if subject.imitates else f"noise {_shapes(policy)}"
    return f"actions [B, {policy.chunk}, {policy.action_dim}], {noise}"


def _check_mode(subject: PolicySubject) -> str:
    policy = subject.policy()
    first, second = (policy.sample(subject.seen, None).actions for _ in range(2))
    require(torch.equal(first, second), "without noise, two calls give two answers")
    if not policy.evaluation_noise:
        return "without noise always the same; an evaluation has nothing to draw"
    noise = draw_noise(policy.evaluation_noise, (_ROWS,), torch.Generator().manual_seed(4))
    first, second = (policy.sample(subject.seen, noise).actions for _ in range(2))
    require(torch.equal(first, second), "the same noise of an evaluation gives other actions")
    return "without noise, and by that of evaluations, always the same"


def _check_replays(subject: PolicySubject) -> str:
    policy = subject.policy()
    seen, sample = subject.acted(policy)
    # Copies, as workers are sent: what was computed for inference alone has no gradients.
    inputs = {name: each.clone() for name, each in (seen | sample.forward_inputs).items()}
    first, second = (policy.evaluate_actions(inputs) for _ in range(2))
    require(torch.equal(first.log_probs, second.log_probs), "two evaluations differ")
    difference = _near(first.log_probs, sample.log_probs, "log-probs of sample and evaluation")
    ratio = (first.log_probs - sample.log_probs).exp()
    require(first.entropy.shape == first.log_probs.shape, f"entropy {first.entropy.shape}")
    if sample.values is not None:
        _near(first.values, sample.values, "values of sample and evaluation")
    trained = subject.policy().train().evaluate_actions(inputs)
    why = "log-probs of sample and of a policy in training mode (dropout, statistics of a batch?)"
    _near(trained.log_probs, sample.log_probs, why)
    return f"|Δ log-prob| ≤ {difference:.1e}, ratio from {ratio.min():.7g} to {ratio.max():.7g}"


def _check_batch_size(subject: PolicySubject) -> str:
    policy = subject.policy()
    _, whole = subject.acted(policy)
    _, alone = subject.acted(policy, rows=1)
    _near(alone.actions, whole.actions[:1], "actions of a row alone and among others")
    one, among = subject.compared(alone), subject.compared(whole)[:1]
    difference = _near(one, among, "log-probs of a row alone")
    return f"a row alone: {subject.difference} ≤ {difference:.1e}"


def _check_padding(subject: PolicySubject) -> str:
    short = (subject.env_spec.task_descriptions or ("push the button",))[0]
    found = []
    for texts in ((short,), (short, f"{short} {_LONGER}")):
        shapes, types = dict(subject.env_spec.observation_shapes), {}
        if len(texts) > 1:
            shapes[TASK_IDS], types = (), {TASK_IDS: "int64"}
        spec = replace(
            subject.env_spec,
            task_descriptions=texts,
            observation_shapes=shapes,
            observation_dtypes=subject.env_spec.observation_dtypes | types,
        )
        policy = subject.policy(spec=spec)
        noise = None
        if not subject.imitates:
            noise = draw_noise(policy.noise, (_ROWS,), torch.Generator().manual_seed(1))
        tasks = torch.zeros(_ROWS, dtype=torch.int64)
        found.append(policy.sample(subject.seen | {TASK_IDS: tasks}, noise))
    _near(found[0].actions, found[1].actions, "actions beside longer texts")
    alone, beside = map(subject.compared, found)
    difference = _near(alone, beside, "log-probs beside longer texts")
    return f"beside a longer instruction: {subject.difference} ≤ {difference:.1e}"


def _check_gradients(subject: PolicySubject) -> str:
    policy = subject.policy()
    found = policy(subject.batch)
    (found.log_probs.sum() + found.values.sum()).backward()
    trained = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    broken = [n for n, p in trained if p.grad is not None and not bool(p.grad.isfinite().all())]
    require(not broken, f"gradients that are not finite: {', '.join(broken[:3])}")
    without = [n for n, p in trained if p.grad is None]
    reached = len(trained) - len(without)
    require(reached, "no parameter has a gradient")
    numbers = sum(p.numel() for _, p in trained)
    more = f" and {len(without) - 3} more" if len(without) > 3 else ""
    named = f"; none has {', '.join(without[:3])}{more}" if without else ""
    return (
        f"{reached} of {len(trained)} trained tensors ({numbers:,} numbers) have a gradient{named}"
    )


def _check_save_and_load(subject: PolicySubject) -> str:
    policy = _moved(subject.policy())
    policy.update_normalizer(subject.seen)  # statistics travel, too
    own, other = policy.state_dict(), subject.policy(seed=1)
    result = other.load_state_dict(own, strict=False)
    require(not result.missing_keys, f"missing {result.missing_keys[:3]}")
    require(not result.unexpected_keys, f"unexpected {result.unexpected_keys[:3]}")
    _same_actions(subject, policy, other)
    sent = {name: tensor.clone() for name, tensor in travelling(policy).items()}
    receiver = subject.policy()
    load_travelling(receiver, sent)
    _same_actions(subject, policy, receiver)
    return f"{len(own)} tensors, of which {len(sent)} travel"


def _check_adapters(subject: PolicySubject) -> str:
    policy, plain = subject.policy(), subject.policy()
    lora = AdapterConfig(rank=2)
    adapt_policy(policy, lora, seed=3)
    require(any(".lora_A" in name for name, _ in policy.named_parameters()), "no layer is adapted")
    # Within rounding: an adapted layer is another call.
    begun, without = (subject.compared(subject.acted(each)[1]) for each in (policy, plain))
    _near(begun, without, "log-probs of fresh adapters")
    _moved(policy, only=".lora_B")
    with without_adapter(policy):
        switched_off = subject.compared(subject.acted(policy)[1])
    _near(switched_off, without, "log-probs without the adapters")
    if policy.base is None:
        return "adapters change nothing at first"
    receiver = subject.policy()
    adapt_policy(receiver, lora, seed=3)
    sent = {name: tensor.detach().clone() for name, tensor in travelling(policy).items()}
    load_travelling(receiver, sent)
    _same_actions(subject, policy, receiver)
    with torch.no_grad():
        plain.load_state_dict(merged_adapters(sent, plain.state_dict()), strict=False)
    merged, adapted = (subject.compared(subject.acted(each)[1]) for each in (plain, policy))
    difference = _near(merged, adapted, "log-probs of merged adapters")
    numbers = sum(t.numel() for n, t in sent.items() if ".lora_" in n)
    return f"{numbers:,} numbers; merged {subject.difference} ≤ {difference:.1e}"


def _check_checkpointing(subject: PolicySubject) -> str:
    found = [_trained(subject, gradient_checkpointing=on) for on in (False, True)]
    return f"after two updates weights differ by {_far(*found):.1e}"


def _check_two_ranks(subject: PolicySubject) -> str:
    alone = _trained(subject)
    with tempfile.TemporaryDirectory() as place:
        torch.save(subject.batch.tensors(), Path(place) / "batch.pt")
        arguments = (subject.config, subject.env_spec, place)
        # Forked of a process that has imported what both need, which takes seconds.
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            [__name__, "rlinf.trainers.sharded"]
        )
        start_processes(  # type: ignore[no-untyped-call]
            _one_of_two, arguments, nprocs=2, start_method="forkserver"
        )
        divided = torch.load(Path(place) / "weights.pt", weights_only=True)
    return f"after two updates on two ranks of FSDP2 weights differ by {_far(alone, divided):.1e}"


def _one_of_two(rank: int, config: ModelConfig, env_spec: EnvSpec, place: str) -> None:
    """One rank of two; the first leaves the weights behind."""
    torch.set_num_threads(1)
    store = FileStore(f"{place}/store", 2)
    ranks = Ranks(rank, 2, store=store)
    batch = Batch.from_tensors(torch.load(Path(place) / "batch.pt", weights_only=True))
    weights = _train(
        PolicySubject(config, env_spec), batch, ranks, type="fsdp", reshard="after_forward"
    )
    if rank == 0:
        torch.save(weights, Path(place) / "weights.pt")
    ranks.close()


def _check_imitation(subject: PolicySubject) -> str:
    policy = subject.policy()
    inputs = subject.shown(policy)
    whole, shape = policy.imitation_errors(inputs), tuple(inputs[RAW_ACTIONS].shape)
    require(tuple(whole.shape) == shape, f"errors {tuple(whole.shape)}, expected {shape}")
    require(bool(whole.isfinite().all() & (whole >= 0).all()), "errors below 0, or not finite")
    alone = policy.imitation_errors({name: each[:1] for name, each in inputs.items()})
    _near(alone, whole[:1], "errors of a row alone and among others")
    whole.mean().backward()  # type: ignore[no-untyped-call]
    reached = sum(p.grad is not None for p in policy.parameters() if p.requires_grad)
    require(reached, "no parameter has a gradient")
    return f"mean error {whole.mean():.3g}, {reached} tensors have a gradient"


def _check_bfloat16(subject: PolicySubject) -> str:
    policy = in_precision(subject.policy(), torch.bfloat16)
    seen, sample = subject.acted(policy)
    found = policy.evaluate_actions(seen | sample.forward_inputs)
    require(found.log_probs.dtype == torch.float32, f"log-probs are {found.log_probs.dtype}")
    ratio = (found.log_probs - sample.log_probs).detach().exp()
    distance = float((ratio - 1).abs().mean())
    require(distance <= _HALF_BOUND, f"ratios are {distance:.3g} from 1, bound {_HALF_BOUND}")
    return f"first ratios are {distance:.1e} from 1 in the mean, bound {_HALF_BOUND}"


def _check_device(subject: PolicySubject) -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    policy = subject.policy()
    _, here = subject.acted(policy)
    policy.to(device)
    placed, noise = {name: each.to(device) for name, each in subject.seen.items()}, None
    if not subject.imitates:
        drawn = draw_noise(policy.noise, (_ROWS,), torch.Generator().manual_seed(1))
        noise = {name: each.to(device) for name, each in drawn.items()}
    there = policy.sample(placed, noise)
    difference = _near(there.actions.cpu(), here.actions, f"actions on {device}", bound=1e-3)
    _same_actions(subject, policy.cpu(), subject.policy())
    return f"on {device} actions differ by {difference:.1e}"


# -- parts of checks ----------------------------------------------------------------------------


def _observations(spec: EnvSpec, rows: int) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name, shape in spec.observation_shapes.items():
        whole = (rows, *shape)
        if name == INSTRUCTION_KEY:
            told = [instruction_bytes(f"push button {row}") for row in range(rows)]
            found[name] = torch.from_numpy(np.stack(told))
        elif spec.observation_dtypes[name] == "uint8":
            found[name] = torch.randint(0, 256, whole, dtype=torch.uint8, generator=generator)
        elif name == TASK_IDS:
            found[name] = torch.arange(rows) % len(spec.task_descriptions)
        else:
            found[name] = torch.randn(whole, generator=generator)
    return found


def _moved(policy: Policy, only: str = "") -> Policy:
    """The policy with its trained weights changed a little."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and only in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def _same_actions(subject: PolicySubject, first: Policy, second: Policy) -> None:
    one, other = (subject.acted(policy)[1] for policy in (first, second))
    require(torch.equal(one.actions, other.actions), "actions of equal weights differ")
    require(torch.equal(one.log_probs, other.log_probs), "log-probs of equal weights differ")


def _trained(subject: PolicySubject, **settings: Any) -> dict[str, Tensor]:
    return _train(subject, subject.batch, Replicas(), **settings)


def _train(
    subject: PolicySubject, batch: Batch, ranks: Ranks | Replicas, **settings: Any
) -> dict[str, Tensor]:
    """Weights after two updates that make what was done likelier."""
    config = RowTrainerConfig(global_batch_size=_ROWS, micro_batch_size=_ROWS // 2, **settings)
    trainer = Trainer(
        {POLICY: subject.policy()},
        Supervised("model" if subject.imitates else "likelihood"),
        config,
        ranks=ranks,
        total_steps=2,
        seed=0,
    )
    for step in range(2):
        metrics = trainer.train([batch], step)
        require(math.isfinite(metrics["actor/loss"]), "the loss is not finite")
    found = {name: tensor.detach().float().cpu().clone() for name, tensor in trainer.weights()}
    # Adam hides the scale of gradients.
    found |= {name: torch.tensor(metrics[f"actor/{name}"]) for name in ("loss", "grad_norm")}
    trainer.close()
    return found


def _far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference; of numbers above 1, such as a norm of gradients, as a share."""
    require(one.keys() == other.keys(), "other tensors are trained")
    worst = 0.0
    for name, tensor in one.items():
        close = torch.allclose(tensor, other[name], rtol=1e-3, atol=2e-4)
        require(close, f"{name} is another after two updates")
        share = (tensor - other[name]).abs() / tensor.abs().clamp(min=1.0)
        worst = max(worst, float(share.max()) if tensor.numel() else 0.0)
    return worst


def _near(one: Tensor, other: Tensor, what: str, *, bound: float = _BOUND) -> float:
    distances = (one.detach() - other.detach()).abs()
    difference = float(distances.max()) if distances.numel() else 0.0
    require(difference <= bound, f"{what} differ by {difference:.2e}, bound {bound:g}")
    return difference


def _shapes(policy: Policy) -> str:
    return ", ".join(f"{n} {list(s.shape)} {s.kind}" for n, s in policy.noise.items())
