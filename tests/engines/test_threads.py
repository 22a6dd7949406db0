"""Threads that decode, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from rlinf.engines.threads import computing_threads, threads_for


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_number_is_as_before_also_after_an_error():
    with computing_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="stop"), computing_threads(1):
        raise ValueError("stop")
    assert torch.get_num_threads() == 2


def test_small_models_have_one():
    assert threads_for(torch.nn.Linear(100, 100)) == 1
    assert threads_for(torch.nn.Linear(3000, 4000, device="meta")) == 2
