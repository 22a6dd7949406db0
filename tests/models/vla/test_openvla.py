"""OpenVLA and OpenVLA-OFT as policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from rlinf.algorithms.supervised import Supervised
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.adapters import adapt_policy
from rlinf.models.config import REGISTRY
from rlinf.models.language_config import AdapterConfig
from rlinf.models.vla.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from rlinf.runners.embodied_evaluation import acting_weights
from rlinf.trainers.config import RowTrainerConfig
from rlinf.trainers.modules import POLICY
from rlinf.trainers.trainer import Trainer

CHUNK, ACTIONS = 2, 4
FIXTURE = Path(__file__).parent / "parity" / "openvla"
CONFIGS = {"openvla": OpenVLAConfig, "openvla_oft": OpenVLAOFTConfig}


def _spec(**replaced):
    values = {
        "observation_shapes": {"states": (5,), "main_images": (64, 64, 3), "task_ids": ()},
        "observation_dtypes": {"states": "float32", "main_images": "uint8", "task_ids": "int64"},
        "action_kind": "continuous",
        "action_dim": ACTIONS,
        "action_low": (-1.0,) * ACTIONS,
        "action_high": (1.0,) * (ACTIONS - 1) + (0.5,),
        "task_descriptions": ("Open the drawer", "close the big drawer now"),
        "max_episode_steps": 20,
    }
    return EnvSpec(**{**values, **replaced})


def _build(kind, spec=None, *, value_dim=1, seed=0, **options):
    given = {"preset": "tiny", "num_action_chunks": CHUNK, **options}
    config = CONFIGS[kind].model_validate(given)
    return config.build(spec or _spec(), value_dim=value_dim, seed=seed).eval()


def _seen(rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "states": torch.randn(rows, 5, generator=generator),
        "main_images": torch.randint(0, 256, (rows, 64, 64, 3), generator=generator).byte(),
        "task_ids": torch.arange(rows) % 2,
    }


def _noise(rows=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {"actions": torch.rand(rows, CHUNK, ACTIONS, generator=generator)}


@pytest.fixture(scope="module")
def policies():
    return {kind: _build(kind, temperature=1.6, top_k=40) for kind in CONFIGS}


@pytest.fixture(params=CONFIGS)
def policy(request, policies):
    return policies[request.param]


def test_they_are_in_the_table_and_small(policy):
    assert CONFIGS.keys() <= set(REGISTRY.names())
    assert sum(parameter.numel() for parameter in policy.parameters()) <= 3_000_000


def test_training_sees_what_was_drawn(policy):
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, _noise())
    assert sample.actions.shape == sample.log_probs.shape == (3, CHUNK, ACTIONS)
    assert bool((sample.actions <= policy.action_high).all())
    found = policy.evaluate_actions({**seen, **sample.forward_inputs})
    difference = float((found.log_probs - sample.log_probs).detach().abs().max())
    assert difference <= (0 if policy._config.type == "openvla_oft" else 1e-5)
    assert torch.allclose(found.values, policy.value(seen), atol=1e-5)
    assert torch.allclose(found.values, sample.values, atol=1e-5)
    assert bool((found.entropy > 0).all())
    assert float(found.entropy.detach().max()) <= torch.tensor(40.0).log() + 1e-5
    (found.log_probs.sum() + found.values.sum()).backward()
    assert [name for name, each in policy.named_parameters() if each.grad is None] == []
    policy.zero_grad()


def test_training_keeps_the_temperature_of_the_draw(policy):
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, _noise())
    kind = policy._config.type
    other = _build(kind, temperature=0.5, top_k=0)
    with torch.no_grad():
        found = other.evaluate_actions({**seen, **sample.forward_inputs}).log_probs
    assert (found - sample.log_probs).abs().max() < 1e-5
    assert sample.forward_inputs["temperature"].tolist() == pytest.approx([1.6] * 3)
    assert sample.forward_inputs["top_k"].tolist() == [40] * 3


def test_a_token_that_has_left_the_top_k_since_its_draw_still_counts(policy):
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, _noise())
        # As if training had since made all of them the least likely: other tokens were drawn.
        tokens = 255 - sample.forward_inputs["action_tokens"]
        given = {**sample.forward_inputs, "action_tokens": tokens}
        found = policy.evaluate_actions({**seen, **given})
    assert bool(found.log_probs.isfinite().all())
    assert bool(found.entropy.isfinite().all())


def test_a_row_does_not_depend_on_the_others(policy):
    seen, noise = _seen(4), _noise(4)
    with torch.no_grad():
        whole = policy.sample(seen, noise)
        halves = [
            policy.sample({k: v[i : i + 2] for k, v in seen.items()},
                          {k: v[i : i + 2] for k, v in noise.items()})
            for i in (0, 2)
        ]  # fmt: skip
    assert torch.equal(whole.actions, torch.cat([half.actions for half in halves]))


def test_without_noise_the_most_probable_tokens_are_taken(policy):
    seen = _seen()
    with torch.no_grad():
        first, second = policy.sample(seen, None), policy.sample(seen, None)
        drawn = policy.sample(seen, _noise())
    assert torch.equal(first.actions, second.actions)
    assert not torch.equal(first.actions, drawn.actions)
    if policy._config.type == "openvla_oft":
        assert bool((first.log_probs >= drawn.log_probs).all())


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = _build("openvla_oft", seed=3).state_dict()
    torch.manual_seed(6)
    second, third = (_build("openvla_oft", seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_supervised_errors_are_those_of_the_tokens(policy):
    seen = _seen()
    actions = torch.rand(3, CHUNK, ACTIONS) * 1.5 - 1
    errors = policy.imitation_errors({**seen, "raw_actions": actions})
    assert errors.shape == (3, CHUNK, ACTIONS)
    normalised = 2 * (actions + 1) / (policy.action_high + 1 + 1e-8) - 1
    tokens = policy.tokens.encode(normalised.clamp(-1, 1))
    with torch.no_grad():
        found = policy.evaluate_actions({
            **seen, "action_tokens": tokens, "temperature": torch.ones(3),
            "top_k": torch.zeros(3, dtype=torch.int64),
        })  # fmt: skip
    assert torch.allclose(errors, -found.log_probs, atol=1e-5)


def test_imitation_learns_what_is_shown():
    policy = _build("openvla_oft", value_dim=0).train()
    seen = _seen(2)
    actions = torch.tensor([[[0.9, -0.9, 0.1, 0.4]] * CHUNK, [[-0.5, 0.5, -0.1, -0.8]] * CHUNK])
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.imitation_errors({**seen, "raw_actions": actions}).mean().backward()
        optimizer.step()
    with torch.no_grad():
        acted = policy.eval().sample(seen, None).actions
    assert (acted - actions).abs().max() < 0.02


def test_regression_imitates_and_is_not_explored():
    policy = _build("openvla_oft", head="regression", proprioception=True, film=True, value_dim=0)
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, None)
    target = sample.actions.clone()
    assert policy.imitation_errors({**seen, "raw_actions": target}).max() < 1e-5
    with pytest.raises(ConfigError, match="no log-probs"), torch.no_grad():
        policy.sample(seen, _noise())
    with pytest.raises(ConfigError, match="no log-probs"):
        policy.evaluate_actions({**seen, **sample.forward_inputs})
    assert not policy.evaluation_noise


@pytest.mark.parametrize("part", ["main_images", "states", "task_ids"])
def test_each_observation_matters(part):
    policy = _build("openvla_oft", proprioception=True, film=True)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".film." in name:
                parameter.fill_(0.01)
    seen, other = _seen(1), _seen(1, seed=9)
    other["task_ids"] = torch.ones(1, dtype=torch.int64)
    given = {name: (other if name == part else seen)[name] for name in seen}
    with torch.no_grad():
        first, second = (policy.sample(each, None).log_probs for each in (seen, given))
    assert (first - second).abs().max() > 1e-6


def test_several_views_are_read():
    shapes = {"main_images": (64, 64, 3), "wrist_images": (2, 48, 64, 3)}
    spec = _spec(
        observation_shapes=shapes, observation_dtypes=dict.fromkeys(shapes, "uint8"),
        task_descriptions=("open it",),
    )  # fmt: skip
    policy = _build("openvla_oft", spec, cameras=["main_images", "wrist_images"])
    seen = {name: torch.zeros(2, *shape, dtype=torch.uint8) for name, shape in shapes.items()}
    with torch.no_grad():
        before = policy.sample(seen, None).log_probs
        seen["wrist_images"][:, 1] = 255
        assert not torch.equal(before, policy.sample(seen, None).log_probs)


def test_adapters_and_frozen_towers():
    policy = _build("openvla_oft")
    adapt_policy(policy, AdapterConfig(rank=2), seed=0)
    adapted = {n.rpartition(".lora_A")[0] for n, p in policy.named_parameters() if "lora_A" in n}
    last = {name.rpartition(".")[2] for name in adapted}
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv",
            "proj", "fc1", "fc2", "fc3", "lm_head"} == last  # fmt: skip
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith("value_head.") for name in trained)
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, _noise())
    found = policy.evaluate_actions({**seen, **sample.forward_inputs})
    assert torch.equal(found.log_probs, sample.log_probs)
    found.log_probs.sum().backward()
    assert policy.network.language_model.lm_head.lora_B.grad.abs().max() > 0
    frozen = _build("openvla_oft", freeze_vision=True)
    assert not any(p.requires_grad for p in frozen.network.vision_backbone.parameters())
    assert len(frozen.repeated_layers()) == 3 + 2 + 2


def test_half_precision_acts_and_trains_alike():
    from rlinf.models.adapters import in_precision

    policy = in_precision(_build("openvla_oft"), torch.bfloat16)
    seen = _seen()
    with torch.no_grad():
        sample = policy.sample(seen, _noise())
    found = policy.evaluate_actions({**seen, **sample.forward_inputs})
    assert sample.log_probs.dtype == found.values.dtype == torch.float32
    assert torch.equal(found.log_probs, sample.log_probs)


# -- a published directory ----------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    return write_directory(tmp_path / "model")


def write_directory(path):
    """The fixture with statistics of 7 action dimensions and a tokenizer of words."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(FIXTURE, path, dirs_exist_ok=True)
    words = ["<unk>", "<s>", "</s>", "▁", "open", "the", "drawer", *(f"w{i}" for i in range(313))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path / "tokenizer.json"))
    one = {"q01": [-1.0] * 7, "q99": [0.5] * 7, "mask": [True] * 6 + [False]}
    states = {"q01": [-2.0] * 5, "q99": [2.0] * 5}
    (path / "dataset_statistics.json").write_text(
        json.dumps({"own": {"action": one, "proprio": states}})
    )
    return path


