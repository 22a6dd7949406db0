"""The pool against functions that raise, hang, die, or return nonsense."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf.errors import ConfigError, RunFailure
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.pool import RewardPool
from rlinf.rewards.protocol import RewardInput

BEHAVE = {"type": "function", "function": "tests.rewards.user_rewards:behave"}


def config(**changes) -> RewardConfig:
    return RewardConfig.model_validate({"functions": {"mine": BEHAVE}, "processes": 2, **changes})


def sample(completion: str, **changes) -> RewardInput:
    return RewardInput(prompt="", completion=completion, num_tokens=1, **changes)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(config(deadline=1.0)) as pool:
        yield pool


@pytest.mark.parametrize(
    ("completion", "fault", "reason"),
    [
        ("raise", "mine/exception", r"ZeroDivisionError: division by zero \(.*\.py line \d+\)$"),
        ("unknown", "mine/exception", "KeyError: 'unknown'"),
        ("half", "mine/exception", r"no number: \\ud83d \("),
        ("memory", "mine/exception", "MemoryError"),
        ("nan", "mine/not_a_number", "nan"),
        ("infinity", "mine/not_a_number", "-inf"),
        ("value 1e39", "mine/not_a_number", r"1e\+39, no finite number of 32 bits"),
        ("integer -1" + 400 * "0", "mine/not_a_number", "-inf, no finite number of 32 bits"),
        ("text 1.0", "mine/not_a_number", "'1.0', a str"),
        ("none", "mine/not_a_number", "NoneType"),
        ("truth", "mine/not_a_number", "True, a bool"),
        ("hang", "mine/timeout", r"no result after 1 s \(deadline\)"),
        pytest.param("hang_in_c", "mine/timeout", "no result after 1 s", marks=pytest.mark.slow),
        pytest.param("deaf", "mine/timeout", "no result after 1 s", marks=pytest.mark.slow),
        ("kill", "mine/died", "SIGKILL"),
        ("exit", "mine/died", "exit code 3"),
        ("leave", "mine/died", "gone"),
        ("print", "mine/died", "words of a dying process"),
    ],
)
def test_a_function_that_fails_costs_one_sample(pool, completion, fault, reason):
    pool.take_faults()
    batch = [sample(f"value {number}") for number in range(6)]
    batch[2] = sample(completion)
    outputs = pool.score(batch)
    bad = outputs.pop(2)
    assert (bad.valid, bad.reward, bad.fault, dict(bad.parts)) == (False, 0.0, fault, {})
    assert re.search(reason, bad.reason), bad.reason
    assert [output.reward for output in outputs] == [0, 1, 3, 4, 5]
    assert all(output.valid and output.fault is None for output in outputs)
    assert pool.take_faults() == {fault: 1}
    assert pool.take_faults() == {}


def test_order_is_kept_when_late_samples_finish_first(pool):
    waits = [0.3, 0.0, 0.1, 0.0, 0.05, 0.2]
    outputs = pool.score([sample(f"wait {seconds}") for seconds in waits])
    assert [output.reward for output in outputs] == waits


def test_a_function_that_returns_in_two_processes_moves_no_reward():
    completions = [
        "value 7",
        "fork",
        "wait 0.2",
        "value 8",
        "fork_and_raise",
        "wait 0.2",
        "value 9",
    ]
    with RewardPool(config(processes=1)) as pool:
        outputs = pool.score([sample(completion) for completion in completions])
    assert [output.reward for output in outputs] == [7.0, 1.0, 0.2, 8.0, 1.0, 0.2, 9.0]


@pytest.mark.parametrize(("completion", "value"), [("integer 3", 3.0), ("numpy 0.5", 0.5)])
def test_any_real_number_is_a_value(pool, completion, value):
    (output,) = pool.score([sample(completion)])
    assert output.reward == value
    assert type(output.reward) is float


def test_nothing_to_score(pool):
    assert pool.score([]) == []


def test_functions_run_in_the_main_thread_and_without_torch(pool):
    outputs = pool.score([sample("main_thread"), sample("torch")])
    assert [(output.reward, output.reason) for output in outputs] == [(1.0, None), (0.0, None)]


def test_an_answer_that_is_no_json_is_the_fault_of_its_sample(pool):
    outputs = pool.score([sample("value 1", answer={1, 2}), sample("value 2")])
    assert [output.valid for output in outputs] == [False, True]
    assert "no JSON" in outputs[0].reason


def test_text_that_is_no_unicode_arrives(pool):
    (output,) = pool.score([sample("value 1", answer="\ud800")])
    assert output.valid


def test_a_process_that_is_killed_between_batches_costs_nothing(pool):
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # until its socket is closed
    outputs = pool.score([sample(f"value {number}") for number in range(4)])
    assert [output.reward for output in outputs] == [0, 1, 2, 3]


def test_a_process_that_is_killed_from_outside_costs_its_sample():
    with RewardPool(config(processes=1)) as pool:
        killer = threading.Timer(0.3, lambda: os.kill(pool.pids[0], signal.SIGKILL))
        killer.start()
        outputs = pool.score([sample("value 1"), sample("wait 5"), sample("value 2")])
        killer.join()
    assert [output.valid for output in outputs] == [True, False, True]
    assert outputs[1].fault == "mine/died"


def test_threads_take_turns(pool):
    results: dict[int, list[float]] = {}

    def score(number: int) -> None:
        batch = [sample(f"value {number * 100 + index}") for index in range(20)]
        results[number] = [output.reward for output in pool.score(batch)]

    threads = [threading.Thread(target=score, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert results[number] == [number * 100 + index for index in range(20)]


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.floats(-1e6, 1e6).map(lambda value: f"value {value!r}"),
            st.sampled_from(["raise", "nan", "text x", "none"]),
            st.text(max_size=20),
        ),
        max_size=12,
    )
)
def test_every_sample_gets_its_own_output(pool, completions):
    outputs = pool.score([sample(completion) for completion in completions])
    assert len(outputs) == len(completions)
    for completion, output in zip(completions, outputs, strict=True):
        if completion.startswith("value "):
            assert output.reward == float(completion[6:])
        else:
            assert not output.valid


def test_the_sum_is_weighted_and_every_part_is_named():
    functions = {
        "first": {**BEHAVE, "weight": 2.0},
        "second": {**BEHAVE, "weight": -0.5, "options": {"factor": 10.0}},
        "watched": {**BEHAVE, "weight": 0.0},
    }
    with RewardPool(config(functions=functions, processes=1)) as pool:
        good, bad = pool.score([sample("value 3"), sample("raise")])
    assert dict(good.parts) == {"first": 3.0, "second": 30.0, "watched": 3.0}
    assert good.reward == 2 * 3 - 0.5 * 30
    assert bad.fault == "first/exception"
    with RewardPool(config(functions={"much": {**BEHAVE, "weight": 1e30}}, processes=1)) as pool:
        (over,) = pool.score([sample("value 1e10")])
    assert (over.fault, over.reward) == ("not_a_number", 0.0)
    assert "the weighted sum has 1e+40" in str(over.reason)


COMPARE = {"type": "group_function", "function": "tests.rewards.user_rewards:compare"}


def test_a_function_of_groups_sees_the_valid_completions_of_one_prompt():
    functions = {
        "rank": {**COMPARE, "weight": 10.0, "options": {"by": "mine"}},
        "mine": {**BEHAVE, "weight": -1.0},
    }
    groups = [
        [sample("value 7"), sample("raise"), sample("value 5"), sample("value 1", answer={1})],
        [],
        [sample("value 3")],
        [sample("nan")],
    ]
    with RewardPool(config(functions=functions)) as pool:
        first, empty, alone, bad = pool.score_groups(groups)
        assert pool.take_faults() == {"mine/exception": 1, "mine/not_a_number": 1, "exception": 1}
    assert [output.reward for output in first] == [10 - 7, 0, 0 - 5, 0]
    assert dict(first[0].parts) == {"mine": 7.0, "rank": 1.0}
    assert [output.fault for output in first] == [None, "mine/exception", None, "exception"]
    assert (empty, alone[0].reward, bad[0].valid) == ([], -3.0, False)


@pytest.mark.parametrize(
    ("completion", "fault", "reason"),
    [
        ("group: raise", "rank/exception", "division by zero"),
        ("group: few", "rank/not_a_number", "1 values.*where a list of 3 numbers is due"),
        ("group: one number", "rank/not_a_number", "it returned 0.0, a float, where a list of 3"),
        ("group: mapping", "rank/not_a_number", "a dict, where a list of 3 numbers"),
        ("group: nan", "rank/not_a_number", "nan, no finite number"),
        ("group: hang", "rank/timeout", r"no result after 1 s \(deadline\)"),
        ("group: kill", "rank/died", "SIGKILL"),
    ],
)
def test_a_function_of_groups_that_fails_costs_one_group(comparing, completion, fault, reason):
    comparing.take_faults()
    groups = [
        [sample("1"), sample("22"), sample("22")],
        [sample("1"), sample(completion), sample("333")],
        [sample("333"), sample("1"), sample("22")],
    ]
    good, bad, other = comparing.score_groups(groups)
    assert [output.reward for output in good + other] == [0, 1, 1, 2, 0, 1]
    assert [(output.valid, output.fault) for output in bad] == [(False, fault)] * 3
    assert re.search(reason, str(bad[0].reason)), bad[0].reason
    assert comparing.take_faults() == {fault: 3}


@pytest.fixture(scope="module")
def comparing():
    with RewardPool(config(functions={"rank": COMPARE}, deadline=1.0)) as pool:
        yield pool


def test_what_a_function_of_groups_returns_may_be_an_array(comparing):
    outputs = comparing.score([sample("group: array"), sample("1")])
    assert [output.reward for output in outputs] == [0.0, 1.0]


def test_the_function_that_hangs_is_named():
    functions = {
        "length": {"type": "length", "max_length": 10, "cache_length": 5},
        "mine": BEHAVE,
    }
    with RewardPool(config(functions=functions, processes=1, deadline=0.5)) as pool:
        (output,) = pool.score([sample("hang")])
    assert output.fault == "mine/timeout"


def test_no_process_is_left():
    with RewardPool(config(deadline=0.5)) as pool:
        pool.score([sample("hang"), sample("kill"), sample("value 1")])
        pids = pool.pids
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RunFailure, match="closed"):
        pool.score([sample("value 1")])
    pool.close()


def test_processes_end_with_a_parent_that_is_killed():
    script = """
