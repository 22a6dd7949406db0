"""The program ``rlinf``, also ``python -m rlinf``; nothing is imported before it can be stopped."""

import contextlib
import os
import sys


def main() -> int:
    """Run the command of this process and return its exit code."""
    with contextlib.suppress(FileNotFoundError):  # of a working directory that was deleted
        if os.getcwd() not in sys.path:  # as `python -m` does; behind all that is installed
            sys.path.append(os.getcwd())
    try:
        from rlinf.cli.main import main as run
    except KeyboardInterrupt:  # while libraries are imported, which takes half a second
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
