"""Records of classes in a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.checkpoint.tree import decode, encode
from rlinf.errors import CheckpointError


@dataclass(frozen=True)
class Point:
    """A record."""

    name: str
    values: np.ndarray
    inner: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Other:
    """Another one."""

    name: str


def through_a_checkpoint(value, classes):
    encoded = encode(to_tree(value))
    return from_tree(decode(encoded.structure, encoded.tensors()), classes)


def test_records_come_back_as_they_were():
    point = Point("a", np.arange(3), (Point("b", np.zeros((2, 2), np.float32)),))
    value = {"points": [point], "counts": Counter(x=2), "answer": {"record": "x", "fields": 1}}
    found = through_a_checkpoint(value, (Point,))
    assert found["answer"] == value["answer"]
    assert found["counts"] == Counter(x=2)
    assert isinstance(found["counts"], Counter)
    back = found["points"][0]
    assert (back.name, back.inner[0].name) == ("a", "b")
    assert np.array_equal(back.values, point.values)
    assert back.inner[0].values.dtype == np.float32


def test_only_named_classes_are_built():
    with pytest.raises(CheckpointError, match="'Other'"):
        from_tree(to_tree([Other("x")]), (Point,))


def test_other_fields_are_refused():
    tree = to_tree(Other("x"))
    tree["fields"]["age"] = 3
    with pytest.raises(CheckpointError, match="another Other"):
        from_tree(tree, (Other,))
