"""The module that ``RLINF_EXT_MODULE`` names."""

import pytest

from rlinf.errors import UserError
from rlinf.scheduler import Worker
from rlinf.scheduler.runtime.launch import register_extensions

MODULE = "tests.scheduler.extension_module"


class Extended(Worker):
    def __init__(self) -> None:
        self.seen = self.registrations()
        super().__init__()

    def registrations(self) -> int:
        from tests.scheduler.extension_module import registrations

        return len(registrations)

    def at_start(self) -> int:
        return self.seen


def test_every_process_registers_once_before_its_workers_are_built(launch, runtime, monkeypatch):
    monkeypatch.setenv("RLINF_EXT_MODULE", MODULE)
    group = launch(Extended, 2, f"extended_{runtime}")
    assert group.at_start().wait() == [1, 1]
    assert group.registrations().wait() == [1, 1]


def test_a_module_that_cannot_be_used_is_named(monkeypatch):
    monkeypatch.setenv("RLINF_EXT_MODULE", "no_such_extension")
    with pytest.raises(UserError, match=r"no module 'no_such_extension'.*PYTHONPATH"):
        register_extensions()
    monkeypatch.setenv("RLINF_EXT_MODULE", "json")
    with pytest.raises(UserError, match=r"'json', which has no function 'register\(\)'"):
        register_extensions()
    monkeypatch.setenv("RLINF_EXT_MODULE", MODULE)
    monkeypatch.setattr(f"{MODULE}.register", lambda: {}["boom"])
    with pytest.raises(UserError, match=rf"register\(\) of '{MODULE}', .* raised KeyError: 'boom'"):
        register_extensions()
