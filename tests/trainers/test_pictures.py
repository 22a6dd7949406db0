"""A model that reads pictures, divided over ranks."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch

from rlinf.trainers.ranks import Ranks
from tests.trainers import pictures_of_two
from tests.vision import write_model


def test_two_ranks_train_as_one_where_one_of_them_has_text_alone(tmp_path):
    folder = write_model("qwen3_vl", tmp_path).path
    one = pictures_of_two.trained(folder, Ranks())
    for found in pictures_of_two.of_two(folder, tmp_path):
        assert found.keys() == one.keys()
        for name, value in one.items():
            assert torch.allclose(found[name], value, atol=1e-6), name
