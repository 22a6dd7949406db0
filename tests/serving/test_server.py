"""The server as its clients see it."""

from __future__ import annotations

import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import SecretStr
from websockets.sync.client import connect
from websockets.sync.server import serve

from rlinf.envs.spec import EnvSpec
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.config import CategoricalMLPConfig, CNNConfig
from rlinf.models.policy import ActionSample, Policy, draw_noise
from rlinf.serving import remote
from rlinf.serving.client import ActionClient, ServerError
from rlinf.serving.latency import Histogram
from rlinf.serving.remote import RemoteConfig, most_rows
from rlinf.serving.server import ServerSettings
from rlinf.serving.wire import pack, unpack
from rlinf.workers.config.served_policy import Server

from ..runners.off_policy_support import small_config
from .support import (
    SPEC,
    TASKS,
    TOKEN,
    Running,
    interrupted,
    observation,
    serving,
    small_policy,
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy()


@pytest.fixture(scope="module")
def running(policy: Policy) -> Any:
    with serving(policy) as server:
        yield server


def alone(policy: Policy, seed: int) -> np.ndarray:
    """What the policy does in this process."""
    with torch.inference_mode():
        return policy.sample(read(seed), None).actions[0].numpy()


def read(seed: int) -> dict[str, torch.Tensor]:
    """An observation as the policy gets it, a batch of one row."""
    row = observation(seed)
    inputs = {name: torch.from_numpy(row[name])[None] for name in ("states", "main_images")}
    return inputs | {"task_ids": torch.tensor([TASKS.index(row["prompt"])])}


def test_what_only_the_critic_saw_is_not_asked_for() -> None:
    config = CNNConfig(
        use_states=False, critic_reads="states", policy_gain=1.0, num_action_chunks=4,
        channels=(8,), kernel_sizes=(4,), strides=(4,), image_features=16,
    )  # fmt: skip
    policy = config.build(SPEC, value_dim=1, seed=0).eval()
    given = observation(0)
    states = given.pop("states")
    batch = {"main_images": torch.from_numpy(given["main_images"])[None],
             "task_ids": torch.tensor([0])}  # fmt: skip
    expected = policy.sample(batch, None).actions
    with serving(policy) as server:
        with server.connect() as client:
            assert [*client.metadata["observations"]] == ["main_images", "task_ids"]
            np.testing.assert_allclose(client.infer(given)["actions"], expected[0], atol=1e-6)
        remote = RemoteConfig(
            num_action_chunks=4, url=f"ws://{server.address}", token=SecretStr(TOKEN)
        ).build(SPEC)  # as `rlinf eval --server` does, whose simulator shows the states as well
        seen = batch | {"states": torch.from_numpy(states)[None]}
        torch.testing.assert_close(remote.sample(seen, None).actions, expected)
        other = RemoteConfig(
            num_action_chunks=4, url=f"ws://{server.address}", token=SecretStr(TOKEN), version=6
        ).build(SPEC)
        with pytest.raises(ServerError, match="from the weights of step 6 to those of step 7 in"):
            other.sample(seen, None)


def test_an_evaluation_whose_passes_are_no_request_is_refused_before_it_is_played(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(f"ws://{running.address}", TOKEN)

    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as refusal:
            server.in_place(small_config(tmp_path, *overrides))
        return str(refusal.value)

    whole = "rollout.block_size=null"
    assert refused("evaluation.num_envs=1100", whole) == (
        "evaluation.num_envs: a forward pass of 1100 rows is a request, and a server takes 1024 "
        "of these at once; nearest: 1024"
    )
    stages = "rollout.pipeline_stage_num=2"
    assert "nearest: 2048" in refused("evaluation.num_envs=2050", stages, whole)
    assert refused("rollout.block_size=1100").startswith("rollout.block_size: a forward pass")
    for fitting in ((whole, "evaluation.num_envs=1024"), ("evaluation.num_envs=2000",)):
        server.in_place(small_config(tmp_path, *fitting))

    monkeypatch.setattr(remote, "LARGEST_MESSAGE", 5000)
    with running.connect() as client:
        most = most_rows(client.metadata["observations"])
    row = {name: array[0].numpy() for name, array in read(0).items()}
    sizes = [len(pack({"batch": [row] * rows})) for rows in (most, most + 1)]
    assert sizes[0] < 5000 < sizes[1]
    told = refused(f"evaluation.num_envs={most + 1}", whole)
    assert told.endswith(f"takes {most} of these at once; nearest: {most}")


def test_actions_are_told_as_the_environment_calls_them() -> None:
    spec = EnvSpec(
        observation_shapes={"states": (5,)}, observation_dtypes={"states": "float32"},
        action_kind="discrete", action_dim=2, action_low=(0.0, 0.0), action_high=(4.0, 2.0),
        task_descriptions=(), max_episode_steps=20, action_start=(5.0, -1.0),
    )  # fmt: skip
    policy = CategoricalMLPConfig(num_action_chunks=3).build(spec, value_dim=1, seed=0).eval()
    seen = {"states": torch.randn(2, 5, generator=torch.Generator().manual_seed(0))}
    indices = policy.sample(seen, None).actions
    with serving(policy, spec=spec) as server:
        with server.connect() as client:
            limits = [client.metadata[f"action_{name}"] for name in ("low", "high")]
            assert limits == [[5.0, -1.0], [9.0, 1.0]]
            told = client.infer({"states": seen["states"][0].numpy()})["actions"]
            np.testing.assert_array_equal(told, indices[0] + torch.tensor([5.0, -1.0]))
        config = RemoteConfig(
            num_action_chunks=3, url=f"ws://{server.address}", token=SecretStr(TOKEN)
        )
        assert config.build(spec).sample(seen, None).actions.equal(indices)
        for start in ((), (4.0, -1.0)):
            with pytest.raises(ConfigError, match=r"has action_low \[5\.0, -1\.0\], the run"):
                config.build(replace(spec, action_start=start))


def test_actions_keep_to_the_limits_of_the_simulator_that_their_task_is_of() -> None:
    policy: Any = small_policy()
    wide = torch.tensor([-2.0, 2.0, 3.0]).expand(4, 3)

    def sample(observations: Any, noise: Any) -> ActionSample:
        actions = wide.repeat(len(observations["states"]), 1, 1)
        return ActionSample(actions, torch.zeros_like(actions), {})

    policy.sample = sample
    spec = replace(
        SPEC, action_low=(-2.0, -2.0, -3.0), action_high=(2.0, 2.0, 3.0), task_sections=(0, 1, 1),
        section_limits=(((-2.0, -2.0, -3.0), (2.0, 2.0, 3.0)), ((-1.0, -0.5), (1.0, 0.5))),
    )  # fmt: skip
    with serving(policy, spec=spec) as running, running.connect() as client:
        np.testing.assert_array_equal(client.infer(observation(0))["actions"], wide)
        rows = client.infer({"batch": [observation(seed) for seed in range(3)]})["actions"]
        np.testing.assert_array_equal(rows[:, 0], [[-2, 2, 3], [-1, 0.5, 3], [-1, 0.5, 3]])


def http(
    running: Running, path: str, data: bytes | None = None, timeout: float = 30, **headers: str
) -> Any:
    headers = {"Authorization": f"Api-Key {TOKEN}"} | headers
    request = urllib.request.Request(f"http://{running.address}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


def test_metadata_comes_first_and_answers_are_those_of_the_policy(
    running: Running, policy: Policy
) -> None:
    with running.connect() as client:
        told = client.metadata
        assert (told["policy"], told["version"], told["chunk"], told["prefix"]) == (
            "small", 7, 4, False,
        )  # fmt: skip
        assert told["observations"]["main_images"] == {"shape": [16, 12, 3], "dtype": "uint8"}
        assert told["tasks"] == list(TASKS)
        for seed in range(3):
            answer = client.infer(observation(seed))
            assert answer["actions"].dtype == np.float32
            np.testing.assert_array_equal(answer["actions"], alone(policy, seed))
            assert answer["version"] == 7
            assert 0 < answer["policy_timing"]["infer_ms"] <= answer["server_timing"]["total_ms"]
        assert answer["server_timing"]["prev_total_ms"] > 0


def test_the_published_client_is_answered(running: Running, policy: Policy) -> None:
    module = pytest.importorskip("openpi_client.websocket_client_policy")
    host, port = running.address.split(":")
    client = module.WebsocketClientPolicy(host, int(port), api_key=TOKEN)
    assert client.get_server_metadata()["chunk"] == 4
    answer = client.infer(observation(1))
    np.testing.assert_array_equal(answer["actions"], alone(policy, 1))
    assert answer["server_timing"]["infer_ms"] > 0
    with pytest.raises(RuntimeError, match="`states` is missing"):
        client.infer({"prompt": TASKS[0]})
    np.testing.assert_array_equal(client.infer(observation(2))["actions"], alone(policy, 2))
    client._ws.close()


def test_a_refused_request_leaves_the_connection_open(running: Running, policy: Policy) -> None:
    with running.connect() as client:
        for bad in ({}, observation(0) | {"states": np.full(5, np.nan)}, {"batch": []}):
            with pytest.raises(ServerError) as caught:
                client.infer(bad)
            assert "\n" not in str(caught.value)
        client._socket.send("a text")
        with pytest.raises(ServerError, match="msgpack in binary frames"):
            client._received(10)
        client._socket.send(b"\xc1")
        with pytest.raises(ServerError, match="no message in msgpack"):
            client._received(10)
        np.testing.assert_array_equal(client.infer(observation(0))["actions"], alone(policy, 0))


def test_http_answers_the_same(running: Running, policy: Policy) -> None:
    answer = unpack(http(running, "/infer", pack(observation(2))))
    np.testing.assert_array_equal(answer["actions"], alone(policy, 2))
    with pytest.raises(urllib.error.HTTPError) as caught:
        http(running, "/infer", pack({}))
    assert caught.value.code == 400
    assert b"is missing" in caught.value.read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        http(running, "/")
    assert caught.value.code == 426
    told = http(running, "/metrics").decode()
    for words in ('part="act",quantile="0.99"} ', "rlinf_serving_refused_total ",
                  "rlinf_serving_weight_version 7"):  # fmt: skip
        assert words in told


def test_what_is_no_http_is_refused_in_a_line(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        http(running, "/infer", b"hello", **{"Content-Encoding": "gzip"})
    assert caught.value.code == 400
    assert b"the message cannot be read: 400" in caught.value.read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        http(running, "/metrics", X="a" * 9000)
    assert caught.value.code == 400
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 300
    assert any("refused: 400" in each for each in caplog.messages)


def upgrade_to_websocket(running: Running) -> bytes:
    """What a client says first."""
    return (
        f"GET / HTTP/1.1\r\nHost: {running.address}\r\nAuthorization: Api-Key {TOKEN}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


def test_a_client_that_goes_while_the_server_is_busy_leaves_no_trace(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = running.address.split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as gone:
            running.pause(0.2)
            gone.sendall(upgrade_to_websocket(running))
            # Closed by a reset, as a machine that went down is.
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with running.connect() as client:
        assert client.infer(observation(0))["version"] == 7
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_that_no_server_takes_is_not_sent(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf.serving.client.LARGEST_MESSAGE", 1 << 20)
    with running.connect() as client:
        large = {"states": np.zeros(1 << 20, np.float32)}
        with pytest.raises(ServerError, match="bytes is larger than a server takes; nearest: sev"):
            client.infer(large)
        assert client.infer(observation(0))["version"] == 7


def test_a_server_that_hangs_is_lost_after_the_seconds_that_were_said(running: Running) -> None:
    with ActionClient(f"ws://{running.address}", TOKEN, timeout=0.5) as client:
        running.pause(3.0)
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"is gone: timed out in 0\.5s"):
            client.infer(observation(0))
        assert time.monotonic() - began < 2.0
    with pytest.raises(ServerError, match=r"at ws://127\.0\.0\.1:99999: Port out of range"):
        ActionClient("ws://127.0.0.1:99999")


def test_an_answer_that_was_not_waited_for_is_not_that_of_the_next_request(policy: Policy) -> None:
    slow: Any = Slow(policy)
    with serving(slow) as running, running.connect() as client:
        with interrupted(0.2):
            client.infer(observation(0))
        slow.may_go.set()
        with pytest.raises(ServerError, match=r"broken off before its answer came; connect again"):
            client.infer(observation(1))
        np.testing.assert_array_equal(ask(running, 1), alone(policy, 1))


def test_an_answer_may_take_longer_than_pings_are_waited_for(policy: Policy) -> None:
    slow: Any = Slow(policy)
    token = {"Authorization": f"Api-Key {TOKEN}"}
    with serving(slow) as running:
        with connect(
            f"ws://{running.address}",
            additional_headers=token, ping_interval=0.1, ping_timeout=0.3,
        ) as client:  # fmt: skip
            client.recv(10)
            client.send(pack(observation(0)))
            assert slow.begun.wait(30)
            with pytest.raises(TimeoutError):  # which "keepalive ping timeout" would be before
                client.recv(1.0)
            client.send(pack(observation(1)))  # two that wait are answered in their order
            slow.may_go.set()
            for seed in range(2):
                answer = unpack(client.recv(10))
                np.testing.assert_array_equal(answer["actions"], alone(policy, seed))
        with running.connect() as other:
            assert other._socket.ping_interval is None  # a server of others may read nothing


@pytest.mark.parametrize("metadata", [{}, {"reset_pose": [0.0]}, [1]])
def test_a_server_of_others_does_not_evaluate(metadata: Any) -> None:
    with serve(lambda connection: connection.send(pack(metadata)), "127.0.0.1", 0) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{other.socket.getsockname()[1]}"
        with pytest.raises(ConfigError, match="does not say what its policy reads and does, so"):
            RemoteConfig(url=url).connect()
        other.shutdown()
        thread.join()


def test_a_long_text_is_answered_at_once_and_briefly(running: Running) -> None:
    for message in ({"a" * 10**6: 1}, {**observation(1), "prompt": "b" * 10**6}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            http(running, "/infer", pack(message))
        assert caught.value.code == 400
        assert len(caught.value.read()) < 2000


def test_without_the_token_nothing_but_health_is_told(running: Running) -> None:
    assert http(running, "/healthz", Authorization="") == b"OK\n"
    wrong = [None, "", "another", TOKEN + "x", TOKEN[:-1]]
    for token in wrong:
        told = "refuses this token" if token else "asks for a token"
        with pytest.raises(ServerError, match=rf"{told}.*401"):
            ActionClient(f"ws://{running.address}", token)
    with pytest.raises(ServerError, match="has a line end") as refused:
        ActionClient(f"ws://{running.address}", TOKEN + "\n")
    assert TOKEN not in str(refused.value)
    for path in ("/metrics", "/infer", "/reload"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            http(running, path, None if path == "/metrics" else b"", Authorization="Api-Key ä")
        assert caught.value.code == 401
    with pytest.raises(urllib.error.HTTPError) as caught:  # a web page that a browser shows
        http(running, "/metrics", Origin="http://example.org")
    assert caught.value.code == 403


def test_a_server_without_a_token_stays_on_this_machine() -> None:
    ServerSettings(host="::1", token=None)
    for host in ("0.0.0.0", "192.168.0.7", "robot"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            ServerSettings(host=host, token=None)


def test_a_port_that_is_taken_is_said(running: Running, policy: Policy) -> None:
    import asyncio

    from rlinf.serving.acting import ActingPolicy
    from rlinf.serving.server import PolicyServer

    from .support import SPEC

    settings = ServerSettings(port=int(running.address.split(":")[1]), token=TOKEN)
    other = PolicyServer(ActingPolicy(policy, version=0), SPEC, name="other", settings=settings)
    with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1.*another --port"):
        asyncio.run(other.run(asyncio.Event(), print))
    with pytest.raises(ServerError, match="no action server at ws://127"):
        ActionClient("ws://127.0.0.1:1")


class Slow(torch.nn.Module):
    """Lets a policy wait until it is told, and notes how many rows it was given."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.chunk, self.acts_on = policy, policy.chunk, policy.acts_on
        self.rows: list[int] = []
        self.begun, self.may_go = threading.Event(), threading.Event()

    def sample(self, observations: Any, noise: Any) -> ActionSample:
        self.rows.append(len(observations["states"]))
        self.begun.set()
        assert self.may_go.wait(30)
        return self.policy.sample(observations, noise)


def until(condition: Callable[[], bool]) -> None:
    """Wait, not for ever."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(running: Running, seed: int) -> np.ndarray:
    with running.connect() as client:
        return client.infer(observation(seed))["actions"]


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_batch_gives_each_row_what_it_gets_alone(policy: Policy, block_size: int | None) -> None:
    slow: Any = Slow(policy)
    with (
        serving(slow, block_size=block_size, rows=8, wait=0.2) as running,
        ThreadPoolExecutor(7) as pool,
    ):
        first = pool.submit(ask, running, 0)
        assert slow.begun.wait(30)
        others = [pool.submit(ask, running, seed) for seed in range(1, 7)]
        until(lambda: len(running.server._batcher._waiting) == 6)
        slow.may_go.set()
        found = [each.result(30) for each in [first, *others]]
        single = [ask(running, seed) for seed in range(7)]
    assert slow.rows[:3] == ([1, 6, 1] if block_size is None else [4, 4, 4])
    for seed in range(7):
        if block_size is None:
            np.testing.assert_allclose(found[seed], single[seed], rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(found[seed], single[seed])
    assert running.server.latencies.counters["rows"] == 14
    assert running.server.latencies.counters["batches"] == 9


def test_a_server_that_draws_actions_answers_by_its_distribution(policy: Policy) -> None:
    with serving(policy) as running, running.connect() as client:
        assert client.metadata["deterministic"]
    with serving(policy, deterministic=False) as running, running.connect() as client:
        assert not client.metadata["deterministic"]
        answers = np.stack([client.infer(observation(0))["actions"] for _ in range(200)])
    noise = draw_noise(policy.noise, (4000,), torch.Generator().manual_seed(0))
    seen = {name: each.repeat(4000, *(1,) * (each.ndim - 1)) for name, each in read(0).items()}
    expected = policy.sample(seen, noise).actions.numpy()
    error = expected.std(axis=0) / np.sqrt(len(answers))
    assert (error > 0).all()
    assert (np.abs(answers.mean(axis=0) - expected.mean(axis=0)) < 5 * error).all()
    np.testing.assert_allclose(answers.std(axis=0), expected.std(axis=0), rtol=0.25)


def test_rows_of_one_request_are_one_pass(policy: Policy) -> None:
    slow: Any = Slow(policy)
    slow.may_go.set()
    rows = [observation(seed) for seed in range(11)]
    with serving(slow, block_size=4, rows=2) as running, running.connect() as client:
        found = client.infer({"batch": rows})["actions"]
    assert found.shape == (11, 4, 3)
    assert slow.rows == [11]
    for seed in range(11):
        np.testing.assert_allclose(found[seed], alone(policy, seed), rtol=0, atol=1e-6)


def test_what_waits_is_bounded_and_one_client_never_waits(policy: Policy) -> None:
    with serving(policy, wait=20.0) as running:
        assert ask(running, 0).shape == (4, 3)  # 20 seconds would be noticed
        with running.connect() as idle, running.connect() as client:
            assert idle.metadata
            began = time.monotonic()
            pool = ThreadPoolExecutor(1)
            asked = pool.submit(client.infer, observation(0))
            time.sleep(0.05)
            assert not asked.done()  # somebody else might ask
            idle.close()
            running.begin_to_stop()
            assert asked.result(10)["actions"].shape == (4, 3)
            assert time.monotonic() - began < 10
            pool.shutdown()


@pytest.mark.parametrize("how", ["WebSocket", "HTTP"])
def test_who_has_gone_keeps_nobody_waiting(policy: Policy, how: str) -> None:
    slow: Any = Slow(policy)
    with serving(slow, rows=1) as running, ThreadPoolExecutor(1) as pool:
        first, waiting = pool.submit(ask, running, 0), running.server._batcher._waiting
        assert slow.begun.wait(30)
        for seed in range(1, 4):
            if how == "HTTP":
                with pytest.raises(TimeoutError):
                    http(running, "/infer", pack(observation(seed)), timeout=0.1)
            else:
                with (
                    ActionClient(f"ws://{running.address}", TOKEN, timeout=0.1) as impatient,
                    pytest.raises(ServerError, match="timed out"),
                ):
                    impatient.infer(observation(seed))
        until(lambda: not waiting)
        slow.may_go.set()
        np.testing.assert_array_equal(first.result(30), alone(policy, 0))
        np.testing.assert_array_equal(ask(running, 5), alone(policy, 5))
        assert slow.rows == [1, 1]
        until(lambda: running.server._batcher.clients == 0)


def test_a_machine_that_has_died_is_no_client_any_more(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf.serving.server._HEARTBEAT", 0.2)
    with serving(policy) as running, running.connect() as thinking:
        host, port = running.address.split(":")
        with socket.create_connection((host, int(port))) as dead:  # which answers nothing
            dead.sendall(upgrade_to_websocket(running))
            until(lambda: running.server._batcher.clients == 2)
            until(lambda: running.server._batcher.clients == 1)
        time.sleep(0.5)  # who computes between two requests answers without knowing
        np.testing.assert_array_equal(thinking.infer(observation(1))["actions"], alone(policy, 1))


def test_stop_while_busy_answers_what_waits_and_refuses_the_rest(policy: Policy) -> None:
    slow: Any = Slow(policy)
    with serving(slow) as running, ThreadPoolExecutor(2) as pool, running.connect() as late:
        asked = [pool.submit(ask, running, 0)]
        assert slow.begun.wait(30)
        asked.append(pool.submit(ask, running, 1))
        until(lambda: len(running.server._batcher._waiting) == 1)
        running.begin_to_stop()
        until(lambda: running.server._batcher._stopping)
        with pytest.raises(ServerError, match="the server is stopping"):
            late.infer(observation(0))
        slow.may_go.set()
        for each in asked:
            assert each.result(30).shape == (4, 3)
        running.wait()
        with pytest.raises(ServerError, match="is gone"):
            late.infer(observation(0))
    assert str(running.server.latencies).startswith("2 answered, 1 refused, 0 failed")


class Failing(Slow):
    """Fails where a first state is large, so that the next row may be right again."""

    def sample(self, observations: Any, noise: Any) -> ActionSample:
        found = super().sample(observations, noise)
        if (observations["states"][:, 0] > 1e3).any():
            raise RuntimeError("out of\nmemory")
        spoilt = observations["states"][:, 0] < -1e3
        actions = torch.where(spoilt[:, None, None], torch.nan, found.actions)
        return ActionSample(actions, found.log_probs, found.forward_inputs)


def test_a_failure_of_the_policy_is_told_and_passes(policy: Policy) -> None:
    bad = observation(0) | {"states": np.full(5, 1e4, np.float32)}
    failing: Any = Failing(policy)
    failing.may_go.set()
    with serving(failing) as running, running.connect() as client:
        with pytest.raises(ServerError, match="the policy failed: RuntimeError: out of memory"):
            client.infer(bad)
        with pytest.raises(urllib.error.HTTPError) as caught:
            http(running, "/infer", pack(bad))
        assert caught.value.code == 500
        np.testing.assert_array_equal(client.infer(observation(0))["actions"], alone(policy, 0))
        assert running.server.latencies.counters["failed"] == 2
        with pytest.raises(ServerError, match="the policy gives no finite actions"):
            client.infer(observation(0) | {"states": np.full(5, -1e4, np.float32)})


def test_only_the_request_that_fails_is_told_so(policy: Policy) -> None:
    failing: Any = Failing(policy)
    bad = observation(2) | {"states": np.full(5, 1e4, np.float32)}

    def asking(running: Running, given: Any) -> np.ndarray:
        with running.connect() as client:
            return client.infer(given)["actions"]

    with serving(failing, rows=8, wait=0.2) as running, ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, running, 0)
        assert failing.begun.wait(30)
        others = [pool.submit(asking, running, each)
                  for each in (observation(1), bad, observation(3))]  # fmt: skip
        until(lambda: len(running.server._batcher._waiting) == 3)
        failing.may_go.set()
        assert first.result(30).shape == (4, 3)
        np.testing.assert_array_equal(others[0].result(30), alone(policy, 1))
        np.testing.assert_array_equal(others[2].result(30), alone(policy, 3))
        with pytest.raises(ServerError, match="the policy failed: RuntimeError: out of memory"):
            others[1].result(30)
    assert failing.rows == [1, 3, 1, 1, 1]
    assert str(running.server.latencies).startswith("3 answered, 0 refused, 1 failed")


def test_new_weights_come_between_two_batches(policy: Policy) -> None:
    other = small_policy(seed=1)
    offered: list[Any] = []
    damaged: list[str] = []

    def newest(version: int) -> Any:
        if damaged:
            raise CheckpointError(damaged[0])
        return None if version == 8 or not offered else (8, offered[0])

    slow: Any = Slow(small_policy())
    slow.state_dict, slow.load_state_dict = slow.policy.state_dict, slow.policy.load_state_dict
    slow.named_parameters, slow.base = slow.policy.named_parameters, None
    slow.refuse_unknown_tensors = slow.policy.refuse_unknown_tensors
    with (
        serving(slow, newest=newest, follow=0.02) as running,
        ThreadPoolExecutor(4) as pool,
        running.connect() as client,
    ):
        asked = [pool.submit(client.infer, observation(0))]
        assert slow.begun.wait(30)
        offered.append(other.state_dict())
        time.sleep(0.1)  # followed meanwhile, but the batch under way has the old weights
        slow.may_go.set()
        old = asked[0].result(30)
        assert old["version"] == 7
        np.testing.assert_array_equal(old["actions"], alone(policy, 0))
        until(lambda: client.infer(observation(0))["version"] == 8)
        np.testing.assert_array_equal(client.infer(observation(0))["actions"], alone(other, 0))
        assert http(running, "/reload", b"") == b'{"version": 8}'
        damaged.append("damaged")
        with pytest.raises(urllib.error.HTTPError) as caught:
            http(running, "/reload", b"")
        assert (caught.value.code, caught.value.read()) == (409, b"damaged\n")
        assert client.infer(observation(0))["version"] == 8


def test_weights_that_cannot_be_read_do_not_end_the_look_for_newer_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given: list[Any] = [AttributeError("no 'shape'"), (8, small_policy(seed=1).state_dict())]

    def newest(version: int) -> Any:
        found = given[0] if len(given) > 1 or version < 8 else None
        if isinstance(found, Exception):
            raise found
        return found

    with serving(small_policy(), newest=newest, follow=0.02) as running:
        until(lambda: "AttributeError: no 'shape'; the weights of step 7 stay" in caplog.text)
        given.pop(0)
        until(lambda: running.server._policy.version == 8)
    assert caplog.text.count("AttributeError") == 1


def test_weights_that_were_read_count_though_who_asked_for_them_has_gone() -> None:
    may_go, offered = threading.Event(), [(8, small_policy(seed=1).state_dict())]

    def newest(version: int) -> Any:
        assert may_go.wait(30)
        return offered.pop() if offered else None

    with serving(small_policy(), newest=newest) as running:
        with pytest.raises(TimeoutError):
            http(running, "/reload", b"", timeout=0.1)
        assert http(running, "/healthz") == b"OK\n"  # in which time it is seen that they went
        may_go.set()
        until(lambda: running.server._policy.version == 8)


def test_quantiles_are_right_to_a_fortieth() -> None:
    histogram = Histogram()
    times = np.random.default_rng(0).lognormal(-6, 1, 5000)
    for seconds in times:
        histogram.add(float(seconds))
    for share in (0.5, 0.9, 0.99):
        exact = np.quantile(times, share, method="inverted_cdf")
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.026)
    assert np.isnan(Histogram().quantile(0.5))
