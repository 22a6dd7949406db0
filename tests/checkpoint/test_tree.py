"""Everything that a run is made of survives the round trip, and nothing else is accepted."""

import datetime
import json
from collections import OrderedDict

import numpy as np
import pytest
import torch

from rlinf.checkpoint.tree import clone_to_cpu, decode, encode
from tests.checkpoint.trees import assert_same, state_of_everything


def test_round_trip_is_exact_through_json():
    tree = state_of_everything()
    encoded = encode(tree)
    structure = json.loads(json.dumps(encoded.structure, allow_nan=False))
    assert_same(decode(structure, encoded.tensors()), tree)


def test_snapshot_does_not_see_later_changes():
    weights, array, inner = torch.zeros(3), np.zeros(3), [1]
    encoded = encode({"weights": weights, "array": array, "inner": inner})
    weights += 1
    array += 1
    inner.append(2)
    tree = decode(encoded.structure, encoded.tensors())
    assert tree["weights"].sum() == 0
    assert tree["array"].sum() == 0
    assert tree["inner"] == [1]


def test_tied_weights_and_parameters_that_need_gradients():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    encoded = encode({"a": parameter, "b": parameter.T})
    tree = decode(encoded.structure, encoded.tensors())
    assert not tree["a"].requires_grad
    assert tree["a"].data_ptr() != tree["b"].data_ptr()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizer": {"state": {0: 1}}}, r"/optimizer/state: the key 0 is a int.*'0'"),
        ({"when": datetime.date(2020, 1, 1)}, r"/when: a date cannot be stored"),
        ({"set": {1}}, r"/set: a set cannot be stored"),
        ({"f": [1, len]}, r"/f/1: a builtin_function_or_method"),
        ({"names": np.array(["a"])}, r"/names: an array of dtype <U1"),
        ({"objects": np.array([None])}, r"/objects: an array of dtype object"),
        ({"z": np.zeros(1, dtype=np.complex128)}, r"/z: an array of dtype complex128"),
        ({"z": torch.zeros(1, dtype=torch.complex128)}, r"/z: this tensor.*complex128"),
        ({"s": torch.eye(3).to_sparse()}, r"/s: this tensor.*sparse"),
        ({"m": torch.zeros(1, device="meta")}, r"/m: this tensor.*meta"),
        (type("Count", (int,), {})(3), r"at /: a Count"),
    ],
)
def test_other_kinds_are_refused_with_their_place(tree, message):
    with pytest.raises(TypeError, match=message):
        encode(tree)


def test_a_tree_that_contains_itself_is_refused():
    tree: dict = {}
    tree["again"] = tree
    with pytest.raises(TypeError, match="contain itself"):
        encode(tree)


def test_mappings_become_dicts():
    encoded = encode(OrderedDict(a=1))
    assert decode(encoded.structure, encoded.tensors()) == {"a": 1}


def test_decoding_names_what_is_missing():
    encoded = encode({"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="/a is missing"):
        decode(encoded.structure, {})
    with pytest.raises(ValueError, match="unknown kind"):
        decode({"$": "python/object", "value": "os.system"}, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_exactly():
    tensors = [
        tensor.cuda()
        for tensor in state_of_everything()["dtypes"].values()
    ] + [torch.tensor(3.0).cuda(), torch.zeros(0, 2).cuda(), torch.rand(1 << 20).cuda(),
         torch.arange(6).reshape(2, 3).cuda().T]  # fmt: skip
    for copy, tensor in zip(clone_to_cpu(tensors), tensors, strict=True):
        assert_same(copy, tensor.cpu())
        assert copy.is_contiguous()
