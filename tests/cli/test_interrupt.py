"""Ctrl-C: once asks to stop, twice ends the process and its children at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlinf.cli import train
from rlinf.cli.lasting_output import lasting
from rlinf.cli.screen import say
from rlinf.cli.train import end_signals, stop_on_interrupt
from rlinf.runners import evaluation
from rlinf.scheduler.transport.cluster_files import shared_memory_directory


def test_the_first_signal_sets_the_flag_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_that_hangs_up_ends_a_run_with_a_checkpoint_and_never_at_once() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with stop_on_interrupt() as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.wait(10)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_to_a_program_and_to_its_group_is_one_wish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `timeout` sends it: the second would else end the run without a checkpoint."""
    left: list[int] = []
    monkeypatch.setattr(train, "_leave_nothing_behind", lambda: None)
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(train, "_ONE_WISH_SECONDS", 3600.0)
    with stop_on_interrupt():
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert not left
        monkeypatch.setattr(train, "_ONE_WISH_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert left == [130]


def test_a_run_that_was_started_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_on_interrupt() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wait(0.2)
            assert signal.SIGHUP not in end_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_goes_on_to_its_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start may take minutes, and is no step of the run."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as told, stop_on_interrupt() as stop:
        monkeypatch.setattr(sys, "__stderr__", told)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
        told.close()
        assert "the step, evaluation or warm start under way ends" in read.read()


def test_a_stop_is_asked_for_although_nobody_reads_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken, stop_on_interrupt() as stop:
        monkeypatch.setattr(sys, "__stderr__", broken)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)


@pytest.mark.parametrize("kind", ["closed pipe", "full disk"])
def test_a_command_outlives_its_output(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "full disk":
        target = open("/dev/full", "w")  # noqa: SIM115 - closed below, when it no longer fails
    else:
        reading, writing = os.pipe()
        os.close(reading)
        target = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", target)
    with lasting("stdout"):
        for _ in range(3):
            print("a line", flush=True)
        say("another")
    assert sys.stdout is target
    target.close()
    (told,) = [record.getMessage() for record in caplog.records]
    why = "No space left on device" if kind == "full disk" else "Broken pipe"
    assert told == (
        f"nothing more can be written to standard output ({why}): the command goes on without it"
    )


def test_streams_that_are_closed_are_not_those_of_a_run(tmp_path: Path) -> None:
    """The first files that a process opens would else be its standard output and error."""
    program = (
        "import os, sys; sys.argv = ['rlinf', '--version']; os.closerange(0, 3);"
        "from rlinf.__main__ import main; code = main();"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); file.write(str(file.fileno()));"
        "file.flush(); print('printed', flush=True); os.write(2, b'written');"
        "assert all(map(os.get_inheritable, range(3)));"
        "os._exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_an_interrupt_while_libraries_clean_up_shows_no_trace() -> None:
    program = (
        "import atexit, os, signal, sys; sys.argv = ['rlinf', '--version'];"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT));"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from rlinf.__main__ import main; raise SystemExit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -signal.SIGINT
    assert not done.stderr


PROGRAM = """
import os, signal, subprocess, sys, time
from rlinf.cli.train import stop_on_interrupt
from rlinf.scheduler.transport.cluster_files import ClusterFiles
files = ClusterFiles.create()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with stop_on_interrupt() as stop:
    print(child.pid, files.name, flush=True)
    stop.wait()
    print("stopping", flush=True)
    time.sleep(600)
"""


def test_the_second_signal_ends_the_process_and_its_children() -> None:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    pid, cluster = process.stdout.readline().split()
    child = int(pid)
    assert list(shared_memory_directory().glob(f"rlinf-{cluster}*"))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stdout.close()
    assert not list(shared_memory_directory().glob(f"rlinf-{cluster}*"))
    for _ in range(600):  # a killed process is gone a little later
        if not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie":
            return
        time.sleep(0.1)
    pytest.fail("the child process lives on")


def test_an_interrupted_evaluation_that_keeps_nothing_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Playing:
        def play(self, groups: object, spec: object, name: str, kept: None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation._played(Playing(), None, None, "window_open step 8", None)
    assert capsys.readouterr().err == (
        "interrupted: window_open step 8: nothing is written of what was played; begin anew\n"
    )
