"""What is copied on its way within a process, and what is not."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlinf.scheduler.errors import SchedulerTypeError
from rlinf.scheduler.transport.copies import private_copy

Pair = namedtuple("Pair", "first second")


@dataclass
class Open:
    tensor: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: [tensor],
        lambda tensor: {"a": (tensor, 1)},
        lambda tensor: OrderedDict(a=tensor),
        lambda tensor: defaultdict(list, a=[tensor]),
        lambda tensor: deque([tensor], maxlen=3),
        lambda tensor: Pair(tensor, None),
        Open,
    ],
)
def test_a_tensor_is_copied_wherever_it_lies(hold):
    tensor = torch.zeros(2)
    value = hold(tensor)
    copied = private_copy(value)
    assert type(copied) is type(value)
    tensor.fill_(7)
    assert "7." in str(value)
    assert str(copied) == str(hold(torch.zeros(2)))


def test_arrays_sets_bytes_and_configurations_are_copied():
    value = (np.zeros((2, 3), order="F"), {1}, bytearray(b"a"), OmegaConf.create({"a": [1]}))
    array, numbers, data, config = private_copy(value)
    value[0][:], value[2][:], value[3].a[0] = 7, b"b", 7
    value[1].add(7)
    assert array.sum() == 0
    assert array.flags.f_contiguous
    assert (numbers, data, config) == ({1}, b"a", {"a": [1]})


def test_what_is_there_twice_or_holds_itself_stays_so():
    inner = [1]
    value = {"a": inner, "b": inner}
    value["self"] = value
    copied = private_copy(value)
    assert copied["self"] is copied is not value
    assert copied["a"] is copied["b"] is not inner


def test_gradients_are_asked_for_as_before():
    weight = torch.nn.Parameter(torch.ones(1))
    value = [weight, weight * 2, torch.ones(1), torch.nn.Parameter(weight, requires_grad=False)]
    copied = private_copy(value)
    assert [type(each) for each in copied] == [type(each) for each in value]
    assert [each.requires_grad for each in copied] == [True, True, False, False]
    assert all(each.is_leaf for each in copied)


def test_frozen_data_and_other_objects_are_themselves():
    value = [Frozen(torch.zeros(1)), object(), len, Pair]
    assert all(given is each for given, each in zip(private_copy(value), value, strict=True))


def test_what_is_nested_too_deeply_is_told():
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(SchedulerTypeError, match="nested too deeply to be sent"):
        private_copy(deep)
