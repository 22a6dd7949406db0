"""What a user may get wrong with a vision-language-action model, and the line that is said."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from rlinf.errors import ConfigError, in_section
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from rlinf.models.vla.statistics import ModelStatistics, Statistics
from tests.models.test_policies import env_spec
from tests.models.vla.test_loading import PARITY

SPEC = env_spec(
    observation_shapes={"states": (5,), "main_images": (56, 56, 3)},
    task_descriptions=("close the drawer",),
    action_dim=7,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
)
TINY = {"preset": "tiny"}


def content(actions: Any, states: int = 5) -> dict[str, Any]:
    """Statistics of these lowest and highest actions."""
    return {
        "actions": {"q01": actions[0], "q99": actions[1], "mean": [0.0] * len(actions[0]),
                    "std": [0.5] * len(actions[0])},
        "state": {"q01": [-1.0] * states, "q99": [1.0] * states, "mean": [0.0] * states,
                  "std": [1.0] * states},
    }  # fmt: skip


def statistics(directory: Path, actions: Any, states: int = 5) -> str:
    """A file of them."""
    (directory / "given.json").write_text(json.dumps({"norm_stats": content(actions, states)}))
    return str(directory / "given.json")


SEVEN = [-0.5] * 7, [0.5] * 7


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """π₀.₅ as a published directory."""
    found = tmp_path / "pi05"
    found.mkdir()
    words = tokenizers.models.WordLevel({"<bos>": 0, "<unk>": 1}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"\d|[A-Za-z]+|."), "isolated"
    )
    tokenizer.save(str(found / "tokenizer.json"))
    (found / "norm_stats.json").write_text(json.dumps({"norm_stats": content(SEVEN)}))
    shutil.copy(PARITY / "pi05" / "model.safetensors", found)
    (found / "config.json").write_text(json.dumps({"chunk_size": 8, "vision_heads": 4}))
    return found


def halved(directory: Path) -> Path:
    """Half of the tensors are gone."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2}, file)
    return directory


def untied(directory: Path) -> Path:
    """The output head is another one than the embeddings that it is tied to."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    (head,) = (name for name in tensors if name.endswith("paligemma.lm_head.weight"))
    embedding = head.replace("lm_head", "model.language_model.embed_tokens")
    save_file({**tensors, embedding: tensors[head] + 1.0}, file)
    return directory


def cut(directory: Path) -> Path:
    """The file ends in the middle, as after a download that broke off."""
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return directory


def quantized(directory: Path, dtype: torch.dtype) -> Path:
    """A weight is stored in eight bits."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    (name,) = (each for each in tensors if each.endswith("action_out_proj.weight"))
    save_file({**tensors, name: (100 * tensors[name]).to(dtype)}, file)
    return directory


def empty(directory: Path) -> Path:
    """A directory with nothing in it."""
    (directory / "empty").mkdir()
    return directory / "empty"


def trained(directory: Path) -> Path:
    """What a run left behind, of another type of model."""
    path = directory / "policy.safetensors"
    save_file({"actor.layers.0.weight": torch.zeros(2, 2)}, path, {"base": "pi0 tiny, seed 0"})
    return path


def written(directory: Path, name: str, text: str) -> Path:
    """Another content of a file."""
    (directory / name).write_text(text)
    return directory


def retold(directory: Path) -> Path:
    """A tokenizer with more words than the model has."""
    file = directory / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["vocab"] = {"<bos>": 0, "<unk>": 999}
    return written(directory, file.name, json.dumps(told))