def without(path, *parts):
    """The same directory without files of these parts; of none that is named, without all."""
    for part in parts or ("action_head", "proprio_projector", "vision_backbone"):
        for file in path.glob(f"{part}--*"):
            file.unlink()
    return path


WIDE = {"action_dim": 7, "action_low": (-1.0,) * 7, "action_high": (1.0,) * 7,
        "task_descriptions": ("Open the drawer",)}  # fmt: skip


def _published(path, kind="openvla_oft", spec=None, **options):
    given = {"preset": None, "path": path, "statistics_key": "own", **options}
    return _build(kind, spec or _spec(**WIDE), **given)


def test_a_published_directory_is_a_policy(directory):
    policy = _published(
        directory, head="regression", proprioception=True, film=True, value_dim=0, center_crop=True
    )
    ids = policy.instructions.ids[0].tolist()
    assert (ids[0], ids[-1]) == (1, 3)
    assert [4, 5, 6] in [ids[i : i + 3] for i in range(len(ids))]  # open the drawer, in lower case
    with torch.no_grad():
        seen = {name: value for name, value in _seen().items() if name != "task_ids"}
        actions = policy.sample(seen, None).actions
    assert actions.shape == (3, CHUNK, 7)
    assert policy.base.startswith("sha256:")
    tokens = _published(without(directory), kind="openvla", num_action_chunks=1)
    assert tokens.tokens.first_id == 64
    centers = tokens._to_env(tokens.tokens.decode(torch.zeros(1, 1, 7).long()), {})
    # -1 … 1 of what is normalised become q01 … q99; the gripper is as it is.
    assert centers[0, 0].tolist() == pytest.approx([0.75 * 254 / 255 - 0.25] * 6 + [254 / 255])


