"""A checkpoint of another model is told apart; weights leave in a file of their own."""

import pytest
import safetensors
import safetensors.torch
import torch

from rlinf.checkpoint.config import CheckpointConfig
from rlinf.checkpoint.weights import check_compatible, check_finite, export_weights
from rlinf.errors import CheckpointError, ConfigError


def test_equal_shapes_are_compatible():
    model = torch.nn.Linear(3, 2)
    check_compatible(model.state_dict(), {"weight": (2, 3), "bias": [2]})


def test_whole_numbers_are_no_weights():
    model = torch.nn.BatchNorm1d(2)  # one of its buffers is a whole number
    found = dict(model.state_dict())
    check_compatible(model.state_dict(), found | {"weight": found["weight"].bfloat16()})
    with pytest.raises(CheckpointError, match=r"weight: torch.int8 there, torch.float32 in the"):
        check_compatible(model.state_dict(), found | {"weight": found["weight"].to(torch.int8)})


def test_the_differences_are_listed_briefly():
    expected = {"a": (2, 3), "b": (4,), **{f"m{i}": (1,) for i in range(9)}}
    found = {"a": (2, 4), "b": (4,), "old": (), **{f"x{i}": (7,) for i in range(2)}}
    with pytest.raises(CheckpointError) as caught:
        check_compatible(expected, found, source="step_00000010")
    message = str(caught.value)
    assert "Step_00000010 is of another model" in message
    assert "a: [2, 4] there, [2, 3] in the model" in message
    assert "and 5 more" in message
    assert "old []" in message
    assert "b:" not in message
    assert len(message.splitlines()) == 13


def test_export_holds_tied_weights_under_both_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    path = export_weights(tmp_path / "out" / "policy.safetensors", model.state_dict(), {"v": "1"})
    found = safetensors.torch.load_file(path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"v": "1"}
    assert list(path.parent.iterdir()) == [path]


def test_interval():
    config = CheckpointConfig(interval=5)
    assert [step for step in range(1, 12) if config.due(step, 29.9)] == [5, 10]
    assert config.due(3, 30.0)
    assert not CheckpointConfig(minutes=None).due(3, 1e6)
    assert not CheckpointConfig(interval=0).due(5, 29.9)
    assert CheckpointConfig(interval=0).due(5, 31.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_none_is_found(value: float, dtype: torch.dtype) -> None:
    largest = torch.full((300,), 6e4, dtype=dtype)
    whole = torch.arange(3)
    check_finite([("a", largest), ("b", whole)], source="file", key="path")
    largest[7] = value
    with pytest.raises(ConfigError, match=r"path: file holds numbers that are not finite.* in a"):
        check_finite([("b", whole), ("a", largest)], source="file", key="path")


def test_files_of_equal_weights_are_equal_whatever_their_metadata(tmp_path):
    said = {"model": "mlp", "settings": '{"activation": "tanh"}', "base": "größer"}
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    found = set()
    for number in range(20):
        path = export_weights(tmp_path / f"{number}.safetensors", weights, said)
        found.add(path.read_bytes())
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == said
            assert torch.equal(file.get_tensor("a"), weights["a"])
            assert torch.equal(file.get_tensor("b"), weights["b"])
    assert len(found) == 1
