"""What memory it takes to build a trainer that is divided over ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.trainers import building_of_two


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_no_rank_has_the_whole_model_in_float32(tmp_path: Path) -> None:
    for found in building_of_two.run(tmp_path):
        whole = 4 * found["numbers"]
        assert whole > 200e6
        assert found["dtypes"] == {torch.float32}
        assert found["kept"] == pytest.approx(whole / 2, rel=0.01)
        # Its weights in bfloat16, and half of them in float32 while the former go.
        assert found["peak"] < 0.7 * whole
        for name, (given, kept) in found["sums"].items():
            assert kept == pytest.approx(given, rel=1e-3, abs=1e-2), name
