"""A child for the tests: does what it is told."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np

from rlinf.errors import ConfigError, MissingPackageError
from rlinf.processes.child import serve
from rlinf.processes.shared_block import SharedBlock

FIELDS = {"count": ((1,), np.dtype(np.int64))}


def main(lifeline, commands, memory=-1):
    meets = []

    def answer(message):
        operation = message["operation"]
        if operation == "start":
            meets.extend(message.get("meets", ()))
        if operation == "close" and meets:
            own, other = map(Path, meets)
            own.touch()
            while not other.exists():
                time.sleep(0.01)
            own.with_suffix(".met").touch()
        if operation == "start" and "refuse" in message:
            raise ConfigError("is wrong", key=message["refuse"])
        if operation == "lacks":
            raise MissingPackageError("simulator", "extra", "the env")
        if operation == "value":
            raise ValueError("is illegal")
        if operation == "fail":
            raise RuntimeError("cannot go on")
        if operation == "die":
            print("last words", flush=True)
            os._exit(3)
        if operation == "print":
            for number in range(message["lines"]):
                print(number, "x" * message["width"])
        if operation == "evaluate":
            return {"value": eval(message["words"])}
        if operation == "start a process":
            return {"started": subprocess.Popen(["sleep", "600"]).pid}
        if operation == "sleep":
            time.sleep(message["seconds"])
        if operation == "count":
            block = SharedBlock(memory, FIELDS)
            for _ in range(message["to"]):
                time.sleep(0.05)
                block["count"][0] += 1
        return {"echo": message.get("content")}

    serve(lifeline, commands, answer)
