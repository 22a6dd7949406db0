"""vLLM in the background: it goes on generating between the calls of the caller.

Its engine core runs in a process of vLLM's own, an event loop in a thread of ours hears from it.
The core stamps the tokens of each of its steps with the version of the weights, which changes only
while it stands still, so that versions are exact wherever a token is at that moment.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import torch

from rlinf.data.sequences import StopReason
from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.protocol import FinishedCompletion, ModelSource, Weights
from rlinf.engines.vllm.base import Growing, VLLMBase, on_cpu, random_state_kept
from rlinf.errors import RunFailure

T = TypeVar("T")
_LOOK = 1.0  # seconds between two looks at whether what is waited for can still come


class AsyncVLLMEngine(VLLMBase):
    """vLLM's ``AsyncLLM``; a RunFailure from every call where its engine core cannot go on."""

    generates_between_steps = True

    def __init__(self, config: VLLMEngineConfig, source: ModelSource) -> None:
        super().__init__(config, source)
        self._engine: Any = None
        self._processes: Sequence[Any] = ()
        self._reasons: dict[Growing, StopReason] = {}
        self._tasks: dict[Growing, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        self._news = News()
        self._loop = EventLoop("rlinf-vllm")
        try:
            with random_state_kept():
                self._call(
                    self._start(torch.get_num_threads() if config.devices_per_engine == 1 else None)
                )
        except BaseException:
            self._shut_down()
            raise

    async def _start(self, threads: int | None) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        self._processes = self._engine.engine_core.resources.engine_manager.processes
        await self._engine.collective_rpc("belong_to", args=(os.getpid(), threads))
        await self._engine.update_weight_version(str(self.version))
        self._started(self._engine.model_config)

    @property
    def processes(self) -> list[int]:
        """Ids of the processes of its engine core."""
        return [process.pid for process in self._processes]

    # -- requests --------------------------------------------------------------------------------

    def _add(self, growing: Growing, prompt: dict[str, Any], parameters: Any) -> None:
        self._call(self._begin(growing, prompt, parameters))

    async def _begin(self, growing: Growing, prompt: dict[str, Any], parameters: Any) -> None:
        outputs = await self._engine.add_request(
            str(growing.request.request_id), prompt, parameters, lora_request=self._lora_request
        )
        self._tasks[growing] = asyncio.create_task(self._collect(growing, outputs))

    async def _collect(self, growing: Growing, outputs: Any) -> None:
        """Take the outputs of a request until it ends."""
        try:
            ended = False
            while not ended:
                output = await outputs.get()
                part, ended = output.outputs[0], output.finished
                growing.add(part)
                if ended:
                    growing.versions.extend(_versions(part.weight_versions))
                    self._reasons[growing] = part.finish_reason
                self._news.note(growing, ended=ended)
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = self._error or error
            self._news.wake()
        finally:
            del self._tasks[growing]

    def step(self) -> list[FinishedCompletion]:
        """What ended since the last step; waits until there is at least one more token."""
        if not self._running:
            return []
        return [self._taken(growing) for growing in self._news.wait(self._check)]

    def _taken(self, growing: Growing) -> FinishedCompletion:
        self._running.pop(growing.request.request_id)
        return growing.finished(self._reasons.pop(growing))

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        chosen = [self._running[number] for number in self._running.chosen(request_ids)]
        if not chosen:
            return []
        self._call(self._end(chosen))
        self._check()
        self._news.forget(chosen)
        return [self._taken(growing) for growing in chosen]

    async def _end(self, chosen: Sequence[Growing]) -> None:
        """Each gets a last output, be it from the abort or from its own end just before."""
        await self._engine.abort([str(growing.request.request_id) for growing in chosen])
        await asyncio.gather(*(self._tasks[g] for g in chosen if g in self._tasks))

    # -- weights and memory ----------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`.

        With an adapter the first one must come before the first request.
        """
        given = dict(weights)
        if self._adapter is not None:
            self._call(self._replace(version, "add_lora", self._written_adapter(given)))
        else:
            # Written before anything stands still.
            address = self._shared(self._checked(given))
            self._call(
                self._replace(version, "collective_rpc", "replace_weights_by", None, (address,))
            )
        self.version = version

    async def _replace(self, version: int, load: str, *arguments: Any) -> None:
        """Let everything stand still, drop what was cached, load, and go on."""
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        try:
            await getattr(self._engine, load)(*arguments)
            await self._engine.update_weight_version(str(version))
        finally:
            await self._engine.resume_generation()

    def release_memory(self) -> None:
        """Give weights and caches back; on CPU vLLM keeps both, and only forgets its prefixes."""
        self._running.require_none()
        self._call(self._engine.reset_prefix_cache())
        if not on_cpu():
            self._call(self._engine.sleep(level=self._sleep_level))

    def restore_memory(self) -> None:
        """Take the memory again; on CUDA :meth:`update_weights` must follow."""
        if not on_cpu():
            self._call(self._engine.wake_up())

    def close(self) -> None:
        """End vLLM's processes and the thread."""
        self._running.clear()
        self._shut_down()

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        self._loop.close()
        self._close_block()

    # -- the engine core -------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Let vLLM do something; a RunFailure where its core has ended, else errors as they are."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._loop.run(coroutine, self._check)
        except EngineDeadError as error:
            raise self._failure(error) from error
        except Exception as error:
            if type(error) is Exception:  # what vLLM makes of any error in its engine core
                raise RuntimeError(str(error)) from error
            raise

    def _check(self) -> None:
        """Raises where the engine core cannot go on."""
        if self._error is not None:
            raise self._failure(self._error) from self._error
        if self._engine is not None and self._engine.errored:
            raise self._failure(None)

    def _failure(self, error: BaseException | None) -> RunFailure:
        ends = [f"{p.pid} with exit code {p.exitcode}" for p in self._processes if not p.is_alive()]
        how = f"its process ended: {', '.join(ends)}" if ends else str(error or "it stands still")
        return RunFailure(
            f"vLLM's engine core cannot go on, {how}; what it printed says why, and "
            "`process: true` for the engine would replace it"
        )


def _versions(spans: Any) -> list[int]:
    """Versions of the tokens in vLLM's ``WeightVersionSpan``s."""
    return [int(span.version) for span in spans for _ in range(span.start, span.end)]


# -- a thread with an event loop, and what it tells a thread that waits for it -------------------


class EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
        """What the coroutine returns or raises; ``check`` raises where that is not waited for."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not wait([future], timeout=_LOOK).done:
            try:
                check()
            except BaseException:
                future.cancel()
                raise
        return future.result()

    def close(self) -> None:
        """Cancel what still runs in the loop, and end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class News:
    """What happened in the background since it was last asked for."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._grown = False
        self._ended: list[Growing] = []

    def note(self, growing: Growing, *, ended: bool) -> None:
        """A sequence has got tokens, or ended."""
        with self._condition:
            self._grown = True
            if ended:
                self._ended.append(growing)
            self._condition.notify()

    def wake(self) -> None:
        """Let whoever waits look at whether something went wrong."""
        with self._condition:
            self._condition.notify()

    def wait(self, check: Callable[[], None]) -> list[Growing]:
        """The sequences that ended; waits until at least one has got a token or ended.

        ``check`` raises where nothing need be waited for any more.
        """
        with self._condition:
            while not self._grown:
                check()
                self._condition.wait(_LOOK)
            self._grown = False
            ended, self._ended = self._ended, []
        return ended

    def forget(self, growing: list[Growing]) -> None:
        """Tell nobody of these any more."""
        with self._condition:
            self._ended = [item for item in self._ended if item not in growing]
            self._grown = bool(self._ended)
