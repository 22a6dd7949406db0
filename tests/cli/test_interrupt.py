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

from rlinf.cli.train import stop_on_interrupt
from rlinf.scheduler.transport.cluster_files import shared_memory_directory


def test_the_first_signal_sets_the_flag_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
    assert signal.getsignal(signal.SIGINT) is before


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
