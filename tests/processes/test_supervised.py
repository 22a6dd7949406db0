"""A child that answers messages, and what becomes of one that does not."""

import errno
import os
import re
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from rlinf.errors import ConfigError, MissingPackageError
from rlinf.processes.child import ProcessLostError, RefusedValueError, SupervisedProcess
from rlinf.processes.shared_block import (
    MemoryShortageError,
    SharedBlock,
    block_size,
    open_memory,
    reserve,
)
from tests.processes.ends import ended

CHILD = "tests.processes.obedient_child"


@pytest.fixture(params=[None, ()], ids=["started", "forked"])
def start(request):
    running = []

    def started(settings=None, **options):
        process = SupervisedProcess(CHILD, settings or {}, imported=request.param, **options)
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()


def test_it_answers_in_order_and_ends_when_it_is_closed(start):
    process = start()
    assert process.receive(30.0)["pid"] == process.pid
    for content in (1, "two", [3]):
        assert process.ask("echo", seconds=10.0, content=content)["echo"] == content
    child = psutil.Process(process.pid)
    process.close()
    assert ended(child)
    process.close()  # again


def test_several_may_close_at_the_same_time(start, tmp_path):
    own, other = str(tmp_path / "one"), str(tmp_path / "two")
    processes = [start({"meets": [own, other]}), start({"meets": [other, own]})]
    for process in processes:
        process.receive(30.0)
    for process in processes:
        process.begin_close(20.0)
    for process in processes:
        process.close()
    assert len(list(tmp_path.glob("*.met"))) == 2


def test_what_it_prints_is_logged_until_it_is_much(start, caplog):
    caplog.set_level("INFO", "rlinf")
    process = start()
    process.receive(30.0)
    process.ask("print", seconds=10.0, lines=2, width=3)
    process.ask("echo", seconds=10.0)
    told = f"process {process.pid} ({CHILD}) print"
    assert caplog.messages == [f"{told}ed: 0 xxx", f"{told}ed: 1 xxx"]
    caplog.clear()
    process.ask("print", seconds=10.0, lines=100, width=1000)
    process.ask("print", seconds=10.0, lines=1, width=1)
    assert 60 < len(caplog.messages) < 70
    assert caplog.messages[-1] == f"{told}s much: the rest is left out"


def test_what_it_refuses_is_raised_as_what_it_was(start):
    with pytest.raises(ConfigError, match="is wrong") as refused:
        start({"refuse": "options.task"}).receive(30.0)
    assert refused.value.key == "options.task"
    process = start()
    process.receive(30.0)
    with pytest.raises(MissingPackageError, match="the env needs the package 'simulator'"):
        process.ask("lacks", seconds=10.0)
    with pytest.raises(RefusedValueError, match="is illegal") as illegal:
        process.ask("value", seconds=10.0)
    assert "obedient_child.py" in illegal.value.stack
    with pytest.raises(ProcessLostError, match=r"(?s)^exception: .*cannot go on"):
        process.ask("fail", seconds=10.0)
    assert process.ask("echo", seconds=10.0, content=1)["echo"] == 1


def test_its_end_is_told_with_its_last_words(start):
    process = start()
    process.receive(30.0)
    with pytest.raises(ProcessLostError, match=r"(?s)^crash: .*exit code 3.*last words") as lost:
        process.ask("die", seconds=10.0)
    assert lost.value.reason == "crash"
    with pytest.raises(ProcessLostError, match="crash"):
        process.ask("echo", seconds=10.0)


def test_a_hang_is_told_with_its_stacks(start):
    process = start()
    process.receive(30.0)
    process.send("sleep", seconds=60)
    with pytest.raises(ProcessLostError, match=r"(?s)^hang: no answer within 0.3 s.*in answer"):
        process.receive(0.3)


def test_one_that_gets_on_may_take_longer_than_the_deadline(start):
    memory = open_memory("rlinf-test")
    try:
        fields = {"count": ((1,), np.dtype(np.int64))}
        reserve(memory, block_size(fields))
        block = SharedBlock(memory, fields)
        process = start(descriptors=[memory])
        process.receive(30.0)
        process.send("count", to=40)
        begin = time.monotonic()
        process.receive(1.0, progress=lambda: int(block["count"][0]))
        assert time.monotonic() - begin > 1.5
        assert block["count"][0] == 40
    finally:
        os.close(memory)


PARENT = f"""
    import json, sys
    from rlinf.processes.child import SupervisedProcess

    process = SupervisedProcess({CHILD!r}, {{}}, imported=() if sys.argv[2] == "forked" else None)
    process.receive(30.0)
    started = process.ask("start a process", seconds=10.0)["started"]
    if sys.argv[1] == "that hangs":
        process.send("sleep", seconds=600.0)
    print(process.pid, started, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("begins", ["started", "forked"])
@pytest.mark.parametrize("child", ["that waits", "that hangs", "that was killed first"])
def test_what_it_has_started_ends_with_the_parent(child, begins):
    command = [sys.executable, "-c", textwrap.dedent(PARENT), child, begins]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        both = [psutil.Process(pid) for pid in pids]
        if child == "that was killed first":
            both[0].kill()
            assert ended(both[0])
        parent.kill()
    assert len(both) == 2
    assert all(map(ended, both))


def test_an_interpreter_that_is_not_there_is_a_mistake_of_the_user():
    with pytest.raises(ConfigError, match="cannot start /no/python"):
        SupervisedProcess(CHILD, {}, python="/no/python")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EAGAIN, r"no more processes may be started \(ulimit -u, or pids.max .* nearest: "),
        (errno.ENOMEM, "no process can be started, memory is full: .* nearest: "),
    ],
)
def test_a_system_that_takes_no_more_processes_is_no_fault_of_the_interpreter(
    monkeypatch, number, message
):
    def refused(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rlinf.processes.child.subprocess.Popen", refused)
    with pytest.raises(ConfigError, match=message) as error:
        SupervisedProcess(CHILD, {})
    assert error.value.key == ""


FILES = """
import os, resource, sys
from rlinf.errors import ConfigError
from rlinf.processes.child import SupervisedProcess, require_open_files
few, most = (len(os.listdir("/dev/fd")) + int(more) for more in sys.argv[2:4])
resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
count = int(sys.argv[4])
try:
    require_open_files(count)
    children = [SupervisedProcess(sys.argv[1], {}, imported=()) for _ in range(count)]
except ConfigError as error:
    print(error)
else:
    for child in children:
        child.kill()
    print(count, "started,", resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most)
"""


def test_a_process_may_have_as_many_files_open_as_the_system_allows():
    def said(*numbers):
        words = [sys.executable, "-c", FILES, CHILD, *map(str, numbers)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        return ran.stdout.strip()

    assert said(12, 100, 6) == "6 started, True"
    assert said(30, 30, 3) == "3 started, True"
    refused = said(30, 30, 9)
    assert re.fullmatch(
        r"9 more processes need (\d+) open files, and this one may have \d+: ulimit -n \1, "
        "which the administrator may have to allow; nearest: 3 processes",
        refused,
    ), refused


def test_more_memory_than_there_is_is_refused():
    memory = open_memory("rlinf-test")
    try:
        with pytest.raises(MemoryShortageError) as shortage:
            reserve(memory, 2**50)
        assert shortage.value.wanted == 2**50 > shortage.value.available
    finally:
        os.close(memory)