@pytest.mark.parametrize("half", ["norm", "language_model"])
def test_files_of_mixed_precision_compute_in_float32(directory, half):
    file = without(directory) / "model.safetensors"
    stored = load_file(file)
    save_file({n: t.bfloat16() if half in n else t for n, t in stored.items()}, file)
    policy = _published(directory)
    assert {each.dtype for each in policy.network.parameters()} == {torch.float32}
    assert policy.sample({**_seen(), "task_ids": torch.zeros(3, dtype=torch.int64)}, None)


@pytest.mark.parametrize("normalization", ["quantiles", "bounds"])
def test_states_are_read_in_the_units_of_their_statistics(directory, normalization):
    low, high = torch.tensor([-2.0, -1.0, 0.0, 5.0, -0.1]), torch.tensor([2.0, 3.0, 0.5, 9.0, 0.0])
    actions = {"q01": [-1.0] * 7, "q99": [0.5] * 7}
    states = {"q01": low.tolist(), "q99": high.tolist()}
    if normalization == "bounds":
        names = {"q01": "min", "q99": "max"}
        actions, states = ({names[n]: v for n, v in d.items()} for d in (actions, states))
    file = directory / "dataset_statistics.json"
    file.write_text(json.dumps({"own": {"action": actions, "proprio": states}}))
    without(directory, "action_head")
    policy = _published(directory, proprioception=True, film=True, normalization=normalization)
    inside = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)) * (high - low) + low
    given = torch.cat([inside, high[None] + 7.0, low[None] - 7.0])
    wanted = torch.cat(
        [2 * (inside - low) / (high - low) - 1, torch.tensor([[1.0], [-1.0]]).expand(2, 5)]
    )  # what lies beyond the statistics is clipped
    assert torch.allclose(policy._states({"states": given}), wanted, atol=1e-5)
    seen = {**_seen(1), "task_ids": torch.tensor([0])}
    with torch.no_grad():  # and it is what the network reads
        near, far, inside = (
            policy.sample({**seen, "states": each[None]}, None).log_probs
            for each in (high + 1, high + 50, low)
        )
    assert torch.equal(near, far)
    assert not torch.equal(near, inside)