CASES: dict[str, tuple[Any, str]] = {
    "neither path nor preset": (lambda _: {}, "neither is given of path and preset"),
    "both": (lambda d: {**TINY, "path": d}, "both are given of path and preset"),
    "a file as path": (lambda d: {"path": d / "model.safetensors"}, "is a file; nearest: the dir"),
    "a run's file as path": (lambda d: {"path": trained(d)}, "or `weights` for the policy"),
    "no directory": (lambda d: {"path": d / "nothing"}, r"no directory .*nothing; nearest"),
    "a horizon that nothing says": (
        lambda d: {"path": written(d, "config.json", '{"vision_heads": 4}')},
        r"^model\.horizon: is null, and .*pi05 does not say in a config\.json \(action_horizon\)",
    ),
    "an empty directory": (lambda d: {"path": empty(d)}, "has no config.json; nearest"),
    "no such weights": (lambda d: {**TINY, "weights": d / "nothing"}, "there is no file"),
    "weights of another model": (
        lambda d: {**TINY, "weights": trained(d)},
        r"^model\.weights: .* trained from other weights \(pi0 tiny, seed 0\)",
    ),
    "weights that are none": (
        lambda d: {**TINY, "weights": d / "config.json"}, r"^weights: .* holds no weights"
    ),
    "half a file of weights": (
        lambda d: {**TINY, "weights": cut(d) / "model.safetensors"}, "^weights: .* or was cut off"
    ),
    "a directory as weights": (
        lambda d: {**TINY, "weights": d}, r"^weights: .* is a directory; a run leaves its policy"
    ),
    "the directory of a run as weights": (
        lambda d: {**TINY, "weights": trained(d).parent}, r"nearest: \S*/policy\.safetensors$"
    ),
    "missing camera": (lambda d: {**TINY, "cameras": ["main_image"]}, "did you mean `main_images`"),
    "no camera": (lambda d: {**TINY, "cameras": [None]}, "name one"),
    "another type": (lambda d: {"path": d, "type": "pi0"}, "holds pi05, not pi0; nearest: pi05"),
    "another family": (
        lambda d: {"path": written(d, "config.json", '{"type": "act"}'), "type": "smolvla"},
        "^type: .* holds `act`, as its config.json says, and not smolvla; nearest: act, or",
    ),
    "an unknown model": (
        lambda d: {"path": written(d, "config.json", '{"type": "pi1", "model_type": "bert"}')},
        r"^path: .* holds `bert, pi1`, .* none of the models that are known: .*pi05, qwen2_5_vl",
    ),
    "half a checkpoint": (lambda d: {"path": halved(d)}, "holds no pi05: no vision"),
    "untied": (lambda d: {"path": untied(d)}, "which are one tensor of the model"),
    "a download that broke off": (lambda d: {"path": cut(d)}, "model.safetensors"),
    **{
        f"weights of {dtype}": (
            lambda d, dtype=dtype: {"path": quantized(d, dtype)},
            rf"^model\.path: .* other types .*: action_out_proj.weight \({dtype}\); nearest",
        )
        for dtype in (torch.int8, torch.float8_e4m3fn)
    },
    **{
        f"{chunk!r} actions at once": (
            lambda d, chunk=chunk: {"path": written(d, "config.json", json.dumps(
                {"chunk_size": chunk, "vision_heads": 4}))},
            rf"^model\.path: .* has chunk_size: {chunk!r} in its config.json, expected a whole",
        )
        for chunk in (0, -1, "8", 1_000_000_000)
    },
    "a long instruction": (
        lambda d: {**TINY, "state_in_prompt": False, "max_prompt_tokens": 2},
        "tokens, the model is given at most 2; legal with it",
    ),
    "a long instruction of SmolVLA": (
        lambda d: {**TINY, "type": "smolvla", "max_prompt_tokens": 2},
        "tokens, the model is given at most 2; legal with it",
    ),
    "a long instruction of OpenVLA": (
        lambda d: {**TINY, "type": "openvla", "max_prompt_tokens": 2},
        "tokens, the model is given at most 2; legal with it",
    ),
    "a long instruction, before the weights": (
        lambda d: {"path": halved(d), "state_in_prompt": False, "max_prompt_tokens": 2},
        "tokens, the model is given at most 2; legal with it",
    ),
    "another robot, before the weights": (
        lambda d: {"path": halved(d), "statistics": statistics(d, ([-0.5] * 14, [0.5] * 14))},
        "are of 14 action dimensions, the environment takes 7",
    ),
    "a long state": (lambda d: {**TINY, "max_prompt_tokens": 9}, "a state of 5 dimensions takes"),
    "a state that leaves the instruction too little": (
        lambda d: {**TINY, "max_prompt_tokens": 12},
        r"has 17 tokens, 9 of them of the state, .* at most 12; legal with it: 17 or more",
    ),
    "settings that are none": (
        lambda d: {"path": written(d, "config.json", "[]")}, "expected an object, not list"
    ),
    "actions relative to the state": (
        lambda d: {"path": written(d, "config.json", json.dumps(
            {"chunk_size": 8, "vision_heads": 4, "use_relative_actions": True}))},
        r"^model\.conventions\.delta_dimensions: .* use_relative_actions",
    ),
    "normalised by what the statistics lack": (
        lambda d: {"path": written(d, "config.json", json.dumps(
            {"normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}}))},
        "of actions have no min and max",
    ),
    "a tokenizer of another model": (
        lambda d: {"path": retold(d)}, r"gives token \d+, the model has 64; nearest: the tokenizer"
    ),
    "a gripper where there is none": (
        lambda d: {**TINY, "type": "openvla", "conventions": {"gripper": {"dimension": 9}}},
        r"^model\.conventions\.gripper\.dimension: names dimension 9",
    ),
    "another robot, with a gripper": (
        lambda d: {**TINY, "conventions": {"gripper": {"dimension": 6}},
                   "statistics": statistics(d, ([-0.5] * 14, [0.5] * 14))},
        "are of 14 action dimensions, the environment takes 7",
    ),
    "another robot": (
        lambda d: {**TINY, "statistics": statistics(d, ([-0.5] * 14, [0.5] * 14))},
        "are of 14 action dimensions, the environment takes 7",
    ),
    "states of another robot": (
        lambda d: {**TINY, "statistics": statistics(d, SEVEN, states=8)},
        "are of 8 state dimensions, the environment gives 5",
    ),
    "a key where there is none": (
        lambda d: {**TINY, "statistics": statistics(d, SEVEN), "statistics_key": "aloha"},
        "without a key to choose it by; nearest: leave `aloha` out",
    ),
    "statistics that turn the sign": (
        lambda d: {**TINY, "statistics": statistics(d, ([-0.5] * 7, [0.5] * 6 + [-0.6]))},
        r"a width below 0 in dimension 6 \(q01 -0.5, q99 -0.6\)",
    ),
    "a method of normalising without statistics": (
        lambda d: {**TINY, "type": "gr00t", "normalization": "quantiles"},
        "no effect without statistics or path or weights",
    ),
    "a tokenizer of a preset": (
        lambda d: {**TINY, "type": "wall_oss", "tokenizer": d}, "no effect without path; write path"
    ),
    "a dimension twice": (
        lambda d: {**TINY, "conventions": {"dimensions": (0, 1, 2, 3, 4, 5, 5)}},
        r"^model\.conventions\.dimensions: names dimension 5 twice",
    ),
    "actions not normalised": (
        lambda d: {**TINY, "statistics": statistics(d, ([-50.0] * 7, [50.0] * 7))},
        "the statistics",
    ),
}  # fmt: skip


def built(kind: str, given: dict[str, Any]) -> None:
    config = REGISTRY.load(kind)(**given)
    config.check()
    config.build(SPEC, value_dim=1, seed=0)


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(case: str, published: Path) -> None:
    make, told = CASES[case]
    given = make(published)
    kind = given.pop("type", "pi05")
    with pytest.raises((ConfigError, ValidationError), match=told) as refused:
        built(kind, given)
    if isinstance(refused.value, ConfigError):
        assert "\n" not in str(refused.value)


RAW = np.random.default_rng(0).uniform(-1, 1, (200, 7)).astype(np.float32)


@pytest.mark.parametrize("kind", ["openvla", "pi0", "pi05", "smolvla"])
@pytest.mark.parametrize(
    ("actions", "given", "told"),
    [
        (RAW, SEVEN, None),
        (RAW * 50, SEVEN, r"the recorded actions: action dimension 0 goes from -4\d.* to 4\d.*, "
         r"in the statistics of the model from -.* \(and so 6 more\); nearest: statistics of"),
        (RAW * [1, 0.02, 1, 1, 1, 1, 1], ([-0.01, *SEVEN[0][1:]], [0.01, *SEVEN[1][1:]]),
         "they fit with dimensions 0 and 1 swapped"),
        (RAW * 0 + np.nan, SEVEN, "goes from nan to nan"),
    ],
    ids=["its own", "not normalised", "swapped", "no numbers"],
)  # fmt: skip
def test_recorded_actions_are_held_against_the_statistics_of_the_model(
    kind: str, actions: Any, given: Any, told: str | None, tmp_path: Path
) -> None:
    file = Path(statistics(tmp_path, given))
    if kind in ("pi0", "smolvla"):  # which have mean and deviation
        spread = [high / 3 for high in given[1]]
        text = json.loads(file.read_text())
        text["norm_stats"]["actions"] = {"mean": [0.0] * 7, "std": spread}
        file.write_text(json.dumps(text))
    # The directory of a model whose weights are not there is enough.
    config = REGISTRY.load(kind)(path=tmp_path, statistics=file)
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        config.check_recorded(actions.astype(np.float32), None, key="path")


STATES = np.random.default_rng(1).normal([0, 1, -2, 0.04, 0], [1, 0.1, 3, 0.01, 0], (300, 5))
"""Of which the last never moves."""


def of_states(directory: Path, states: Any = STATES) -> Path:
    """Statistics of recorded states, as a file."""
    file = directory / "of_states.json"
    values = {"mean": states.mean(0), "std": states.std(0), "min": states.min(0),
              "max": states.max(0), "q01": np.quantile(states, 0.01, axis=0),
              "q99": np.quantile(states, 0.99, axis=0)}  # fmt: skip
    of_actions = {name: getattr(RAW, name)(0).tolist() for name in ("mean", "std", "min", "max")}
    of_actions |= {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    told = {name: each.tolist() for name, each in values.items()}
    file.write_text(json.dumps({"actions": of_actions, "state": told}))
    return file


READS: dict[str, dict[str, Any]] = {
    "pi0": {}, "pi05": {}, "smolvla": {}, "gr00t": {"normalization": "quantiles"}, "wall_oss": {},
    "act": {}, "diffusion": {}, "openvla_oft": {"proprioception": True},
}  # fmt: skip
READS_NONE: dict[str, dict[str, Any]] = {
    "pi05": {"state_in_prompt": False}, "openvla": {}, "openvla_oft": {}, "qwen_vl": {},
    "act": {"use_states": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: x, None),
        (lambda x: x * [1, 1, 1, 1, 0] + [2, 0.3, -9, 0.03, 0], None),  # elsewhere in the room
        (lambda x: x[:, :4], None),  # of an environment that the policy refuses
        (lambda x: x * 1000 + 0.001, r"the recorded states: dimension 0 goes from .* to .*, which "
         r"the model would read as .*\(and so [34] more\); nearest: statistics of this set"),
        (lambda x: x * [1, 1, 1, 57.3, 1], "dimension 3 goes from .* normalised units; nearest"),
        (lambda x: x * np.nan, "dimension 0 goes from nan to nan"),
    ],
    ids=["its own", "elsewhere", "of fewer dimensions", "other units", "one of them", "no numbers"],
)  # fmt: skip
def test_recorded_states_are_held_against_the_statistics_of_the_model(
    kind: str, change: Any, told: str | None, tmp_path: Path
) -> None:
    config = REGISTRY.load(kind)(**TINY, **READS[kind], statistics=of_states(tmp_path))
    given = change(STATES).astype(np.float32)
    with pytest.raises(ConfigError, match=told) if told else nullcontext() as caught:
        config.check_recorded(RAW, given, key="path")
    if caught is not None:
        assert caught.value.key == "path"


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("pi0", {}, True),
        ("diffusion", {}, False),  # reads -1 there, whatever it is
        ("gr00t", {"normalization": "bounds"}, False),  # and 0
        ("gr00t", {"normalization": "mean_std"}, False),  # and it as it is
    ],
)
def test_a_state_that_never_moved_is_refused_where_it_is_divided_by_nothing(
    kind: str, options: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    config = REGISTRY.load(kind)(**TINY, **options, statistics=of_states(tmp_path))
    moves = np.array([0, 0, 0, 0, 0.5])
    with pytest.raises(ConfigError, match="dimension 4 goes") if refused else nullcontext():
        config.check_recorded(RAW, (STATES + moves).astype(np.float32), key="path")


@pytest.mark.parametrize("kind", READS_NONE)
def test_recorded_states_that_are_not_read_may_be_any(kind: str, tmp_path: Path) -> None:
    config = REGISTRY.load(kind)(**TINY, **READS_NONE[kind], statistics=of_states(tmp_path))
    config.check_recorded(RAW, (STATES * 1000).astype(np.float32), key="path")


@pytest.mark.parametrize(
    ("kind", "actions", "told"),
    [
        ("pi05", {"mean": [0.0] * 7, "std": [1.0] * 7},
         "have no q01 and q99, by which the model is normalised, but mean, std"),
        ("pi0", {"q01": [0.0] * 7, "q99": [1.0] * 7}, "have no mean and std, .* but q01, q99"),
        ("gr00t", {"min": [1.0] * 7, "max": [1.0] * 7}, "never change: min and max leave no width"),
        ("openvla", {"q01": [0.0, float("nan")], "q99": [1.0] * 2}, "hold nan as q01 of dimension"),
        ("act", {"count": [9]}, "have no mean and std, by which the model is normalised, but noth"),
    ],
)  # fmt: skip
def test_statistics_without_what_a_model_needs_are_refused_before_a_run(
    kind: str, actions: dict[str, Any], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "stats.json"
    file.write_text(json.dumps({"action": actions}))
    config = REGISTRY.load(kind)(**TINY, statistics=file)
    with pytest.raises(ConfigError, match=told) as caught:
        config.check()
    assert caught.value.key == "statistics"


def test_lacking_statistics_of_recorded_actions_are_told_by_their_key(published: Path) -> None:
    file = published / "norm_stats.json"
    file.write_text(json.dumps({"norm_stats": {"actions": {"mean": [0.0] * 7, "std": [1.0] * 7}}}))
    config = REGISTRY.load("pi05")(path=published)
    with (
        pytest.raises(ConfigError, match=r"^model\.statistics: .* no q01 and q99"),
        in_section("data"),
    ):
        config.check_recorded(RAW, None, key="path")


def test_conventions_come_before_the_statistics(tmp_path: Path) -> None:
    """A gripper of 0 and 1 in the model, of −1 and 1 in the environment; a delta of positions."""
    low, high = [-0.1] * 6 + [0.0], [0.1] * 6 + [1.0]
    given = {**TINY, "statistics": statistics(tmp_path, (low, high))}
    states = np.linspace(-5, 5, 200, dtype=np.float32)[:, None].repeat(7, axis=1)
    actions = np.concatenate([states[:, :6] + RAW[:, :6] / 10, np.sign(RAW[:, 6:])], axis=1)
    gripper = {"dimension": 6, "model_range": (0, 1), "env_range": (-1, 1)}
    told = {"gripper": gripper, "delta_dimensions": tuple(range(6))}
    model = REGISTRY.load("pi05")
    model(**given, conventions=told).check_recorded(actions, states, key="path")
    with pytest.raises(ConfigError, match=r"action dimension 0 goes from -4\.9"):
        model(**given).check_recorded(actions, states, key="path")


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_statistics_of_the_actions_themselves_are_told_where_deltas_are_learnt(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = np.linspace(-5, 5, 200, dtype=np.float32)[:, None].repeat(7, axis=1)
    actions = states + RAW / 10
    told = {"delta_dimensions": tuple(range(6))}

    def warned(recorded: np.ndarray, **conventions: Any) -> bool:
        each = {"q01": np.quantile(recorded, 0.01, axis=0), "mean": recorded.mean(0),
                "q99": np.quantile(recorded, 0.99, axis=0), "std": recorded.std(0)}  # fmt: skip
        file = tmp_path / "stats.json"
        file.write_text(json.dumps({"action": {name: v.tolist() for name, v in each.items()}}))
        caplog.clear()
        model = REGISTRY.load(kind)(**TINY, statistics=file, conventions=conventions)
        model.check_recorded(actions, states, key="path")
        return "rlinf data stats SET --deltas 0,1,2,3,4,5 --horizon H" in caplog.text

    assert warned(actions, **told)
    assert warned(1.05 * actions, **told)
    assert not warned(actions)
    deltas = np.concatenate([actions[:, :6] - states[:, :6], actions[:, 6:]], axis=1)
    assert not warned(deltas, **told)
    assert not warned(deltas * np.array([3.0] * 6 + [1.0]), **told)  # those of a chunk are wider


@pytest.mark.parametrize("kind", ["openvla_oft", "pi05"])
def test_pictures_with_colours_first_are_refused(kind: str) -> None:
    spec = replace(SPEC, observation_shapes={"states": (5,), "main_images": (3, 56, 56)})
    with pytest.raises(ConfigError, match=r"main_images are of shape \[3, 56, 56\]; legal: height"):
        REGISTRY.load(kind)(**TINY).build(spec, value_dim=1)


@pytest.mark.parametrize("told", [True, False])
def test_states_that_the_environment_does_not_show_are_told(
    told: bool, published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = {"main_images": (56, 56, 3)}
    blind = replace(SPEC, observation_shapes=shown, observation_dtypes={"main_images": "uint8"})
    for spec, warned in ((SPEC, False), (blind, told)):
        caplog.clear()
        config = REGISTRY.load("pi05")(path=published, state_in_prompt=told)
        config.build(spec, value_dim=1, seed=0)
        assert ("trained with states, and the environment shows none" in caplog.text) == warned


def test_padding_of_statistics_is_no_dimension() -> None:
    padded = Statistics.of({"q01": [-1.0, -1.0, 0.0, 0.0], "q99": [1.0, 1.0, 0.0, 0.0]})
    assert padded.used == 2
    ModelStatistics(padded, padded).check([-1.0] * 2, [1.0] * 2, state_dim=2)
    with pytest.raises(ConfigError, match="are of 2 action dimensions, the environment takes 3"):
        ModelStatistics(padded).check([-1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "gr00t", "wall_oss"])
def test_no_rows_have_no_actions(kind: str) -> None:
    policy = REGISTRY.load(kind)(num_action_chunks=4, **TINY).build(SPEC, value_dim=1, seed=0)
    seen = {key: torch.zeros(0, *shape) for key, shape in SPEC.observation_shapes.items()}
    seen["main_images"] = seen["main_images"].byte()
    noise = draw_noise(policy.noise, (0,), torch.Generator())
    for drawn in (noise, None):
        assert policy.sample(seen, drawn).actions.shape == (0, 4, 7)
    assert policy.value(seen).shape == (0, 1)


def test_a_directory_without_whole_weights_is_refused_before_they_are_read(tmp_path: Path) -> None:
    config = REGISTRY.load("pi0")(path=tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no config\.json: it is a LoRA adapter"):
        config.check()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no published weights: neither .*; pytorch_model\.bin"):
        config.check()
    whole = (PARITY / "pi0" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors holds no weights: .*incomplete"):
        config.check()
    (tmp_path / "model.safetensors").write_bytes(whole)
    config.check()
