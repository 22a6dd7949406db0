"""In the sandbox of the unread program: runs it, and does what the tests ask of it.

Nothing here can be relied on: the program may change it all. Whatever arrives at the other side is
no more than an answer, right or wrong.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

from rlinf.rewards.grading.values import decode, encode, receive, send

_PROGRAM = "main.py"

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "call": lambda target, *arguments, **keywords: target(*arguments, **keywords),
    "length": len,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, value: target.__setitem__(key, value),
    "contains": lambda target, item: item in target,
    "iterate": iter,
    "next": next,
    "text": str,
    "representation": repr,
    "truth": bool,
}


class Solution:
    """The loaded program and the objects that the tests hold."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one operation and return its result, or what it raised."""
        try:
            if "name" in request:
                return {"value": self._encode(self._namespace[request["name"]])}
            target = self._objects[request["target"]]
            arguments = [decode(form, self._objects.__getitem__) for form in request["arguments"]]
            keywords = {
                name: decode(form, self._objects.__getitem__)
                for name, form in request["keywords"].items()
            }
            value = _OPERATIONS[request["operation"]](target, *arguments, **keywords)
            changed = {
                str(position): self._encode(argument)
                for position, argument in enumerate(arguments)
                if isinstance(argument, list | dict | set)
            }
            return {"value": self._encode(value), "changed": changed}
        except BaseException as error:  # noqa: BLE001 - the tests see it, as if they had called
            return {"raised": type(error).__name__, "text": str(error)[:1000]}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._keep)

    def _keep(self, value: Any) -> dict[str, int]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"handle": number}


def main() -> None:
    """Load the program, then serve requests until the tests end."""
    with open(3, "rb") as requests, open(4, "wb") as replies:
        _serve(requests, replies)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        with open(_PROGRAM, encoding="utf-8", errors="surrogatepass") as file:
            code = compile(file.read(), _PROGRAM, "exec")
        exec(code, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - includes SystemExit of an unread program
        send(replies, {"raised": type(error).__name__, "text": str(error)[:1000]})
        return
    solution = Solution(module.__dict__)
    send(replies, {"names": [name for name in module.__dict__ if isinstance(name, str)]})
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        send(replies, solution.answer(request))
