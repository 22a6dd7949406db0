"""In the sandbox of the tests: runs them against the program in the other sandbox.

The tests come from the data set. They are kept apart from the host because they may be slow or
wrong, and apart from the program because it must not touch them.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from collections.abc import Iterator
from types import CodeType
from typing import Any, BinaryIO

from rlinf.rewards.grading.values import NotPlainError, decode, encode, receive, send

_TESTS = "tests.json"


class ProgramError(Exception):
    """The program raised an exception that is not built in."""


class ProgramGoneError(Exception):
    """The program has ended, or sends what is no answer."""


class Connection:
    """Asks the program."""

    def __init__(self, replies: BinaryIO, requests: BinaryIO) -> None:
        self._replies = replies
        self._requests = requests

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, raise what the program raised, return its answer otherwise."""
        try:
            send(self._requests, request)
            reply = self.receive()
        except OSError as error:
            raise ProgramGoneError("the program has ended") from error
        raised = reply.get("raised")
        if raised is None:
            return reply
        kind = getattr(builtins, str(raised), None)
        text = str(reply.get("text", ""))
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise _exception(kind, text)
        raise ProgramError(f"{raised}: {text}")

    def receive(self) -> dict[str, Any]:
        """Return the next message of the program."""
        try:
            return receive(self._replies)
        except EOFError as error:
            raise ProgramGoneError(str(error)) from error

    def value(self, form: Any) -> Any:
        """Return the value of an answer; an object of the program becomes a :class:`Remote`."""
        try:
            return decode(form, lambda number: Remote(self, number))
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ProgramGoneError("the program answers what is no value") from error


def _exception(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # one of the few that take several arguments
        return ProgramError(f"{kind.__name__}: {text}")


class Remote:
    """Stands for an object of the program that is no plain value.

    It can be called, indexed, iterated over and asked for attributes. It equals itself alone: what
    the program thinks of its equality is of no interest.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def _do(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        connection = self._connection
        request = {
            "operation": operation,
            "target": self._number,
            "arguments": [encode(argument, _form_of) for argument in arguments],
            "keywords": {name: encode(item, _form_of) for name, item in keywords.items()},
        }
        reply = connection.ask(request)
        changed = reply.get("changed")
        for position, argument in enumerate(arguments):
            if isinstance(changed, dict) and str(position) in changed:
                _update(argument, connection.value(changed[str(position)]))
        return connection.value(reply.get("value"))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object over there."""
        return self._do("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._do("attribute", name)

    def __len__(self) -> int:
        length: int = self._do("length")
        return length

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key, value)

    def __contains__(self, item: Any) -> bool:
        return self._do("contains", item) is True

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._do("iterate")
        return iterator

    def __next__(self) -> Any:
        return self._do("next")

    def __str__(self) -> str:
        return str(self._do("text"))

    def __repr__(self) -> str:
        return str(self._do("representation"))

    def __bool__(self) -> bool:
        return self._do("truth") is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)


def _form_of(value: Any) -> dict[str, int]:
    if isinstance(value, Remote):
        return {"handle": value._number}
    raise NotPlainError(f"a test passes a {type(value).__name__}, which is no plain value")


def _update(argument: Any, changed: Any) -> None:
    """Let the caller see that a function has changed its argument in place."""
    if type(argument) is not type(changed) or argument == changed:
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


def offered_names(names: list[str], entry_point: str | None) -> list[str]:
    """The names of the program that the tests get to see.

    A program that redefines ``all`` must not decide what the tests mean by it; unless it is what
    the task asks for.
    """
    return [
        name
        for name in names
        if name == entry_point or not (hasattr(builtins, name) or name.startswith("__"))
    ]


def run_tests(connection: Connection, tests: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield for each test whether it passed, and if not, why.

    ProgramGoneError where the program ended; the tests that are left have failed.
    """
    try:
        used = _names_in([tests["setup"], *tests["asserts"]])
        setup = compile(tests["setup"], "setup", "exec")
        codes = [compile(text, "test", "exec") for text in tests["asserts"]]
    except (SyntaxError, ValueError) as error:
        yield {"unusable": f"the tests are no Python: {error}"}
        return
    names = connection.receive().get("names", [])
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    namespace: dict[str, Any] = {"__name__": "tests"}
    entry_point = tests["entry_point"]
    for name in offered_names(names, entry_point):
        if name in used or name == entry_point:
            namespace[name] = connection.value(connection.ask({"name": name}).get("value"))
    if entry_point in namespace:
        namespace["candidate"] = namespace[entry_point]
    failure = _run_setup(setup, namespace)
    if failure is not None:
        yield failure
        return
    for code in codes:
        yield _run_test(code, namespace)


def _names_in(texts: list[str]) -> set[str]:
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _run_setup(code: CodeType, namespace: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on all tests where what runs before them raises, otherwise None.

    Run once more without the program, it shows whose fault that is: one of the data set is told,
    and a program must not be able to make it look like one. A name that is missing may be either.
    """
    verdict, error = _run(code, namespace)
    if error is None or "unusable" in verdict:
        return None if error is None else verdict
    if isinstance(error, NameError):
        verdict["doubtful"] = f"the setup of tests, or the program, lacks a name: {error}"[:300]
    alone, error = _run(code, {"__name__": "tests"})
    if error is None or isinstance(error, NameError):
        return verdict
    return {"unusable": f"the setup of the tests raises {alone['why']}"}


def _run_test(code: CodeType, namespace: dict[str, Any]) -> dict[str, Any]:
    verdict, _ = _run(code, namespace)
    return verdict


def _run(code: CodeType, namespace: dict[str, Any]) -> tuple[dict[str, Any], BaseException | None]:
    """The verdict on what raises, or does not, and what it raised."""
    try:
        exec(code, namespace)
    except NotPlainError as error:
        return {"unusable": str(error)}, error
    except ProgramGoneError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a test fails by raising
        return {"passed": False, "why": f"{type(error).__name__}: {error}"[:300]}, error
    return {"passed": True}, None


def main() -> None:
    """Run the tests and write one line for each of them to standard output."""
    with open(_TESTS, encoding="utf-8") as file:
        tests = json.load(file)
    # What the tests print must not be taken for verdicts.
    with open(os.devnull, "wb") as nowhere, open(os.dup(1), "wb") as verdicts:
        os.dup2(nowhere.fileno(), 1)
        with open(3, "rb") as replies, open(4, "wb") as requests:
            try:
                for verdict in run_tests(Connection(replies, requests), tests):
                    send(verdicts, verdict)
            except ProgramGoneError:
                return
