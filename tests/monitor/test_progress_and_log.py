"""What a user sees while a run goes on, with and without a terminal."""

import io
import logging
import re
import sys
import threading
import warnings
from pathlib import Path

from rich.console import Console

from rlinf.monitor.progress import Progress
from rlinf.monitor.run_directory import logging_to
from rlinf.runners.embodied import Embodied

METRICS = {
    "env/steps": 20_480.0,
    "env/steps_per_second": 3321.4,
    "env/success_once": 0.25,
    "env/return": 512.125,
    "actor/approx_kl": 0.0123,
    "critic/explained_variance": 0.5,
    "time/env": 0.4,
    "time/actor": 0.1,
    "time/step": 0.6,
}

FIGURES = Embodied.figures


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def plain(total, **options):
    clock, out = Clock(), io.StringIO()
    return (
        Progress(total, figures=FIGURES, console=Console(file=out), clock=clock, **options),
        clock,
        out,
    )


def test_plain_line_shows_everything():
    progress, clock, out = plain(40)
    with progress:
        clock.now += 20
        progress.update(10, METRICS)
    assert out.getvalue() == (
        "step 10/40  env-steps 20,480  env-steps/s 3,321  success 0.250  return 512.12  KL 0.0123"
        "  explained variance 0.500  ETA 1:00  [env 0.40 s, actor 0.10 s, step 0.60 s]\n"
    )


def test_plain_lines_are_rare_but_tell_first_last_and_evaluations():
    progress, clock, out = plain(20, line_interval=5)
    with progress:
        for step in range(1, 21):
            clock.now += 1
            progress.update(step, METRICS | ({"eval/success": 0.5} if step == 4 else {}))
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]
    assert shown == [1, 4, 9, 14, 19, 20]
    assert "eval success 0.500" in out.getvalue().splitlines()[-1]


def test_the_last_line_of_a_run_that_ends_early_is_of_its_last_step():
    progress, clock, out = plain(20, line_interval=60)
    with progress:
        for step in range(1, 8):
            clock.now += 1
            progress.update(step, METRICS | ({"validation/loss": 0.5} if step == 4 else {}))
        progress.stop()
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]
    assert shown == [1, 4, 7]


def test_missing_and_odd_figures_and_resume():
    progress, clock, out = plain(30, done_steps=10)
    with progress:
        progress.update(10, {})
        clock.now += 3700
        progress.update(20, {"env/success_once": float("nan"), "actor/approx_kl": 1.0})
    first, second = out.getvalue().splitlines()
    assert first == "step 10/30  ETA -"
    assert second == "step 20/30  KL 1.0000  ETA 1:01:40"


def on_a_terminal():
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100, color_system=None), out


def test_live_display_on_a_terminal():
    console, out = on_a_terminal()
    stdout = sys.stdout
    with Progress(40, figures=FIGURES, console=console) as progress:
        progress.update(10, METRICS)
    text = out.getvalue()
    for part in ("training", "10/40", "elapsed", "ETA", "success 0.250", "KL 0.0123", "env 0.40 s"):
        assert part in text
    assert sys.stdout is stdout


def test_prints_and_log_lines_stand_above_the_display(tmp_path):
    console, out = on_a_terminal()
    progress = Progress(40, figures=FIGURES, console=console)
    with logging_to(tmp_path / "run.log"), progress:
        progress.update(10, METRICS)
        logging.getLogger("rlinf.some.room").warning("watch out")
        print("printed")
    # Each line begins where the display was erased, and ends before it is drawn again.
    erased = r"\x1b\[2K"
    assert re.search(erased + r"warning: watch out\n", out.getvalue())
    assert re.search(erased + r"printed\n", out.getvalue())


def test_log_file_takes_all_and_the_screen_warnings(tmp_path, capsys):
    path = tmp_path / "run.log"
    log = logging.getLogger("rlinf.runners.test")
    with logging_to(path):
        log.info("quiet")
        log.warning("loud")
        log.debug("nothing")
        warnings.warn("from a library", stacklevel=1)
        try:
            raise KeyError("why")
        except KeyError:
            log.exception("failed")
    log.warning("after")
    lines = path.read_text()
    assert re.search(r"\d{4}-\d\d-\d\d .* INFO MainProcess rlinf\.runners\.test: quiet\n", lines)
    assert "loud" in lines
    assert "from a library" in lines
    assert "KeyError: 'why'" in lines
    assert "nothing" not in lines
    assert "after" not in lines
    shown = capsys.readouterr().err
    assert "warning: loud\n" in shown
    assert "quiet" not in shown


def test_log_is_continued_by_a_resumed_run(tmp_path):
    for text in ("first", "second"):
        with logging_to(tmp_path / "run.log"):
            logging.getLogger("rlinf").info(text)
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2


def test_a_log_on_a_full_disk_costs_its_lines_alone(capsys):
    with logging_to(Path("/dev/full")):
        logging.getLogger("rlinf").info("lost")
        logging.getLogger("rlinf").warning("shown")
    assert capsys.readouterr().err == "warning: shown\n"


def test_what_ends_a_thread_is_a_warning_and_its_trace_is_in_the_file(tmp_path, capsys):
    def fail():
        raise ValueError("of a library")

    before, path = threading.excepthook, tmp_path / "run.log"
    with logging_to(path):
        thread = threading.Thread(target=fail, name="writer")
        thread.start()
        thread.join()
    assert threading.excepthook is before
    assert capsys.readouterr().err == "warning: thread 'writer' ended: ValueError: of a library\n"
    assert "Traceback" in path.read_text()
