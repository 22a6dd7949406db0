"""The program ``rlinf``, also ``python -m rlinf``; nothing is imported before it can be stopped."""

import contextlib
import os
import signal
import sys


def main() -> int:
    """Run the command of this process and return its exit code."""
    _open_standard_streams()
    with contextlib.suppress(FileNotFoundError):  # of a working directory that was deleted
        if os.getcwd() not in sys.path:  # as `python -m` does; behind all that is installed
            sys.path.append(os.getcwd())
    from rlinf.processes.interrupt import note_interrupts

    note_interrupts()
    try:
        from rlinf.cli.main import main as run
    except KeyboardInterrupt:  # while libraries are imported, which takes half a second
        return 130
    code = run()
    if callable(signal.getsignal(signal.SIGINT)):
        # Libraries clean up from here on: a further Ctrl-C ends that, without a trace of theirs.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    started = sys.modules.get("rlinf.scheduler.runtime.ray_start")
    if started is not None:
        started.leave(code)
    return code


def _open_standard_streams() -> None:
    """Open those that are closed, or the first files of a run would get what is printed there."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # at the lowest number that is free: this one
            os.set_inheritable(descriptor, True)  # the same holds for what it starts
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


if __name__ == "__main__":
    raise SystemExit(main())
