"""Chunks in real time: what is executed, what is asked, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf.models.guidance import guided_velocity
from rlinf.models.policy import ActionSample, Policy
from rlinf.serving.chunks import RealTimeChunks, prefix_weights

from .support import SPEC, interrupted, observation, serving, small_policy


class Line:
    """Answers with the times at which its actions are meant: t, t + 1, … of the observation."""

    def __init__(self, chunk: int, prefix: bool = False) -> None:
        self.metadata = {"chunk": chunk, "prefix": prefix}
        self.chunk, self.asked = chunk, list[dict[str, Any]]()
        self.may_answer = threading.Semaphore(0)

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(dict(observation))
        assert self.may_answer.acquire(timeout=10)
        return {"actions": observation["t"] + np.arange(float(self.chunk))[:, None]}


def told(line: Line, number: int) -> dict[str, Any]:
    """What was asked, once it was."""
    deadline = time.monotonic() + 10
    while len(line.asked) <= number:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return line.asked[number]


def settle(chunks: RealTimeChunks) -> None:
    """Let what was allowed to answer do so."""
    assert chunks._next is not None
    chunks._next.exception(timeout=10)


def test_actions_are_those_meant_for_now_whatever_the_delay() -> None:
    line = Line(8)
    with RealTimeChunks(line, execute=3) as chunks:
        line.may_answer.release()
        done = []
        for step in range(30):
            if step % 5 == 0 and chunks._next is not None:  # two steps later than asked, or more
                line.may_answer.release()
                settle(chunks)
            if chunks._next is not None and chunks._place == 8:
                line.may_answer.release()
            done.append(float(chunks.act({"t": step})[0]))
        line.may_answer.release()
    # An action for another time would be another number.
    assert done == list(range(30))
    assert len(line.asked) == 9
    assert "prefix" not in line.asked[1]


def test_a_chunk_that_ends_first_is_waited_for() -> None:
    line = Line(4)
    with RealTimeChunks(line, execute=1) as chunks:
        line.may_answer.release()
        for step in range(4):
            chunks.act({"t": step})
        threading.Timer(0.1, line.may_answer.release).start()
        assert chunks.act({"t": 4}) == 4
        assert chunks.waits[4] == pytest.approx(0.1, abs=0.08)
        assert chunks.waits[1:4] == [0.0] * 3
        line.may_answer.release(2)
        chunks.reset()
        assert chunks.act({"t": 50}) == 50


def test_a_request_that_is_refused_is_told_once() -> None:
    class Refusing(Line):
        def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
            if observation["t"] == 2:
                raise ValueError("another shape")
            return {"actions": observation["t"] + np.arange(float(self.chunk))[:, None]}

    with RealTimeChunks(Refusing(3), execute=2) as chunks:
        for step in range(3):
            assert chunks.act({"t": step}) == step
        with pytest.raises(ValueError, match="another shape"):
            chunks.act({"t": 3})
        assert chunks.act({"t": 4}) == 4  # the next chunk begins with what is seen now


def test_what_an_interrupted_step_waited_for_is_not_asked_beside() -> None:
    line = Line(4)
    with RealTimeChunks(line, execute=3) as chunks:
        line.may_answer.release()
        for step in range(4):
            chunks.act({"t": step})
        with interrupted(0.1):
            chunks.act({"t": 4})
        threading.Timer(0.2, line.may_answer.release, (2,)).start()
        began = time.monotonic()
        chunks.reset()  # one socket must not be read by two threads
        assert time.monotonic() - began > 0.1
        assert chunks.act({"t": 50}) == 50


def test_what_is_sent_is_what_was_observed_though_its_buffers_are_written_anew() -> None:
    line, buffer = Line(4), np.zeros(())
    with RealTimeChunks(line, execute=1) as chunks:
        line.may_answer.release()
        for step in range(3):
            buffer[...] = step
            chunks.act({"t": buffer, "camera": {"depth": buffer}})
        buffer[...] = 1000
        asked = told(line, 1)
        assert asked["t"] == asked["camera"]["depth"] == 1
        line.may_answer.release()


def test_what_is_committed_is_told_with_its_weights() -> None:
    line = Line(8, prefix=True)
    with RealTimeChunks(line, execute=2) as chunks:
        line.may_answer.release()
        for step in range(4):
            chunks.act({"t": step})
        first = told(line, 1)
        np.testing.assert_array_equal(first["prefix"][:, 0], [2, 3, 4, 5, 6, 7])
        # No delay is known yet: all might be executed before the answer.
        np.testing.assert_array_equal(first["prefix_weights"], [1] * 6)
        line.may_answer.release()
        settle(chunks)
        chunks.act({"t": 4})  # two actions were executed meanwhile
        second = told(line, 2)
        np.testing.assert_array_equal(second["prefix"][:, 0], [4, 5, 6, 7, 8, 9])
        np.testing.assert_array_equal(
            second["prefix_weights"], prefix_weights(6, delay=2, overlap=6)
        )
        line.may_answer.release()


def test_weights_are_those_of_the_paper() -> None:
    c = np.array([4, 3, 2, 1]) / 5
    soft = c * (np.exp(c) - 1) / (np.e - 1)
    np.testing.assert_allclose(
        prefix_weights(8, delay=2, overlap=6), [1, 1, *soft, 0, 0], rtol=1e-6
    )
    np.testing.assert_array_equal(prefix_weights(3, delay=3, overlap=3), [1, 1, 1])


def test_chunks_that_are_too_short_are_refused() -> None:
    for execute in (4, 0):
        with pytest.raises(ValueError, match="legal: 1 to 3"):
            RealTimeChunks(Line(4), execute=execute)
    with pytest.raises(ValueError, match="one action at a time"):
        RealTimeChunks(Line(1))


class Flow(torch.nn.Module):
    """A policy whose chunks flow from 0 to a smooth line through what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = small_policy()
        self.chunk, self.acts_on = self.policy.chunk, self.policy.acts_on
        far = (torch.arange(4.0)[:, None] - torch.arange(4.0)[None]).abs()
        self.register_buffer("mixing", torch.exp(-far / 4))

    def sample(self, observations: Mapping[str, Tensor], noise: Any) -> ActionSample:
        zero = torch.zeros(len(observations["states"]), 4, 3)
        return self.sample_continuing(observations, zero, zero[..., 0])

    def sample_continuing(
        self, observations: Mapping[str, Tensor], prefix: Tensor, weights: Tensor
    ) -> ActionSample:
        goal = self.policy.sample(observations, None).actions
        x = torch.zeros_like(goal)
        for step in range(10):
            t = 1 - step / 10

            def velocity(at: Tensor, t: float = t) -> Tensor:
                return (at - goal) / max(t, 0.1) - 0.3 * self.mixing @ (at - goal)

            if weights.any():
                v = guided_velocity(velocity, x=x, time=t, prefix=prefix, weights=weights)
            else:
                v = velocity(x)
            x = x - v / 10
        return ActionSample(x, torch.zeros_like(x), {})


def test_a_flow_model_behind_a_server_continues_what_is_committed() -> None:
    flow: Any = Flow()
    assert not hasattr(Policy, "sample_continuing")
    prefix = np.full((3, SPEC.action_dim), 0.25, np.float32)
    weights = np.array([1.0, 0.5, 0.0], np.float32)
    with serving(flow) as running, running.connect() as client:
        assert client.metadata["prefix"]
        free = client.infer(observation(0))["actions"]
        committed = {"prefix": prefix, "prefix_weights": weights}
        guided = client.infer(observation(0) | committed)["actions"]
        none = client.infer(observation(0) | committed | {"prefix_weights": 0 * weights})["actions"]
    before, after = (np.abs(each[:2] - prefix[:2]).mean(axis=1) for each in (free, guided))
    assert (after < before).all()
    np.testing.assert_array_equal(none, free)


def test_behind_a_server_the_robot_waits_once() -> None:
    with serving(small_policy()) as running, running.connect() as client:
        with RealTimeChunks(client, execute=1) as chunks:
            for _ in range(8):
                assert chunks.act(observation(0)).shape == (3,)
                time.sleep(0.05)
        assert chunks.waits[0] > 0
        assert max(chunks.waits[1:]) < 0.05
