"""An engine that drives another one in a child process, and replaces the child where it is lost.

What was unfinished is generated again from its seed, or from its given partial completion; what
was returned is never generated twice. The weights lie in shared memory, in which the child
computes where it can, so that a new child has them at once.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from rlinf.engines.config import EngineConfig, EngineProcessConfig
from rlinf.engines.process.child import Start, pickled, unpickled
from rlinf.engines.process.weight_block import WeightBlock
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    ModelSource,
    Weights,
)
from rlinf.errors import ConfigError, RunFailure, UserError
from rlinf.processes.child import ProcessLostError, RefusedValueError, SupervisedProcess
from rlinf.processes.shared_block import memory_path, open_memory
from rlinf.scheduler.accelerators import AcceleratorUtil
from rlinf.scheduler.process import current_worker, require_process

Operation = Literal[
    "submit", "step", "progress", "abort", "replace_weights", "release_memory", "restore_memory"
]

log = logging.getLogger(__name__)


class ProcessEngine(Engine):
    """The engine of ``config`` in a supervised process.

    Args:
        config: Which engine; its section ``process`` is given.
        source: Where its model comes from. A module is copied.

    Raises:
        ConfigError: The engine cannot be built so.
        RunFailure: The process was lost while it started, more often than allowed.
    """

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        self._settings = config.process or EngineProcessConfig()
        self._config = config.model_copy(update={"process": None})
        given = source.module if config.takes_module else None
        self._module = None if given is None else _memory_of(given)
        self._source = replace(source, module=None)
        self._block: WeightBlock | None = None
        self._requests: dict[int, GenerationRequest] = {}
        self._released = False
        self.version = 0
        self.restarts = 0
        self._process: SupervisedProcess | None = None
        try:
            try:
                self._process = self._started()
            except ProcessLostError as lost:
                self._replace(lost)
        except BaseException:
            self._close_memory()
            raise

    @property
    def pid(self) -> int:
        """Id of the present process; a RuntimeError where the engine was closed."""
        return self._living().pid

    @property
    def unfinished(self) -> int:
        """See :attr:`Engine.unfinished`."""
        return len(self._requests)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is unfinished")
        self._call("submit", request)
        self._requests[request.request_id] = request

    def step(self) -> list[FinishedCompletion]:
        """One step of the engine; where the process is lost, the first one of its successor."""
        return self._taken(self._call("step")) if self._requests else []

    def progress(self) -> Mapping[int, int]:
        """Tokens so far; what is generated again in a new process begins again."""
        found: Mapping[int, int] = self._call("progress") if self._requests else {}
        return found

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`.

        Where the process is lost with this call, they have what they had when submitted.
        """
        wanted = self._requests if request_ids is None else request_ids
        chosen = [number for number in wanted if number in self._requests]
        return self._taken(self._call("abort", chosen)) if chosen else []

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`."""
        given = {name: value.detach() for name, value in weights}
        if not given:
            raise ValueError("no weights were given, and a process shares none with a trainer")
        if self._block is not None and self._block.fits(given):
            # A child that is lost from here on is replaced by one that begins with these weights.
            self._block.write(given)
            self.version = version
            self._call("replace_weights", self._block.address, version)
            return
        block = WeightBlock(given)
        try:
            self._call("replace_weights", block.address, version)
        except BaseException:
            block.close()
            raise
        former, self._block, self.version = self._block, block, version
        if former is not None:
            former.close()

    def release_memory(self) -> None:
        """Give memory back; see :meth:`Engine.release_memory`."""
        if self._requests:
            raise RuntimeError(f"{self.unfinished} requests are unfinished; abort them first")
        self._call("release_memory")
        self._released = True

    def restore_memory(self) -> None:
        """Take the memory again; see :meth:`Engine.restore_memory`."""
        self._call("restore_memory")
        self._released = False

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._requests.clear()
        self._close_memory()

    def _taken(self, finished: list[FinishedCompletion]) -> list[FinishedCompletion]:
        for item in finished:
            del self._requests[item.request_id]
        return finished

    # -- the process ----------------------------------------------------------------------------

    def _living(self) -> SupervisedProcess:
        if self._process is None:
            raise RuntimeError("the engine was closed")
        return self._process

    def _started(self) -> SupervisedProcess:
        start = Start(
            config=self._config,
            source=self._source,
            module=None if self._module is None else str(memory_path(self._module)),
            threads=torch.get_num_threads(),
        )
        try:
            process = SupervisedProcess(
                "rlinf.engines.process.child",
                {"arguments": pickled((start,))},
                environment={"OMP_NUM_THREADS": str(start.threads), **_devices_of_thread()},
                # One that stops in the middle of a message must not hold us for ever.
                message_seconds=self._settings.step_deadline,
            )
        except ConfigError as error:
            raise ProcessLostError("crash", f"it could not be started: {error}") from error
        try:
            told = unpickled(process.receive(self._settings.start_deadline)["result"])
        except BaseException:
            process.kill()
            raise
        for name, value in told.items():
            setattr(self, name, value)
        return process

    def _call(self, operation: Operation, *arguments: Any) -> Any:
        """Let the process do something, or its successor where it is lost."""
        while True:
            process = self._living()
            try:
                return self._ask(process, operation, *arguments)
            except ProcessLostError as lost:
                self._replace(lost)

    def _ask(self, process: SupervisedProcess, operation: Operation, *arguments: Any) -> Any:
        """Let a process do something; refusals, but of a step, are raised as they are."""
        seconds = self._settings.step_deadline
        try:
            answer = process.ask(operation, seconds=seconds, arguments=pickled(arguments))
        except (UserError, RefusedValueError) as error:
            if operation != "step":  # which asks for nothing that could be refused
                raise
            stack = error.stack if isinstance(error, RefusedValueError) else str(error)
            raise ProcessLostError("exception", stack) from error
        return unpickled(answer["result"])

    def _replace(self, lost: ProcessLostError) -> None:
        """Start a process with the present weights and all unfinished requests, if that may be."""
        while True:
            dead, self._process = self._process, None
            if dead is not None:
                dead.kill()
            bound = self._settings.max_restarts
            if self.restarts >= bound:
                raise RunFailure(
                    f"the engine process was lost {self.restarts + 1} times, and "
                    f"process.max_restarts = {bound} allows {bound}; the last time by a {lost}"
                ) from lost
            self.restarts += 1
            log.warning(
                "the engine process was lost by a %s\nit is replaced (%d of at most %d); %d "
                "unfinished requests are generated again",
                lost,
                self.restarts,
                bound,
                len(self._requests),
            )
            try:
                self._process = process = self._started()
                if self._block is not None:
                    self._ask(process, "replace_weights", self._block.address, self.version)
                for request in self._requests.values():
                    self._ask(process, "submit", request)
                if self._released:
                    self._ask(process, "release_memory")
            except ProcessLostError as again:
                lost = again
            else:
                return

    def _close_memory(self) -> None:
        if self._module is not None:
            os.close(self._module)
            self._module = None
        if self._block is not None:
            self._block.close()
            self._block = None


def _memory_of(module: Any) -> int:
    """Descriptor of memory with a module in it, pickled, which a child can map."""
    descriptor = open_memory("rlinf-engine-module")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            torch.save(module, file)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        os.close(descriptor)
        raise ConfigError(
            f"the module cannot be sent to a process ({error}); give its directory instead",
            key="process",
        ) from error
    return descriptor


def _devices_of_thread() -> dict[str, str]:
    """Environment that shows a new process the devices of the worker alone, where that is a thread
    of this process and sees those of all."""
    worker = current_worker()
    if worker is None or require_process().runtime != "local" or worker.torch_platform is None:
        return {}
    numbers = [str(number) for number in worker.global_accelerator_ids]
    return AcceleratorUtil.get_accelerator_env_var(worker.hardware_type, numbers, os.environ)
