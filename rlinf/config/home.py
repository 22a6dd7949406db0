"""Where files of a user lie that no path names: below home, which a user need not have."""

from __future__ import annotations

import os
from pathlib import Path


def home_directory() -> Path | None:
    """The user's home: by ``HOME``, else as the system knows it; None where neither says one, as of
    a container that runs under a number without a name."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_directory(variable: str, below_home: str) -> Path | None:
    """The directory that an ``XDG_…`` variable names, else that below home; None without a home."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    home = home_directory()
    return None if home is None else home / below_home