def test_weights_that_read_states_as_they_are_are_refused(directory, tmp_path):
    """Those of an earlier version, which left them so, say nothing of it."""
    file, checkpoint = tmp_path / "policy.safetensors", {"actor": {"trainer": {}}}
    without(directory, "action_head")
    policy = _published(directory, proprioception=True, film=True)
    config, plain = policy._config, OpenVLAOFTConfig(preset="tiny", proprioception=True)
    header = config.header()
    assert header["state_scaling"] == policy.state_scaling == "quantiles"
    assert "state_scaling" not in plain.header()  # of the bounds of actions alone
    save_file({"x": torch.zeros(1)}, file, metadata=header)
    config.require_own_weights(file, key="weights")
    del header["state_scaling"]
    save_file({"x": torch.zeros(1)}, file, metadata=header)
    plain.require_own_weights(file, key="weights")
    with pytest.raises(ConfigError, match=r"^weights: .* read states as they are, .* \(quantiles"):
        config.require_own_weights(file, key="weights")
    with pytest.raises(ConfigError, match=r"^model\.proprioception: the checkpoint was trained"):
        acting_weights(checkpoint, config)
    sizes = RowTrainerConfig(global_batch_size=4, micro_batch_size=2)
    trainer = Trainer({POLICY: policy}, Supervised("likelihood"), sizes, total_steps=1, seed=0)
    numbers = trainer.numbers()
    trainer.load_numbers(numbers)
    del numbers["state_scaling"]
    with pytest.raises(ConfigError, match=r"^model\.proprioception: the checkpoint was trained"):
        trainer.load_numbers(numbers)


@pytest.mark.parametrize("count", [3, 8])
def test_statistics_of_other_states_are_refused_where_states_are_read(directory, count):
    file = directory / "dataset_statistics.json"
    held = json.loads(file.read_text())
    held["own"]["proprio"] = {"q01": [-2.0] * count, "q99": [2.0] * count}
    file.write_text(json.dumps(held))
    with pytest.raises(ConfigError, match=f"of {count} state dimensions, .* gives 5") as told:
        _published(directory, proprioception=True)
    assert told.value.key == "model.statistics"
    _published(without(directory))  # which reads none


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        ({"statistics_key": "bridge"}, {}, r"^model\.statistics_key: .* no statistics of `bridge`"),
        ({}, {"action_dim": 4, "action_low": (-1,) * 4, "action_high": (1,) * 4},
         "7 action dimensions, the environment takes 4"),
        ({"max_prompt_tokens": 5}, {}, "at most 5; legal with it"),
        ({"proprioception": True}, {"observation_shapes": {"main_images": (64, 64, 3)}},
         "reads states of 5 dimensions, the environment gives 0"),
        ({"cameras": ["wrist_images"]}, {}, "does not show 'wrist_images'"),
        ({}, {"task_descriptions": ()}, "does not say in words"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(directory, options, spec, message):
    with pytest.raises(ConfigError, match=message):
        _published(directory, spec=_spec(**{**WIDE, **spec}), **options)


PARTS = {"head": "regression", "proprioception": True, "film": True}


@pytest.mark.parametrize("left_out", PARTS)
def test_a_part_that_a_model_was_trained_with_is_not_left_out(directory, left_out):
    given = {key: value for key, value in PARTS.items() if key != left_out}
    told = rf"trained with and .* nearest: type: openvla_oft with {left_out}: (true|regression), or"
    (directory / "model.safetensors").unlink()  # before a weight is read
    with pytest.raises(ConfigError, match=told) as refused:
        _published(directory, value_dim=0, **given)
    assert refused.value.key == "model.path"


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_a_model_with_parts_of_its_own_does_not_act_by_tokens(directory, kind):
    told = r"holds action_head--1_checkpoint\.pt, proprio_.* with head: regression, proprioception:"
    with pytest.raises(ConfigError, match=told):
        _published(directory, kind=kind, num_action_chunks=1)
    _published(without(directory), kind=kind, num_action_chunks=1)


def test_a_tokenizer_without_actions_is_refused(directory):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"▁": 0, "a": 1}, unk_token="a")).save(
        str(directory / "tokenizer.json")
    )
    with pytest.raises(ConfigError, match="has 2 tokens, also the empty one"):
        _published(directory)


