"""Workers that the scheduler tests launch; torch is imported where it is used, to start faster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import MissingPackageError, UserError
from rlinf.scheduler import Channel, Cluster, Worker, WorkerAddress
from rlinf.scheduler.process import current_worker, require_process
from rlinf.scheduler.worker_group import WorkerGroup

if TYPE_CHECKING:
    import torch


@dataclass
class Bundle:
    name: str
    tensor: torch.Tensor
    parts: list[torch.Tensor]
    table: dict[str, torch.Tensor]


def put_from_forked_child(channel: Channel, group: str) -> list[str]:
    """What a child hears before it has entered the cluster, then puts, and hears of groups."""
    context = multiprocessing.get_context("fork")
    heard = context.SimpleQueue()

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except UserError as error:
            heard.put(str(error))

    def run() -> None:
        attempt(lambda: channel.put("too early"))
        Cluster()
        channel.put("from a child")
        attempt(lambda: WorkerGroup.from_group_name(Basic, group))

    child = context.Process(target=run)
    child.start()
    got = channel.get()
    child.join(60)
    return [got, heard.get(), heard.get(), f"its exit code is {child.exitcode}"]


class Oddity(Exception):
    """An exception with an attribute, raised in a worker."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


class Sentence(Exception):
    """An exception that is not built from what it gives its base class."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = __import__("threading").Lock()


class Impatient(Worker):
    """A worker whose deadline tests can shorten."""

    def set_deadline(self, seconds: float) -> None:
        require_process().deadline_seconds = seconds


class Named(Worker):
    """Methods with arguments of the names that a group uses itself."""

    def told(self, method: str = "gae", name: str = "", func: int = 0) -> tuple[str, str, int]:
        return method, name, func

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Basic(Impatient):
    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = base

    def add(self, value: int = 0) -> tuple[int, int]:
        return self._rank, self.base + value

    add_seven = partialmethod(add, 7)

    @cache  # noqa: B019 - the worker lives as long as its process
    def cached(self, value: int) -> int:
        return value + 1

    def world_size(self) -> int:
        return self._world_size

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self._rank

    def wait_for_file(self, path: Path) -> int:
        while not path.exists():
            time.sleep(0.01)
        return self._rank

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "group": self._group_name,
            "name": self.get_name(),
            "address": self.worker_address,
            "info": self.worker_info,
            "current": Worker.current_worker is self,
            "node": self._cluster_node_rank,
            "accelerator": self._local_accelerator_rank,
            "devices": self.global_accelerator_ids,
            "platform": (Worker.torch_platform, Worker.torch_device_type),
            "class": type(self).__name__,
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def compute_threads(self) -> tuple[int, int]:
        import torch

        return torch.get_num_threads(), len(os.sched_getaffinity(0))

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def process_id(self) -> int:
        return os.getpid()

    def fail(self, kind: str) -> None:
        if kind == "oddity":
            raise Oddity("odd", 7)
        if kind == "sentence":
            raise Sentence(3, "so be it")
        if kind == "unpicklable":
            raise Unpicklable("held")
        if kind == "package":
            raise MissingPackageError("nothing", "ray", "a test")
        if kind == "file":
            raise FileNotFoundError(errno.ENOENT, "not there", "/from/here", None, "/to/there")
        if kind == "exit":
            sys.exit(3)
        if kind == "noted":
            error = ValueError("this one")
            error.add_note("behind it")
            raise error
        {}[kind]

    def fail_through(self, group: str, kind: str) -> None:
        WorkerGroup.from_group_name(Basic, group).execute_on(0).fail(kind).wait()

    def fail_on(self, rank: int) -> int:
        if self._rank == rank:
            raise ValueError("this rank fails")
        time.sleep(0.2)
        return self._rank

    @staticmethod
    def fixed() -> str:
        return "static"

    @Worker.timer("work")
    def work(self) -> None:
        with self.worker_timer("inner"):
            time.sleep(0.01)

    @Worker.timer()
    def timed(self) -> None:
        time.sleep(0.01)

    def start_child(self, script: str) -> str:
        parent = self.worker_address.get_name()
        done = subprocess.run(
            [sys.executable, "-c", script, parent], capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def with_child(self, script: str) -> str:
        """What a child prints that gets a message before it ends."""
        parent = self.worker_address.get_name()
        child = subprocess.Popen(
            [sys.executable, "-c", script, parent, "all"], stdout=subprocess.PIPE, text=True
        )
        self.send("go on", self._group_name, (self._rank, 1))
        output, _ = child.communicate()
        self.from_child()
        while self.check_worker_alive(f"{parent}:1"):
            time.sleep(0.01)
        return output

    def fork(self, channel: Channel) -> list[str]:
        return put_from_forked_child(channel, self._group_name)

    def locked(self) -> str:
        with self.device_lock:
            return "locked"

    def from_child(self) -> Any:
        return self.recv(self._group_name, (self._rank, 1))

    def log_something(self) -> None:
        self.log_info("something happened")

    def print_something(self) -> None:
        """By Python, by another program, and by its end."""
        print(f"{self._worker_name} prints")
        logging.getLogger("mine").warning("%s warns", self._worker_name)
        subprocess.run(["echo", self._worker_name, "lets", "print"], check=True)
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def port(self, highest: int | None = None) -> int:
        return self.acquire_free_port(highest)

    def alive(self, name: str) -> bool:
        return self.check_worker_alive(name)

    def _hidden(self) -> None: ...


class Counting(Worker):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        config["seed"] += self._rank + 1
        self.seed = config["seed"]

    def own_seed(self) -> int:
        return self.seed

    def append_rank(self, ranks: list[int]) -> list[int]:
        ranks.append(self._rank)
        return ranks


class Early(Worker):
    """Looks at itself before the base class is built."""

    def __init__(self) -> None:
        self.seen = self.describe()
        super().__init__()

    def early(self) -> Any:
        return self.seen, self.describe()

    def describe(self) -> list[Any]:
        node = (self._cluster_node_rank, self._node_local_rank, self._node_local_world_size)
        devices = (self._local_accelerator_rank, self.global_accelerator_ids, self.has_accelerator)
        own = (self._rank, self._world_size, self._group_name, self.get_name())
        return [*own, self.worker_address, self.worker_info.rank, *node, *devices]


class Adopted(Worker):
    def __init__(self, parent: WorkerAddress) -> None:
        super().__init__(parent_address=parent)

    def hello(self) -> None: ...


class FailingStart(Worker):
    def __init__(self) -> None:
        super().__init__()
        raise Oddity("no start", 5)

    def hello(self) -> None: ...


class WithoutBase(Worker):
    def __init__(self) -> None: ...

    def hello(self) -> None: ...


class Clash(Worker):
    def execute_on(self) -> None: ...


class Concurrent(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.opened: asyncio.Event | None = None

    async def wait_open(self) -> str:
        self.opened = self.opened or asyncio.Event()
        await self.opened.wait()
        return "opened"

    async def open(self) -> str:
        self.opened = self.opened or asyncio.Event()
        self.opened.set()
        return "done"

    async def rest(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return True

    async def who_is_at_work(self) -> bool:
        return await asyncio.to_thread(lambda: Worker.current_worker is self)

    async def get(self, channel: Channel) -> Any:
        return await channel.get(async_op=True).async_wait()

    async def give_up(self, channel: Channel) -> list[Any]:
        """What comes after a wait that was cancelled: once its handle is gone, and where it is
        kept."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(channel.get(async_op=True).async_wait(), 0.05)
        channel.put("to the next")
        got = [await self.get(channel)]
        kept = channel.get(async_op=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(kept.async_wait(), 0.05)
        channel.put("to the one kept")
        return [*got, await kept.async_wait()]


class Looping(Worker):
    """Its only coroutine is private: a plain method runs it on a loop of its own."""

    async def _later(self) -> str:
        await asyncio.sleep(0)
        return self.get_name()

    def run_later(self) -> str:
        return asyncio.run(self._later())


class Member(Impatient):
    def process_id(self) -> int:
        return os.getpid()

    def spread(self, value: Any, groups: list[Any], src: Any = None, async_op: bool = False) -> Any:
        result = self.broadcast(value, groups=groups, src=src, async_op=async_op)
        return (result.wait(), result.wait()) if async_op else result

    def busy_blocks(self) -> int:
        """How many blocks of this process a receiver has not given back."""
        codec = require_process().codec
        assert codec is not None
        return sum(block.busy for block in codec._pool.blocks)


class Talker(Member):
    def spread_afar(self, value: Any, ranks: list[int], far: list[int]) -> Any:
        """Broadcast as if some of the receivers were on another node."""
        process = require_process()
        own = {rank: f"{self._group_name}:{rank}" for rank in ranks}
        at = {r: process.ask_driver("registry.lookup", own[r]) for r in ranks if r != self._rank}
        process.endpoint.shares_memory = lambda address: address not in {at[r] for r in far}  # type: ignore[method-assign]
        try:
            return self.broadcast(value, groups=[(self._group_name, ranks)])
        finally:
            del process.endpoint.shares_memory  # type: ignore[misc]

    def send_list(self, group: str, rank: int) -> None:
        self.send_tensor([1, 2], group, rank)  # type: ignore[arg-type]

    def receive_twice(self, group: str, rank: int, asker: str) -> list[Any]:
        """What comes after a wait for it that a failed call has ended."""
        require_process().look_seconds = 0.2
        failing = WorkerGroup.from_group_name(Basic, asker).fail("nothing")
        try:
            self.recv(group, rank)
        except KeyError as error:
            ended = repr(error.args[0])
        self.send("now", group, rank)
        with contextlib.suppress(KeyError):
            failing.wait()
        require_process().look_seconds = 5.0
        return [ended, self.recv(group, rank)]

    def drop_received(self, group: str, rank: int) -> None:
        """A message and a broadcast that have come and of which the handles are gone."""
        work = self.recv(group, rank, async_op=True)
        assert work.done_within(60.0)
        members = [(group, [rank, self._rank])]
        work = self.broadcast(None, members, (group, rank), async_op=True)
        assert work.done_within(60.0)

    def read_no_message(self, seconds: float) -> None:
        """Keep this process from reading what others tell it, as a busy machine may do."""
        held = threading.Event()

        def hold() -> None:
            with require_process().endpoint.lock:
                held.set()
                time.sleep(seconds)

        threading.Thread(target=hold, daemon=True).start()
        held.wait()

    def send_to_peer(self, value: Any, group: str, rank: int, piggyback: Any = None) -> None:
        self.send(value, group, rank, piggyback_payload=piggyback)

    def keep(self, group: str, rank: int) -> None:
        self.kept = self.recv(group, rank)

    def receive_from(self, group: str, rank: int) -> Any:
        return self.recv(group, rank)

    def echo(self, group: str, rank: int, count: int = 1) -> None:
        for _ in range(count):
            self.send(self.recv(group, rank), group, rank)

    def round_trip(self, values: list[Any], group: str, rank: int) -> list[Any]:
        returned = []
        for value in values:
            self.send(value, group, rank)
            returned.append(self.recv(group, rank))
        return returned

    def async_exchange(self, group: str, rank: int) -> list[Any]:
        works = [self.recv(group, rank, async_op=True) for _ in range(3)]
        for value in range(3):
            self.send((self._rank, value), group, rank, async_op=True).wait()
        return [work.wait() for work in works]

    def large(self, group: str, rank: int, count: int, numel: int) -> list[tuple[int, float, bool]]:
        import torch

        if self._rank == 0:
            for index in range(count):
                self.send(torch.full((numel,), float(index)), group, rank)
            return []
        seen = []
        for _ in range(count):
            tensor = self.recv(group, rank)
            seen.append((tensor.numel(), float(tensor.sum()) / numel, tensor.device.type == "cpu"))
        return seen

    def tensors(self, group: str, rank: int) -> Any:
        import torch

        if self._rank == 0:
            sent = (
                torch.arange(6.0, requires_grad=True) * 1.0
            )  # takes part in gradients, as weights do
            self.send_tensor(sent.reshape(2, 3).T, group, rank)
            return None
        target = torch.nn.Parameter(torch.zeros(3, 2))
        self.recv_tensor(target, group, rank)
        assert target.is_leaf
        return target.detach()

    def mixed(self, group: str, rank: int) -> Any:
        import torch

        if self._rank == 0:
            self.send_tensor(torch.zeros(2), group, rank)
            return None
        return self.recv(group, rank)

    def broadcast_and_change(self, groups: list[Any]) -> float:
        import torch

        value = torch.zeros(100_000) if self._rank == 0 else None
        received = self.broadcast(value, groups=groups)
        if self._rank > 0:
            received += self._rank
        return float(received.mean())

    def send_one_buffer(self, way: str, group: str, rank: int, channel: Channel) -> None:
        import torch

        buffer = torch.zeros(2)
        for value in range(3):
            buffer.fill_(value)
            if way == "send":
                self.send(buffer, group, rank)
            elif way == "send_tensor":
                self.send_tensor(buffer, group, rank)
            elif way == "broadcast":
                self.broadcast(buffer, groups=[(group, self._rank), (group, rank)])
            else:
                channel.put(buffer)

    def receive_buffers(self, way: str, group: str, rank: int, channel: Channel) -> list[Any]:
        import torch

        received = []
        for _ in range(3):
            tensor = torch.empty(2)
            if way == "send":
                tensor = self.recv(group, rank)
            elif way == "send_tensor":
                self.recv_tensor(tensor, group, rank)
            elif way == "broadcast":
                tensor = self.broadcast(groups=[(group, rank), (group, self._rank)])
            else:
                tensor = channel.get()
            received.append(tensor.tolist())
        return received

    def broadcast_ahead(self, count: int, groups: list[Any]) -> tuple[list[bool], list[int]]:
        """Which broadcasts are done before a receiver asks for one, as if each were of 100 MiB, and
        what they give once they are."""
        process = require_process()
        encode = process.encode

        def encode_as_large(*arguments: Any, **options: Any) -> Any:
            payload = encode(*arguments, **options)
            payload.nbytes = 100 << 20
            return payload

        process.encode = encode_as_large  # type: ignore[method-assign]
        try:
            works = [self.broadcast(each, groups, async_op=True) for each in range(count)]
        finally:
            del process.encode  # type: ignore[misc]
        done = [work.done() for work in works]
        self.send("all are out", *groups[-1])
        return done, [work.wait() for work in works]

    def receive_late(self, count: int, groups: list[Any]) -> list[int]:
        """What was broadcast, taken once all of it is out."""
        self.recv(*groups[0])
        return [self.broadcast(groups=groups) for _ in range(count)]

    def chained(self, group: str, rank: int) -> Any:
        work = self.recv(group, rank, async_op=True)
        return work.then(lambda value: value * 2, 21).wait(), work.wait()

    def chained_receive(self, group: str, rank: int, *, waits: bool) -> Any:
        """What a chained function receives, which returns the handle of it or waits for it."""

        def receive() -> Any:
            work = self.recv(group, rank, async_op=True).then(lambda: current_worker() is self)
            return work.wait() if waits else work

        return self.recv(group, rank, async_op=True).then(receive).wait()


class Namesake(Talker):
    """A worker with helpers of its own, under names that come to mind."""

    def __init__(self) -> None:
        super().__init__()
        self._durations = self._launch = self._in_flight = self._peer_infos = self._log = None

    def _send(self) -> None: ...

    def _receive(self) -> None: ...

    def _broadcast_out(self) -> None: ...

    @Worker.timer("talk")
    def talk_to_itself(self, value: Any) -> Any:
        self.log_info("talks")
        self.send(value, self._group_name, self._rank)
        groups = [(self._group_name, self._rank)]
        return self.broadcast(self.recv(self._group_name, self._rank), groups=groups)


class Queuer(Member):
    def put(self, channel: Channel, items: list[Any], key: Any = "default_queue") -> None:
        for item in items:
            channel.put(item, key=key)

    def put_async(self, channel: Channel, count: int) -> None:
        works = [channel.put(index, async_op=True) for index in range(count)]
        for work in works:
            work.wait()

    def get(self, channel: Channel, count: int, key: Any = "default_queue") -> list[Any]:
        return [channel.get(key=key) for _ in range(count)]

    def want(self, channel: Channel, weight: int | None = None) -> None:
        """Ask for an item, or a batch, and never look at it."""
        asked = {} if weight is None else {"target_weight": weight}
        ask = channel.get if weight is None else channel.get_batch
        self.wanted = [*getattr(self, "wanted", []), ask(**asked, async_op=True)]
        self.wanted[-1].done_within(1.0)

    def drop(self, channel: Channel, seconds: float) -> int:
        """How many items there are once the handle of one is gone, which was waited for."""
        work = channel.get(async_op=True)
        work.done_within(seconds)
        del work
        return channel.qsize()

    def sleep_with(self, _value: Any, seconds: float) -> None:
        time.sleep(seconds)

    def end_with(self, _value: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def take_now(self, channel: Channel) -> Any:
        return channel.get(async_op=True).take_now()

    def nowait(self, channel: Channel, kind: str) -> Any:
        return channel.put_nowait(1) if kind == "put" else channel.get_nowait()

    def batch(self, channel: Channel, target: int) -> list[Any]:
        return channel.get_batch(target)

    def keys_out_of_order(self, channel: Channel) -> list[Any]:
        works = {key: channel.get(key=key, async_op=True) for key in ("a", "b", "c")}
        for key in ("c", "a", "b"):
            channel.put(f"item {key}", key=key)
        return [works[key].wait() for key in ("b", "c", "a")]

    def made_here(self, name: str) -> Channel:
        channel = self.create_channel(name, maxsize=3)
        channel.put("from the worker")
        return channel

    def put_into_one_of_all(self, name: str) -> None:
        """Into a channel that every rank creates."""
        warnings.simplefilter("ignore")
        self.create_channel(name).put(self._rank)

    def give_large(self, numel: int) -> Any:
        import torch

        return torch.zeros(numel)

    def join(self, name: str) -> Any:
        return self.connect_channel(name).get()

    def stream(self, channel: Channel, count: int, numel: int) -> None:
        import torch

        for index in range(count):
            channel.put(torch.full((numel,), float(index)))

    def drain(self, channel: Channel, count: int) -> list[float]:
        return [float(channel.get()[0]) for _ in range(count)]

    def own_channel(self, name: str, count: int) -> list[int]:
        channel = Channel.connect(name)
        return [channel.get() for _ in range(count)]

    def local_channel(self) -> list[Any]:
        channel = Channel.create("private", maxsize=2, local=True)
        item = object()
        channel.put(item)
        same = channel.get() is item
        channel.put(1, weight=1)
        channel.put(2, weight=2)
        return [same, channel.full(), channel.get_batch(3), channel.is_local]


class Holder(Worker):
    def hold(self, log: Channel, seconds: float) -> None:
        with self.device_lock, self.device_lock:
            log.put((self._rank, "in"))
            time.sleep(seconds)
            log.put((self._rank, "out"))

    def take(self) -> list[int]:
        self.device_lock.acquire()
        return self.global_accelerator_ids

    def give(self) -> None:
        self.device_lock.release()

    def redeem(self, ticket: Any, log: Channel) -> None:
        with ticket:
            log.put(self._rank)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Router(Worker):
    def send_batch(self, data: Any, group: str, channel: Any, **options: Any) -> None:
        share = {key: value.chunk(self._world_size)[self._rank] for key, value in data.items()}
        self.send_to(group, channel, share, **options)

    def receive_batch(self, group: str, channel: Any, **options: Any) -> Any:
        return self.recv_from(group, channel, **options)

    def serve(self, group: str, channel: Any, batch_size: int) -> int:
        self.batch_router = {"observations": []}
        options = {"tag": "observations", "decoupled_mode": True, "batch_size": batch_size}
        batch = self.recv_from(group, channel, **options)
        served = len(self.batch_router["observations"])
        self.send_to(group, channel, {"a": batch["o"] * 10}, **options)
        return served

    def ask(self, group: str, channel: Any, batch_size: int) -> Any:
        import torch

        share = torch.arange(float(batch_size)).chunk(self._world_size)[self._rank]
        self.batch_router = {}
        self.send_to(
            group, channel, {"o": share}, tag="observations", mode="train",
            decoupled_mode=True, batch_size=batch_size,
        )  # fmt: skip
        return self.recv_from(
            group, channel, tag="observations", decoupled_mode=True, batch_size=batch_size
        )


class Distant(Worker):
    """Gives a worker of the group ``far`` the numbers 0 to 2, by one of several ways."""

    def give(self, way: str, rank: int, channel: Channel) -> dict[str, float]:
        import torch

        began = time.monotonic()
        works = []
        for value in range(3):
            if way == "send":
                self.send(value, "far", rank)
            elif way == "send_large":
                works.append(self.send(torch.full((30_000,), value), "far", rank, async_op=True))
            elif way == "tensor":
                self.send_tensor(torch.tensor(value), "far", rank)
            elif way == "broadcast":
                self.broadcast(value, groups=[("near", rank), ("far", rank)])
            elif way == "queue":
                works.append(channel.put(value, async_op=True))
            else:
                channel.post(value)
        for work in works:
            work.wait()
        return {"began": began, "ended": time.monotonic()}

    def take(self, way: str, rank: int, channel: Channel) -> dict[str, Any]:
        import torch

        values: list[Any] = []
        at = 0.0
        for _ in range(3):
            if way.startswith("send"):
                values.append(self.recv("near", rank))
            elif way == "tensor":
                values.append(torch.tensor(-1))
                self.recv_tensor(values[-1], "near", rank)
            elif way == "broadcast":
                values.append(self.broadcast(groups=[("near", rank), ("far", rank)]))
            else:
                values.append(channel.get())
            at = at or time.monotonic()
        return {"values": [int(torch.as_tensor(v).max()) for v in values], "at": at}


class Late(Worker):
    def rank(self) -> int:
        return self._rank

    def put_late(self, channel: Channel, path: Path) -> None:
        """Put an item once a file is there; tell in another one what that raises."""
        path.with_suffix(".begun").touch()
        while not path.exists():
            time.sleep(0.01)
        try:
            channel.put("too late")
        except Exception as error:
            path.with_suffix(".refused").write_text(str(error))
            raise
