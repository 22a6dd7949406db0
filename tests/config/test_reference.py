"""References to what is in modules, while other threads import these."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from rlinf.config.reference import check_reference
from rlinf.errors import ConfigError

SLOW = """
import sys, threading
half, rest = sys.half_imported
half.set()
rest.wait(20)

class Late: ...
"""


def test_a_module_that_another_thread_imports_has_all_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_slowly.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    half, rest = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "half_imported", (half, rest), raising=False)
    importing = threading.Thread(target=importlib.import_module, args=("imported_slowly",))
    importing.start()
    try:
        assert half.wait(20)
        check_reference("imported_slowly:Late")
        with pytest.raises(ConfigError, match="did you mean `Late`"):
            check_reference("imported_slowly:Lat")
    finally:
        rest.set()
        importing.join()
        sys.modules.pop("imported_slowly", None)
