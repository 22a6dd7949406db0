"""Handing devices over on a simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rescale_simulation import Setting, best_static, play
from rlinf.planner.simulation import LengthDistribution
from rlinf.planner.simulation.answer_lengths import GenerationModel

LENGTHS = LengthDistribution(mean=1000, maximum=8000, sigma=0.9, correlation=0.5)
SETTING = Setting(
    generation=GenerationModel(
        lengths=LENGTHS, max_running=64, seconds_fixed=0.01, seconds_per_sequence=1e-5
    ),
    devices=8,
    groups=32,
    group_size=4,
    batches=4,
    train_seconds=300.0,
    trainer_sizes=(1, 2, 4, 8),
    tick=0.1,
)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return LENGTHS.draw(np.random.default_rng(0), SETTING.groups, SETTING.group_size)


def test_taking_turns_is_generation_then_training(lengths: np.ndarray) -> None:
    played = play(SETTING, lengths, trainer=0)
    model = SETTING.generation
    done = model.serve(lengths.reshape(8, -1)).max(axis=1).tolist()
    assert played.rollout_seconds == pytest.approx(max(done), rel=0.02)
    rest = SETTING.batches * SETTING.batch_seconds(8) + SETTING.switch_seconds
    assert played.seconds == pytest.approx(played.rollout_seconds + rest)


def test_rescaling_is_faster_than_every_static_placement(lengths: np.ndarray) -> None:
    played = play(SETTING, lengths, trainer=None)
    _, static = best_static(SETTING, lengths)
    assert played.seconds < static.seconds
    assert played.releases
    assert sum(count for _, count in played.releases) < SETTING.devices


def test_a_shared_device_generates_first_and_trains_then(lengths: np.ndarray) -> None:
    """Where all end together there is nothing to overlap; else training begins with its devices."""
    equal = np.full((SETTING.groups, SETTING.group_size), 1000)
    played = play(SETTING, equal, trainer=4, shared=True)
    training = SETTING.batches * SETTING.batch_seconds(4)
    assert played.seconds == pytest.approx(
        played.rollout_seconds + SETTING.switch_seconds + training, abs=2 * SETTING.tick
    )
    shared = play(SETTING, lengths, trainer=4, shared=True)
    assert shared.rollout_seconds == play(SETTING, lengths, trainer=0).rollout_seconds
    assert shared.rollout_seconds < play(SETTING, lengths, trainer=4).rollout_seconds
    assert shared.rollout_seconds + SETTING.switch_seconds < shared.seconds
    assert shared.seconds <= shared.rollout_seconds + SETTING.switch_seconds + training


def test_nothing_moves_where_lengths_are_equal() -> None:
    equal = np.full((SETTING.groups, SETTING.group_size), 1000)
    played = play(SETTING, equal, trainer=None)
    assert not played.releases
    turns = play(SETTING, equal, trainer=0)
    assert played.seconds == pytest.approx(turns.seconds + SETTING.move_seconds)


def test_waiting_sequences_run_when_there_is_room(lengths: np.ndarray) -> None:
    model = SETTING.generation.model_copy(update={"slots": 4})
    played = play(replace(SETTING, generation=model), lengths, trainer=0)
    done = model.serve(lengths.reshape(8, -1)).max(axis=1).tolist()
    assert played.rollout_seconds == pytest.approx(max(done), rel=0.05)