import sys, time
from tests.rewards.test_pool import RewardPool, config, sample
pool = RewardPool(config())
print(*pool.pids, flush=True)
pool.score([sample("hang")] * 2)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tests.rewards.user_rewards:behav", "did you mean `behave`"),
        ("tests.rewards.user_rewards:not_callable", "no function not_callable"),
        ("tests.rewards.nowhere:score", "there is no module tests.rewards.nowhere"),
        ("nowhere.py:score", "there is no file nowhere.py"),
    ],
)
def test_a_function_that_is_not_there_is_refused(function, reason):
    functions = {"mine": {"type": "function", "function": function}}
    with pytest.raises(ConfigError, match=reason) as caught:
        RewardPool(config(functions=functions, processes=1))
    assert caught.value.key == "functions.mine.function"


def test_a_file_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def score(sample, *, word):\n    return float(word in sample.completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    section = {"type": "function", "function": "mine.py:score", "options": {"word": "yes"}}
    with RewardPool(config(functions={"mine": section}, processes=1)) as pool:
        outputs = pool.score([sample("oh yes"), sample("no")])
    assert [output.reward for output in outputs] == [1.0, 0.0]


def test_a_file_that_cannot_be_imported_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    section = {"type": "function", "function": f"{tmp_path}/broken.py:score"}
    with pytest.raises(ConfigError, match="nothing_of_that_name"):
        RewardPool(config(functions={"mine": section}, processes=1))


def test_processes_that_never_start_end_the_run(tmp_path):
    (tmp_path / "deadly.py").write_text("import os\nscore = os._exit(7)\n")
    section = {"type": "function", "function": f"{tmp_path}/deadly.py:score"}
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(RunFailure, match=r"failed to start 3 times in a row.*exit code 7"):
        RewardPool(config(functions={"mine": section}, processes=1))
    assert {process.pid for process in psutil.Process().children()} == before
