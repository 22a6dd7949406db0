"""Children that begin as forks of a process that has imported what they need."""

import contextlib
import errno
import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rlinf.errors import ConfigError
from rlinf.processes import template
from rlinf.processes.child import ProcessLostError, SupervisedProcess
from tests.processes.ends import ended

CHILD = "tests.processes.obedient_child"


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    """Those of a test are of no other test."""
    own = template.Templates()
    monkeypatch.setattr("rlinf.processes.child.TEMPLATES", own)
    yield own
    own.close()


@pytest.fixture
def start():
    with contextlib.ExitStack() as running:

        def started(settings=None, imported=(), **options):
            process = SupervisedProcess(CHILD, settings or {}, imported=imported, **options)
            running.callback(process.kill)
            process.receive(30.0)
            return process

        yield started


def parent_of(process):
    return psutil.Process(process.pid).ppid()


def asked(process, words):
    return process.ask("evaluate", seconds=10.0, words=words)["value"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that templates and children find."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return written


def test_children_of_the_same_kind_share_one_import(start, module):
    name = module("slow_to_import", "import os\nimported_by = os.getpid()")
    first, second = start(imported=[name]), start(imported=[name])
    by = f"__import__('{name}').imported_by"
    assert asked(first, by) == asked(second, by) == parent_of(first) == parent_of(second)
    assert parent_of(first) not in (os.getpid(), parent_of(start()))
    alone = start(imported=None)
    assert parent_of(alone) == os.getpid()
    assert asked(alone, by) == alone.pid


def test_each_begins_with_chances_files_and_places_of_its_own(start, monkeypatch, tmp_path):
    first = start(imported=["numpy"])
    monkeypatch.chdir(tmp_path)
    second = start(imported=["numpy"])
    assert parent_of(first) == parent_of(second)
    for draw in ("__import__('random').random()", "__import__('numpy').random.random()"):
        assert asked(first, draw) != asked(second, draw)
    assert asked(second, "__import__('os').getcwd()") == str(tmp_path)
    files = "[f for f in __import__('os').listdir('/proc/self/fd')]"
    alone = start(imported=None)
    assert len(asked(second, files)) == len(asked(alone, files))
    for process in (first, second):
        assert os.getpgid(process.pid) == process.pid
    handlers = "[__import__('signal').getsignal(n).__class__.__name__ for n in (17, 15)]"
    assert asked(second, handlers) == asked(alone, handlers)


def test_other_variables_or_another_path_are_another_template(start, monkeypatch, tmp_path):
    first = start()
    monkeypatch.setenv("OF_THE_USER", "1")
    second = start()
    monkeypatch.syspath_prepend(tmp_path)
    third = start()
    assert asked(second, "__import__('os').environ['OF_THE_USER']") == "1"
    assert len({parent_of(each) for each in (first, second, third)}) == 3


def test_few_templates_are_kept_and_one_that_is_left_ends_with_its_last_child(
    start, monkeypatch, templates
):
    first = start()
    left = psutil.Process(parent_of(first))
    for number in range(template._MOST):
        monkeypatch.setenv("OF_THE_USER", str(number))
        start().close()
    assert len(templates._known) == template._MOST
    assert first.ask("echo", seconds=10.0, content=1)["echo"] == 1
    assert left.status() != psutil.STATUS_ZOMBIE
    first.close()
    assert ended(left)


def test_an_import_that_begins_a_thread_is_made_by_each_alone(start, module, templates):
    name = module(
        "of_threads",
        """
        import threading, time
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        """,
    )
    assert parent_of(start(imported=[name])) == os.getpid()
    assert list(templates._known.values()) == [None]
    assert parent_of(start(imported=[name])) == os.getpid()


@pytest.mark.parametrize("does", ["raise OSError('no')", "import os; os._exit(3)", "import gone"])
def test_an_import_that_fails_fails_no_template(start, module, does):
    process = start(imported=[module("failing", does)])
    assert process.ask("echo", seconds=10.0, content=1)["echo"] == 1
    assert (parent_of(process) == os.getpid()) == ("_exit" in does)


def test_imports_that_take_too_long_are_made_by_each_alone(start, module, monkeypatch):
    monkeypatch.setattr(template, "_START_SECONDS", 0.2)
    assert (
        parent_of(start(imported=[module("endless", "import time; time.sleep(9)")])) == os.getpid()
    )


def test_a_template_that_was_killed_takes_its_children_and_another_follows(start):
    first = start()
    by = psutil.Process(parent_of(first))
    by.kill()
    assert ended(by)
    second = start()
    assert parent_of(second) not in (by.pid, os.getpid())
    assert first.ask("echo", seconds=10.0, content=1)["echo"] == 1
    with pytest.raises(ProcessLostError, match=r"(?s)^crash: .*signal SIGKILL.*last words"):
        first.ask("die", seconds=10.0)
    first.kill()
    assert second.ask("echo", seconds=10.0, content=2)["echo"] == 2


def test_what_is_left_of_an_ended_one_stays_until_its_parent_knows(start):
    process = start()
    child = psutil.Process(process.pid)
    child.kill()
    assert ended(child)
    assert child.status() == psutil.STATUS_ZOMBIE
    process.kill()
    assert not psutil.pid_exists(child.pid)


def test_threads_start_children_at_the_same_time(start):
    with ThreadPoolExecutor(8) as threads:
        processes = list(threads.map(lambda _: start(), range(16)))
    assert len({process.pid for process in processes}) == 16
    assert len({parent_of(process) for process in processes}) == 1
    assert [p.ask("echo", seconds=10.0, content=i)["echo"] for i, p in enumerate(processes)] == [
        *range(16)
    ]


def test_a_fork_of_the_parent_has_templates_of_its_own(start):
    by = parent_of(start())
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            process = SupervisedProcess(CHILD, {}, imported=())
            process.receive(30.0)
            os.write(writing, str(parent_of(process)).encode())
            process.kill()
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(reading, 64)) not in (by, os.getpid())
    os.close(reading)
    os.close(writing)
    assert parent_of(start()) == by


def test_a_system_that_takes_no_more_processes_is_told(start, module):
    name = module(
        "no_more", f"import os\ndef fork(): raise OSError({errno.EAGAIN}, 'no')\nos.fork = fork"
    )
    with pytest.raises(ConfigError, match="no more processes may be started"):
        start(imported=[name])


def test_templates_end_with_their_parent(tmp_path):
    """Also one whose child does not answer."""
    program = f"""
        import os, psutil, sys
        from rlinf.processes.child import SupervisedProcess
        process = SupervisedProcess({CHILD!r}, {{}}, imported=())
        process.receive(30.0)
        process.send("sleep", seconds=600.0)
        print(process.pid, psutil.Process(process.pid).ppid(), flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with psutil.Popen(command, stdin=-1, stdout=-1, text=True) as parent:
        both = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(both) == 2
    assert all(map(ended, both))


def test_elsewhere_than_on_linux_each_imports_alone(start, monkeypatch):
    monkeypatch.setattr(template, "POSSIBLE", False)
    assert parent_of(start()) == os.getpid()
