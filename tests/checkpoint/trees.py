"""Trees for the tests, and exact comparison of two trees."""

import random
from typing import Any

import numpy as np
import torch


def state_of_everything() -> dict[str, Any]:
    """One of each kind that a checkpoint must bring back exactly."""
    torch_dtypes = [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64,
    ]  # fmt: skip
    generator = np.random.default_rng(3)
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return {
        "model": network.state_dict(),
        "dtypes": {str(d): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(d) for d in torch_dtypes},
        "arrays": {d: np.arange(6).reshape(2, 3).astype(d) for d in ("f2", "f4", "u8", "i8", "?")},
        "zero-dim": [torch.tensor(3.5), np.array(7, dtype=np.int64), np.float32(0.1)],
        "empty": [torch.zeros(0, 3), np.zeros((2, 0), dtype=np.uint8), {}, [], ()],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "big-endian": np.arange(3, dtype=">i4"),
        "floats": [0.1, -0.0, 1e-320, float("inf"), float("-inf"), float("nan"), 1e300],
        "ints": [0, -1, 2**63, -(2**127), 1 << 20000, True, False, None],
        "text": ["", "é", "\ud800", "a/b~c", "line\nline"],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 20],
        "numpy-rng": generator.bit_generator.state,
        "python-rng": random.Random(5).getstate(),
        "torch-rng": torch.Generator().manual_seed(7).get_state(),
        "a/b~c": {"~1": torch.ones(1), "/": torch.zeros(1), "": torch.tensor(2.0)},
        "$": {"$": "tensor", "value": "not a tensor"},
    }


def assert_same(found: Any, expected: Any, place: str = "") -> None:
    """Compare kinds, dtypes, shapes and bits."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), place
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.contiguous().numpy(force=True).tobytes() == (
            expected.contiguous().numpy(force=True).tobytes()
        ) if found.dtype is not torch.bfloat16 else torch.equal(found, expected), place  # fmt: skip
    elif isinstance(expected, np.ndarray | np.generic):
        assert type(found) is type(expected), place
        assert found.dtype == expected.dtype.newbyteorder("="), place
        assert found.shape == expected.shape, place
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            assert_same(found[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), place
        assert len(found) == len(expected), place
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{place}/{index}")
    else:
        assert type(found) is type(expected), place
        assert repr(found) == repr(expected) if isinstance(expected, float) else found == expected


def small_state(step: int) -> dict[str, Any]:
    """A tree whose every part tells the step it belongs to."""
    return {"weights": torch.full((64,), float(step)), "step": step, "many": [step] * 10}