OWN = _spec(action_dim=3, action_low=(-1.0, -1.0, 0.0), action_high=(1.0, 1.0, 0.04),
            task_descriptions=("Open the drawer",))  # fmt: skip
STATED = {"actions": {"q01": [-0.9, -0.9, 0.0], "q99": [0.9, 0.9, 1.0]}}


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft", "qwen_vl"])
def test_conventions_say_how_statistics_are_meant(kind, tmp_path):
    file = tmp_path / "statistics.json"

    def built(statistics=STATED, **conventions):
        file.write_text(json.dumps(statistics))
        given = {"preset": "tiny", "statistics": file, "conventions": conventions}
        return REGISTRY.load(kind)(**given, num_action_chunks=CHUNK).build(OWN, value_dim=0)

    gripper = {"dimension": 2, "model_range": [0, 1], "env_range": [0, 0.04]}
    policy = built(gripper=gripper)
    acted = policy._to_env(torch.tensor([[[1.0, -1.0, 1.0]]]), {})
    assert torch.allclose(acted, torch.tensor([[[0.9, -0.9, 0.04]]]))
    built(delta_dimensions=[2])
    moved = {"actions": {"q01": [0.0, -0.9, -0.9], "q99": [0.04, 0.9, 0.9]}}
    built(moved, dimensions=[1, 2, 0])
    for given in ({}, {"gripper": gripper | {"dimension": 1}}):
        with pytest.raises(ConfigError, match="action dimension 2 goes from 0 to 1") as caught:
            built(**given)
        assert caught.value.key == "model.statistics"
    with pytest.raises(ConfigError, match=r"names 0, 1, 6, .* nearest: an order of 0 to 2") as told:
        built(dimensions=[0, 1, 6])
    assert told.value.key == "model.conventions.dimensions"
    wide = {"actions": {"q01": [-0.9] * 7, "q99": [0.9] * 7}}
    with pytest.raises(ConfigError, match="of 7 action dimensions, the environment takes 3"):
        built(wide, dimensions=[2, 1, 0])


@pytest.mark.parametrize("head", ["tokens", "regression"])
def test_what_is_told_of_actions_is_in_the_order_of_the_environment(head):
    order = [2, 0, 1]
    policies = [
        _build("openvla_oft", OWN, value_dim=0, head=head, conventions={"dimensions": used})
        for used in (None, order)
    ]
    seen = {**_seen(), "task_ids": torch.zeros(3, dtype=torch.int64)}
    actions = torch.rand(3, CHUNK, 3) * torch.tensor([1.0, 1.0, 0.04])
    in_order = torch.empty_like(actions)
    in_order[..., order] = actions
    with torch.no_grad():
        swapped = policies[1].imitation_errors({**seen, "raw_actions": actions})
        policies[0].action_units = policies[1].action_units
        plain = policies[0].imitation_errors({**seen, "raw_actions": in_order})
    assert torch.allclose(swapped, plain[..., order])
    if head == "tokens":
        with torch.no_grad():
            sample = policies[1].sample(seen, {"actions": torch.rand(3, CHUNK, 3)})
            again = policies[1].evaluate_actions({**seen, **sample.forward_inputs})
            errors = policies[1].imitation_errors({**seen, "raw_actions": sample.actions})
        assert torch.allclose(sample.log_probs, again.log_probs, atol=1e-5)
        # The first two tokens mean the same action, which is told as the second.
        told = policies[1]._in_env(sample.forward_inputs["action_tokens"]) != 0
        assert torch.allclose(-errors[told], again.log_probs[told], atol=1e-5)


def test_illegal_sections_are_refused():
    for given in ({"top_k": 300}, {"temperature": 0.0}, {"head": "regression", "top_k": 5}):
        with pytest.raises(ValidationError):
            OpenVLAOFTConfig.model_validate({"preset": "tiny", **given})
