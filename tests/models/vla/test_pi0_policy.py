from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from rlinf.cli.main import main
from rlinf.errors import ConfigError
from rlinf.models.adapters import adapt_policy, in_precision
from rlinf.models.config import REGISTRY
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy import draw_noise
from rlinf.models.policy_weights import travelling
from rlinf.models.vla.conversion import convert
from rlinf.models.vla.flow_matching import noisy_actions
from rlinf.models.vla.pi0.policy import PI0Policy
from rlinf.models.vla.pi0.prompts import (
    StatePrompts,
    published_encoder,
    state_head,
    tiny_encoder,
)
from rlinf.models.vla.preprocessing import square_pixels
from rlinf.models.vla.statistics_files import read_statistics
from tests.models.test_policies import env_spec
from tests.models.vla.test_loading import PARITY

ROWS, CHUNK, STEPS = 6, 4, 4
METHODS = ["flow_sde", "flow_noise", "flow_cps"]
SPEC = env_spec(
    observation_shapes={"states": (5,), "main_images": (48, 64, 3), "wrist_images": (64, 64, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8", "wrist_images": "uint8"},
    task_descriptions=("close the drawer",),
)


def build(kind: str, value_dim: int = 1, seed: int = 0, **options: Any) -> PI0Policy:
    given = {"preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": STEPS} | options
    config = REGISTRY.load(kind)(**given)
    policy = config.build(SPEC, value_dim=value_dim, seed=seed)
    assert isinstance(policy, PI0Policy)
    return policy


def seen(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pictures = {
        name: torch.randint(0, 256, (rows, *SPEC.observation_shapes[name]), dtype=torch.uint8,
                            generator=generator)
        for name in ("main_images", "wrist_images")
    }  # fmt: skip
    return {"states": torch.rand(rows, 5, generator=generator) * 2 - 1, **pictures}


def drawn(policy: PI0Policy, rows: int = ROWS, seed: int = 5) -> dict[str, Tensor]:
    return draw_noise(policy.noise, (rows,), torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=METHODS)
def policy(request: pytest.FixtureRequest, kind: str) -> PI0Policy:
    return build(kind, method=request.param)


def test_tiny_is_small_and_depends_on_the_seed_alone(kind: str) -> None:
    first, again, other = (build(kind, seed=seed).state_dict() for seed in (0, 0, 1))
    assert sum(tensor.numel() for tensor in first.values()) < 3e6
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_replayed_chains_have_the_very_log_probs_and_values(policy: PI0Policy) -> None:
    sample = policy.sample(seen(), drawn(policy))
    found = policy.evaluate_actions(seen() | sample.forward_inputs)

    assert sample.actions.shape == found.log_probs.shape == (ROWS, CHUNK, 3)
    assert torch.equal(found.log_probs, sample.log_probs)
    assert sample.values is not None
    assert torch.equal(found.values, sample.values)
    torch.testing.assert_close(policy.value(seen()), sample.values, atol=1e-6, rtol=0)
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    assert bool(((sample.actions >= low) & (sample.actions <= high)).all())


def test_log_probs_are_those_of_torch_summed_over_random_steps(policy: PI0Policy) -> None:
    config, observations = policy._config, seen()
    sample = policy.sample(observations, drawn(policy))
    chain = sample.forward_inputs["chain"]
    with torch.no_grad():
        prefix, states = policy._read(observations)
        if config.all_random:
            expected = Normal(0.0, 1.0).log_prob(chain[:, 0])
            for step in range(STEPS):
                mean, std = policy._move(prefix, states, chain[:, step], step)
                expected = expected + Normal(mean, std).log_prob(chain[:, step + 1])
        else:
            which = sample.forward_inputs["step_index"]
            mean, std = policy._move(prefix, states, chain[:, 0], which)
            expected = Normal(mean, std).log_prob(chain[:, 1])
    torch.testing.assert_close(sample.log_probs, expected[:, :CHUNK, :3], atol=2e-5, rtol=1e-5)


def test_each_row_draws_its_own_random_step(kind: str) -> None:
    policy = build(kind)
    observations = {name: each[:1].expand(64, *each.shape[1:]) for name, each in seen().items()}
    found = policy.sample(observations, drawn(policy, 64)).forward_inputs["step_index"]
    assert set(found.tolist()) == set(range(STEPS))
    last_is_left_out = build(kind, method="flow_cps")
    found = last_is_left_out.sample(observations, drawn(policy, 64)).forward_inputs["step_index"]
    assert set(found.tolist()) == set(range(STEPS - 1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_evaluation_is_the_ode_from_zero_or_from_noise(
    policy: PI0Policy, deterministic: bool
) -> None:
    assert policy.evaluation_noise.keys() == {"start"}
    noise = draw_noise(policy.evaluation_noise, (ROWS,), torch.Generator().manual_seed(5))
    sample = policy.sample(seen(), None if deterministic else noise)
    x = torch.zeros(ROWS, CHUNK, 3) if deterministic else noise["start"]
    with torch.no_grad():
        prefix, states = policy._read(seen())
        for step in range(STEPS):
            time = torch.full((ROWS,), 1 - step / STEPS)
            x = x - policy.network.denoise(prefix, x, time, states)[0] / STEPS
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    expected = ((x + 1) / 2 * (high - low) + low).clamp(low, high)
    torch.testing.assert_close(sample.actions, expected, atol=1e-5, rtol=0)


def test_pictures_and_text_are_read_once(policy: PI0Policy) -> None:
    calls: list[str] = []
    handle = policy.network.language.register_forward_hook(lambda *_: calls.append("language"))
    sample = policy.sample(seen(), drawn(policy))
    assert calls == ["language"]
    policy.evaluate_actions(seen() | sample.forward_inputs)
    assert calls == ["language"] * 2
    handle.remove()


def test_gradients_reach_all_parts(policy: PI0Policy) -> None:
    sample = policy.sample(seen(), drawn(policy))
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    policy.zero_grad()
    (found.log_probs.sum() + found.values.sum()).backward()
    names = {name for name, each in policy.named_parameters() if each.grad is not None}
    for part in ("network.vision.patch_embedding", "network.language.embed_tokens",
                 "network.expert.layers.0", "network.action_in_proj", "value_head"):  # fmt: skip
        assert any(name.startswith(part) for name in names), part
    assert any("noise_head" in name for name in names) == (policy.noise_head is not None)
    assert bool(found.entropy.requires_grad) == (policy.noise_head is not None)


def test_frozen_parts_get_no_gradient_and_do_not_travel(kind: str) -> None:
    policy = build(kind, train_expert_only=True, detach_values=True)
    sample = policy.sample(seen(), drawn(policy))
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    found.values.sum().backward()
    with_gradient = {name for name, each in policy.named_parameters() if each.grad is not None}
    assert with_gradient
    assert all(name.startswith("value_head") for name in with_gradient)
    assert not any("language" in name or "vision" in name for name in travelling(policy))


def test_a_view_that_is_left_out_is_a_masked_one(kind: str) -> None:
    policy = build(kind, cameras=["main_images", None, "wrist_images"])
    one = build(kind, cameras=["main_images", None])
    noise = drawn(policy)
    both, alone = policy.sample(seen(), noise), one.sample(seen(), noise)
    assert not torch.equal(both.actions, alone.actions)

    whole = policy.network.prefix

    def masked(pixels: Tensor, mask: Tensor, *told: Tensor) -> Any:
        mask = mask.clone()
        mask[:, 1] = False
        return whole(pixels, mask, *told)

    policy.network.prefix = masked  # type: ignore[method-assign]
    torch.testing.assert_close(policy.sample(seen(), noise).actions, alone.actions)


def test_the_state_is_read(kind: str) -> None:
    policy, noise = build(kind), None
    moved = seen() | {"states": -seen()["states"]}
    changed = policy.sample(moved, noise).actions - policy.sample(seen(), noise).actions
    assert changed.abs().max() > 1e-3
    if kind == "pi05":
        deaf = build(kind, state_in_prompt=False)
        assert torch.equal(deaf.sample(moved, noise).actions, deaf.sample(seen(), noise).actions)


def test_imitation_is_flow_matching(kind: str) -> None:
    policy = build(kind, value_dim=0)
    noise = draw_noise(policy.imitation_noise, (ROWS,), torch.Generator().manual_seed(1))
    raw = torch.tensor(SPEC.action_low) + 0.3 * torch.rand(ROWS, CHUNK, 3)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw} | noise)

    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    actions = 2 * (raw - low) / (high - low) - 1
    time = 0.001 + 0.999 * noise["time"] ** (1 / 1.5)
    x = time[:, None, None] * noise["noise"] + (1 - time[:, None, None]) * actions
    with torch.no_grad():
        prefix, states = policy._read(seen())
        velocity = policy.network.denoise(prefix, x, time, states)[0]
    torch.testing.assert_close(errors, (velocity - (noise["noise"] - actions)).square())
    errors.mean().backward()
    assert policy.network.vision.patch_embedding.weight.grad is not None


def test_fresh_adapters_change_nothing(kind: str) -> None:
    policy, plain = (build(kind, num_action_chunks=1).eval() for _ in range(2))
    adapt_policy(policy, AdapterConfig(rank=2), seed=3)
    one, other = (each.sample(seen(), drawn(plain)) for each in (policy, plain))
    assert torch.equal(one.log_probs, other.log_probs)
    assert torch.equal(one.actions, other.actions)
    names = list(plain.adapted_layers())
    for part in ("vision", "language", "expert"):
        assert any(f".{part}." in name for name in names)


def test_all_actions_of_the_horizon_are_learnt_where_fewer_are_executed(kind: str) -> None:
    """The first ones see the others: were these copies, they would give away what is asked for."""
    policy = build(kind, value_dim=0, horizon=2 * CHUNK)
    assert policy.imitated == (0, 2 * CHUNK)
    noise = draw_noise(policy.imitation_noise, (ROWS,), torch.Generator().manual_seed(1))
    raw = torch.tensor(SPEC.action_low) + 0.3 * torch.rand(ROWS, 2 * CHUNK, 3)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw} | noise)
    assert errors.shape == raw.shape
    with torch.no_grad():
        x, wanted = noisy_actions(policy.action_units.normalize(raw), noise["noise"],
                                  policy._training_time(noise["time"]))  # fmt: skip
        velocity = policy._denoise(*policy._read(seen()), x, policy._training_time(noise["time"]))
    torch.testing.assert_close(errors, (velocity[0] - wanted).square())


@pytest.mark.slow
def test_what_is_learned_is_done() -> None:
    """Overfit two pictures with two actions."""
    policy = build("pi05", value_dim=0, state_in_prompt=False, denoising_steps=4)
    observations, raw = seen(2), torch.tensor([[[0.6, 0.2, -1.0]], [[-0.5, -0.3, 1.4]]])
    raw = raw.expand(2, CHUNK, 3)
    inputs = {n: each.repeat(8, *[1] * (each.ndim - 1)) for n, each in observations.items()}
    inputs["raw_actions"] = raw.repeat(8, 1, 1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        noise = draw_noise(policy.imitation_noise, (16,), generator)
        optimizer.zero_grad()
        policy.imitation_errors(inputs | noise).mean().backward()
        optimizer.step()
    done = policy.sample(observations, drawn(policy, 2)).actions
    assert (done - raw).abs().mean() < 0.25
    assert (done.flip(0) - raw).abs().mean() > 0.6


@pytest.fixture
def published(tmp_path: Path, kind: str) -> Path:
    return write_published(tmp_path, kind)


def write_published(path: Path, kind: str) -> Path:
    """A directory as lerobot writes it, and beside it what a tokenizer and openpi do."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    shutil.copy(PARITY / kind / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps({"chunk_size": 8, "vision_heads": 4}))
    pieces = ["<bos>", "<unk>", *"0123456789", " ", ":", ",", ";", "\n", "close", "the", "drawer",
              "Task", "State", "Action", "-"]  # fmt: skip
    tokenizer = Tokenizer(WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\d|[A-Za-z]+|."), "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    seven, five = [-1.0] * 7, [-1.0] * 5
    stats = {
        name: {"mean": [0.1] * len(low), "std": [0.5] * len(low), "q01": low,
               "q99": [1.0] * len(low)}
        for name, low in (("state", five), ("actions", seven))
    }  # fmt: skip
    (path / "assets" / "a").mkdir(parents=True)
    (path / "assets" / "a" / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return path


SEVEN = env_spec(
    observation_shapes={"states": (5,), "main_images": (56, 56, 3)},
    task_descriptions=("close the drawer",),
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
)


def test_a_published_directory_becomes_the_policy(published: Path, kind: str) -> None:
    config = REGISTRY.load(kind)(path=published, num_action_chunks=5, denoising_steps=4)
    config.check()
    policy = config.build(SEVEN, value_dim=1, seed=0)
    stored = load_file(published / "model.safetensors")
    name = "action_out_proj.weight"
    assert torch.equal(policy.network.state_dict()[name], stored[f"model.{name}"])
    assert (policy.horizon, policy.chunk) == (8, 5)

    generator = torch.Generator().manual_seed(0)
    noise = draw_noise(policy.noise, (2,), generator)
    observations = {
        "states": torch.rand(2, 5, generator=generator),
        "main_images": torch.zeros(2, 56, 56, 3, dtype=torch.uint8),
    }
    sample = policy.sample(observations, noise)
    chain = sample.forward_inputs["chain"]
    again = policy.evaluate_actions(observations | sample.forward_inputs)
    assert chain.shape == (2, 2, 8, 7)
    assert torch.equal(again.log_probs, sample.log_probs)
    raw = torch.zeros(2, 8, 7)
    given = policy._to_model(raw, {})
    expected = {"pi0": -0.1 / 0.5, "pi05": 0.0}[kind]
    torch.testing.assert_close(given, torch.full((2, 8, 7), expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(policy._to_env(given, {}), raw[:, :5], atol=1e-5, rtol=0)


def test_what_openpi_trains_has_no_config_json(published: Path, kind: str) -> None:
    """Of scripts/train_pytorch.py: weights, optimizer.pt, metadata.pt and assets."""
    wanted = REGISTRY.load(kind)(path=published, num_action_chunks=5).build(SEVEN)
    (published / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.horizon: is null, and .* does not say"):
        REGISTRY.load(kind)(path=published, num_action_chunks=5).build(SEVEN)
    config = REGISTRY.load(kind)(path=published, num_action_chunks=5, horizon=8)
    config.check()
    policy = config.build(SEVEN)
    assert policy.horizon == 8
    stored = wanted.network.state_dict()
    found = policy.network.state_dict()
    assert all(torch.equal(each, stored[name]) for name, each in found.items())
    (published / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json; nearest"):
        config.check()


def test_weights_to_begin_with_are_not_rounded_to_the_format_of_their_base(
    published: Path, kind: str, tmp_path: Path
) -> None:
    file = published / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file)
    given: dict[str, Any] = {"path": published, "num_action_chunks": 5}
    trained = in_precision(REGISTRY.load(kind)(**given).build(SEVEN), torch.float32)
    wanted = {name: each + 1e-4 for name, each in trained.state_dict().items()}
    save_file(wanted, tmp_path / "policy.safetensors")
    policy = REGISTRY.load(kind)(**given, weights=tmp_path / "policy.safetensors").build(SEVEN)
    found = policy.state_dict()
    assert all(torch.equal(each, wanted[name]) for name, each in found.items())


@pytest.mark.parametrize("name", ["openpi", "transformers-4.51", "lerobot-0.6"])
def test_pictures_are_scaled_as_the_program_of_the_weights_does(
    published: Path, kind: str, name: str
) -> None:
    _, tensors = convert(published, name)
    save_file({each: tensor.clone() for each, tensor in tensors.items()},
              published / "model.safetensors")  # fmt: skip
    policy = REGISTRY.load(kind)(path=published, num_action_chunks=5).build(SEVEN)
    generator = torch.Generator().manual_seed(0)
    views = torch.randint(0, 256, (2, 80, 100, 3), generator=generator).byte()
    found = policy._pixels(views)
    assert torch.equal(found, square_pixels(views, 56, filtered=name != "lerobot-0.6"))


def test_other_views_than_the_model_was_trained_on_are_told(
    published: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = published / "config.json"
    names = ("images.front", "images.wrist", "images.empty_camera_0")
    seen = {f"observation.{name}": {"type": "VISUAL", "shape": [3, 64, 64]} for name in names}
    seen["observation.state"] = {"type": "STATE", "shape": [5]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "input_features": seen}))

    def warned(cameras: list[str | None]) -> bool:
        caplog.clear()
        REGISTRY.load(kind)(path=published, num_action_chunks=5, cameras=cameras).build(SEVEN)
        return "trained on 2 pictures (observation.images.front, obs" in caplog.text

    assert warned(["main_images"])
    assert not warned(["main_images", None])
    assert not warned(["main_images", "main_images"])


def test_files_of_mixed_precision_compute_in_float32(published: Path, kind: str) -> None:
    file = published / "model.safetensors"
    stored = load_file(file)
    save_file({n: t if "norm" in n else t.bfloat16() for n, t in stored.items()}, file)
    policy = REGISTRY.load(kind)(path=published, num_action_chunks=5).build(SEVEN)
    assert {each.dtype for each in policy.network.parameters()} == {torch.float32}
    pictures = torch.zeros(2, 56, 56, 3, dtype=torch.uint8)
    assert policy.sample({"states": torch.zeros(2, 5), "main_images": pictures}, None)


def test_another_type_is_refused(published: Path, kind: str) -> None:
    other = {"pi0": "pi05", "pi05": "pi0"}[kind]
    with pytest.raises(ConfigError, match=f"holds {kind}, not {other}") as caught:
        REGISTRY.load(other)(path=published, num_action_chunks=5).build(SEVEN)
    assert caught.value.key == "model.type"
    with pytest.raises(ConfigError, match="nearest: 8"):
        REGISTRY.load(kind)(path=published, num_action_chunks=9).build(SEVEN)


def test_states_that_are_too_wide_are_refused(published: Path, kind: str) -> None:
    if kind == "pi05":
        pytest.skip("it is told the state as text")
    for file in published.rglob("norm_stats.json"):
        stats = json.loads(file.read_text())
        state = stats["norm_stats"]["state"]  # of another robot
        stats["norm_stats"]["state"] = {name: list(range(39)) for name in state}
        file.write_text(json.dumps(stats))
    wide = replace(SEVEN, observation_shapes={"states": (39,), "main_images": (56, 56, 3)})
    with pytest.raises(ConfigError, match=r"have 39 .* reads 8; nearest: .* 8 or fewer, or that"):
        REGISTRY.load(kind)(path=published, num_action_chunks=5).build(wide)


@pytest.mark.parametrize("tiny", [True, False])
def test_the_state_is_told_as_written(published: Path, kind: str, tiny: bool) -> None:
    encoder = tiny_encoder() if tiny else published_encoder(published)
    prompts = StatePrompts(encoder, prompts=[state_head("close_the\ndrawer ")], limit=60, dim=3)
    states = torch.tensor([[-1.0, 0.0, 1.0], [-3.0, 0.999, -0.99], [-1.0001, 1.3, -1.3]])
    tokens, mask = prompts({"states": states}, states)
    # As openpi and lerobot write them.
    bins = np.digitize(states.numpy(), np.linspace(-1, 1, 257)[:-1]) - 1
    assert bins.tolist() == [[0, 128, 255], [-1, 255, 1], [-1, 255, -1]]
    for row, numbers in enumerate(bins.tolist()):
        text = f"Task: close the drawer, State: {' '.join(map(str, numbers))};\nAction: "
        assert tokens[row][mask[row]].tolist() == encoder[0](text)


def test_a_state_is_told_with_zeros_behind_it_as_lerobot_0_4_did() -> None:
    encoder, heads = tiny_encoder(), [state_head("close the drawer")]
    prompts = StatePrompts(encoder, prompts=heads, limit=60, dim=2, told=5)
    states = torch.tensor([[-1.0, 0.5]])
    tokens, mask = prompts({"states": states}, states)
    text = "Task: close the drawer, State: 0 192 128 128 128;\nAction: "
    assert tokens[mask].tolist() == encoder[0](text)
    with pytest.raises(ConfigError, match=r"is 1, .* states have 2 .*nearest: 2"):
        StatePrompts(encoder, prompts=heads, limit=60, dim=2, told=1)


@pytest.mark.parametrize(
    ("written", "options", "asked"),
    [
        ({"type": "pi05", "max_state_dim": 32}, {}, True),
        ({"type": "pi05", "max_state_dim": 32}, {"told_state_dim": None}, False),
        ({"type": "pi05", "max_state_dim": 32}, {"told_state_dim": 32}, False),
        ({"type": "pi05", "max_state_dim": 32}, {"state_in_prompt": False}, False),
        ({"type": "pi05", "max_state_dim": 32, "use_relative_actions": False}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_directory_that_may_tell_a_state_with_zeros_is_asked_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    written: dict[str, Any],
    options: dict[str, Any],
    asked: bool,
) -> None:
    settings = json.loads((write_published(tmp_path, "pi05") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | written))
    config = REGISTRY.load("pi05")(path=tmp_path, num_action_chunks=5, **options)
    policy = config.build(SEVEN, value_dim=0, seed=0)
    assert ("trained by lerobot 0.4" in caplog.text) == asked
    _, mask = policy._tokens({"states": torch.zeros(1, 5)}, torch.zeros(1, 5))
    told = 32 if options.get("told_state_dim") else 5
    each = 4  # a space and the figures of 128
    if policy.tells_state:
        head, tail = "Task: close the drawer, State:", ";\nAction: "
        pieces = sum(len(published_encoder(tmp_path)[1](text)) for text in (head, tail))
        assert int(mask.sum()) == 1 + pieces + told * each


def before_0_4(path: Path) -> dict[str, Tensor]:
    """π₀ in a directory as lerobot wrote it before 0.4, with statistics among the weights."""
    write_published(path, "pi0")
    shutil.rmtree(path / "assets")
    held = dict(convert(PARITY / "pi0", "lerobot-0.3")[1])
    for part, feature, dim in (("normalize_inputs", "observation_state", 5),
                               ("normalize_targets", "action", 7),
                               ("unnormalize_outputs", "action", 7)):  # fmt: skip
        held[f"{part}.buffer_{feature}.mean"] = torch.full((dim,), 0.25)
        held[f"{part}.buffer_{feature}.std"] = torch.full((dim,), 2.0)
    save_file({name: each.clone() for name, each in held.items()}, path / "model.safetensors")
    return held


def test_a_directory_of_lerobot_before_0_4_is_read_with_its_statistics(tmp_path: Path) -> None:
    before_0_4(tmp_path)
    config = REGISTRY.load("pi0")(path=tmp_path, num_action_chunks=5, denoising_steps=4)
    config.check()
    policy = config.build(SEVEN, value_dim=0, seed=0)
    known = read_statistics(tmp_path / "model.safetensors")
    for found in (policy._statistics, known):
        assert found.states.required("mean").tolist() == [0.25] * 5
        assert found.actions.required("std").tolist() == [2.0] * 7
    white = torch.full((1, 28, 56, 3), 255, dtype=torch.uint8)
    assert torch.equal(policy._pixels(white), square_pixels(white, 56, centred=False))
    (tmp_path / "other").mkdir()
    write_published(tmp_path / "other", "pi0")
    save_file(dict(convert(PARITY / "pi0", "lerobot-0.3")[1]), tmp_path / "other/model.safetensors")
    config = REGISTRY.load("pi0")(path=tmp_path / "other", num_action_chunks=5, denoising_steps=4)
    of_openpi = config.build(SEVEN, value_dim=0, seed=0)  # brought into this layout
    assert torch.equal(of_openpi._pixels(white), square_pixels(white, 56))


@pytest.mark.parametrize("layout", ["lerobot-0.3", "lerobot-0.6"])
def test_conversion_says_where_statistics_among_the_weights_stay(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    held, out = before_0_4(tmp_path / "old"), tmp_path / "new.safetensors"
    assert (
        main(["convert", "policy", str(tmp_path / "old"), "--to", layout, "--out", str(out)]) == 0
    )
    told = " ".join(capsys.readouterr().out.split())
    assert ("6 tensors of them. A run takes them by model.statistics" in told) == (
        layout == "lerobot-0.6"
    )
    assert "no part of the published model" not in told
    names = load_file(out).keys()
    assert names == held.keys() if layout == "lerobot-0.3" else len(names) == len(held) - 6


def test_a_state_that_is_too_long_to_tell() -> None:
    with pytest.raises(ConfigError, match="state_in_prompt: false") as caught:
        StatePrompts(tiny_encoder(), prompts=[state_head("a")], limit=20, dim=39)
    assert caught.value.key == "model.max_prompt_tokens"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "flow_noise", "noise_bounds": [0.2, 0.1]}, "0 < the first < the second"),
        ({"method": "flow_cps", "denoising_steps": 1}, "nearest: 2"),
        ({"horizon": 2}, "nearest: 4"),
        ({"method": "ode", "noise_level": 0.2}, "flow_sde or flow_cps, or leave it at 0.5"),
        ({"method": "flow_noise", "noise_level": 0.2}, "has no effect without method: flow_sde"),
        ({"noise_bounds": [0.1, 0.3]}, "has no effect without method: flow_noise"),
        ({"method": "ode", "random_steps": "all"}, "or leave it at null"),
        ({"cameras": ["main_images"] * 4}, "at most 3"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        build("pi05", **options)


def test_dimensions_of_a_model_without_statistics_have_the_bounds_of_the_environment() -> None:
    policy = build("pi0", conventions={"dimensions": [4, 1, 0]})
    low, high = policy.action_low, policy.action_high
    done = policy.sample(seen(), drawn(policy)).actions
    assert bool(((done >= low) & (done <= high)).all())
    raw = low + (high - low) * torch.rand(ROWS, CHUNK, 3)
    given = policy._to_model(raw, seen())
    torch.testing.assert_close(policy._to_env(given, seen()), raw)
    torch.testing.assert_close(given[..., 4], (2 * (raw - low) / (high - low) - 1)[..., 0])


def test_the_ode_is_not_trained() -> None:
    policy = build("pi0", method="ode")
    sample = policy.sample(seen(), drawn(policy))
    assert not sample.log_probs.any()
    with pytest.raises(ConfigError, match="flow_sde"):
        policy.evaluate_actions(seen() | sample.forward_inputs)
