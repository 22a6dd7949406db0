"""The action server: WebSocket and HTTP on one port, in the wire format of openpi's client."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.http_exceptions import BadHttpMessage
from torch import Tensor

from rlinf.envs.results import TASK_IDS
from rlinf.envs.spec import EnvSpec
from rlinf.errors import CheckpointError, ConfigError, UserError
from rlinf.serving.acting import ActingPolicy
from rlinf.serving.batching import Batcher, PolicyFailure
from rlinf.serving.latency import Latencies
from rlinf.serving.requests import RequestReader
from rlinf.serving.server_address import cannot_listen
from rlinf.serving.wire import LARGEST_MESSAGE, pack, unpack

log = logging.getLogger(__name__)

_http_log = logging.getLogger("aiohttp.server")
_OPEN_PATH = "/healthz"
_CLOSE_SECONDS = 1.0
_HEARTBEAT = 60.0
"""Seconds of silence after which a client is asked for a sign, which it has half of them to give: a
machine that has died says no farewell, and the others would wait for it in every batch."""
_ENDS = {WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR}
Weights = tuple[int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ServerSettings:
    """How a server answers.

    Args:
        host: Address to listen at; other machines reach it only where it is not a loopback one.
        port: 0: any free one.
        token: What clients must send; None: nothing, which only a loopback address may.
        rows: Rows of a batch, at most.
        wait: Seconds that a request waits for others to share its batch, at most.
        follow: Seconds between two looks for newer weights; None: only on request.
        keys: Names that clients use, see :class:`RequestReader`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    rows: int = 8
    wait: float = 0.002
    follow: float | None = None
    keys: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--no-token: {self.host} can be reached from other machines, and whoever reaches "
                "the server moves the robot; leave it out, or listen at 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address reaches no further than this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PolicyServer:
    """Serves one policy; knows nothing of it but what it reads and how long its chunks are.

    Args:
        policy: Who acts.
        spec: What it was trained on. A client is asked for what it acts on alone, not for what
            only its critic saw.
        name: What it is called.
        settings: How it answers.
        newest: Reads the newest weights and their version, or gives None where those that are
            given (the present version) are the newest; may take long, in a thread of its own. None:
            there are no others.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        spec: EnvSpec,
        *,
        name: str,
        settings: ServerSettings,
        newest: Callable[[int], Weights | None] | None = None,
    ) -> None:
        spec = spec.showing(policy.policy.acts_on(spec.observation_shapes))
        self._policy, self._spec, self._name = policy, spec, name
        self._settings, self._newest = settings, newest
        keys = settings.keys or {}
        self._reader = RequestReader(
            spec,
            chunk=policy.policy.chunk,
            keys=keys,
            continues=policy.continues,
            check_instruction=policy.check_instruction,
        )
        self.latencies = Latencies()
        self._sockets: set[web.WebSocketResponse] = set()
        self._renewing = asyncio.Lock()
        self._batcher: Batcher

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client is told before it asks."""
        spec = self._spec
        low, high = spec.own_limits
        return {
            "policy": self._name,
            "version": self._policy.version,
            "chunk": self._policy.policy.chunk,
            "action_dim": spec.action_dim,
            "action_kind": spec.action_kind,
            "action_low": low,
            "action_high": high,
            "observations": {
                name: {"shape": list(shape), "dtype": spec.observation_dtypes[name]}
                for name, shape in spec.observation_shapes.items()
            },
            "state_parts": [list(part) for part in spec.state_parts],
            "tasks": list(spec.task_descriptions),
            "keys": dict(self._settings.keys or {}),
            "prefix": self._policy.continues,
            "deterministic": self._policy.deterministic,
        }

    # -- from the beginning to the end ------------------------------------------------------------

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until ``stop`` is set; what waits then is answered before connections are closed.

        ``ready`` is told the address once clients may come.

        Raises:
            ConfigError: It is taken, or not one of this machine.
        """
        settings = self._settings
        self._batcher = Batcher(
            self._policy, rows=settings.rows, wait=settings.wait, latencies=self.latencies
        )
        _http_log.addFilter(_without_trace)
        app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_MESSAGE)
        app.add_routes(
            [
                web.get("/", self._connected),
                web.get(_OPEN_PATH, self._health),
                web.get("/metrics", self._metrics),
                web.post("/infer", self._posted),
                web.post("/reload", self._reload),
            ]
        )
        # Who has gone is not answered: the handler of a connection that has ended is cancelled.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        tasks = [asyncio.ensure_future(self._batcher.run())]
        try:
            try:
                await site.start()
            except OSError as error:
                raise cannot_listen(settings.host, settings.port, error) from error
            if settings.follow is not None:
                tasks.append(asyncio.ensure_future(self._follow(settings.follow)))
            host, port = runner.addresses[0][:2]
            ready(f"{host if ':' not in host else f'[{host}]'}:{port}")
            await stop.wait()
            await site.stop()
        finally:
            self._batcher.stop()
            await tasks[0]
            for task in tasks[1:]:
                task.cancel()
            await asyncio.sleep(0)  # those who were answered last send it
            # Of a client that reads no more, none waits for what it has not read.
            closing = [
                asyncio.wait_for(
                    socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server has stopped"),
                    _CLOSE_SECONDS,
                )
                for socket in list(self._sockets)
            ]
            await asyncio.gather(*closing, return_exceptions=True)
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Nobody without the token, and no web page, which a browser would let reach loopback."""
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="web pages are not served\n")
        token = self._settings.token
        if token is not None and request.path != _OPEN_PATH:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, f"Api-Key {token}".encode()):
                raise web.HTTPUnauthorized(
                    text="send the token of the server: Authorization: Api-Key TOKEN\n"
                )
        return await handler(request)

    # -- what is asked ----------------------------------------------------------------------------

    async def _answer(self, data: bytes, began: float) -> dict[str, Any]:
        try:
            request = self._reader.read(unpack(data))
            answer = await self._batcher.ask(request)
        except UserError:
            self.latencies.counters["refused"] += 1
            raise
        except PolicyFailure as failure:
            self.latencies.counters["failed"] += 1
            log.error("%s", failure, exc_info=failure.__cause__)
            raise
        actions, tasks = answer.actions, request.observations.get(TASK_IDS)
        if tasks is not None:  # the policy itself clips to the widest of all its simulators
            actions = self._spec.within_sections(actions, tasks)
        actions = self._spec.in_units(actions[0] if request.single else actions)
        total = time.perf_counter() - began
        self.latencies.add(queue=answer.queue, act=answer.act, total=total)
        return {
            "actions": actions,
            "version": answer.version,
            "policy_timing": {"infer_ms": 1e3 * answer.act},
            "server_timing": {
                "infer_ms": 1e3 * (answer.queue + answer.act),
                "queue_ms": 1e3 * answer.queue,
                "total_ms": 1e3 * total,
            },
        }

    async def _connected(self, request: web.Request) -> web.StreamResponse:
        """One client: the metadata, then an answer, or a line of text, for every message."""
        socket = web.WebSocketResponse(
            max_msg_size=LARGEST_MESSAGE, compress=False, heartbeat=_HEARTBEAT
        )
        if not socket.can_prepare(request):
            raise web.HTTPUpgradeRequired(text="robots speak WebSocket here; see also /healthz, "
                                          "/metrics, and POST to /infer\n")  # fmt: skip
        await socket.prepare(request)
        self._sockets.add(socket)
        self._batcher.clients += 1
        try:
            await socket.send_bytes(pack(self.metadata))
            await self._converse(socket)
        except ConnectionResetError:
            log.info("a client has gone before it was answered")
        finally:
            self._batcher.clients -= 1
            self._sockets.discard(socket)
        return socket

    async def _converse(self, socket: web.WebSocketResponse) -> None:
        """Answer message after message. What comes is read while the policy acts, one message at
        most: so pings are answered, and who has gone does not keep others waiting.

        Raises:
            ConnectionResetError: The client has gone before it was answered.
        """
        before: float | None = None
        receiving = asyncio.ensure_future(socket.receive())
        tasks: list[asyncio.Future[Any]] = [receiving]
        try:
            while (message := await receiving).type not in _ENDS:
                answering = asyncio.ensure_future(self._reply(socket, message, before))
                receiving = asyncio.ensure_future(socket.receive())
                tasks = [answering, receiving]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and receiving.result().type in _ENDS:
                    raise ConnectionResetError
                before = await answering
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reply(
        self, socket: web.WebSocketResponse, message: WSMessage, before: float | None
    ) -> float | None:
        """Send what answers a message; milliseconds that it took, which the next answer tells as
        ``before``; of a refusal those of the answer before it."""
        began = time.perf_counter()
        if message.type is not WSMsgType.BINARY:
            await socket.send_str("send msgpack in binary frames")
            return before
        try:
            answer = await self._answer(message.data, began)
        except (UserError, PolicyFailure) as error:
            await socket.send_str(str(error))
            return before
        if before is not None:
            answer["server_timing"]["prev_total_ms"] = before
        await socket.send_bytes(pack(answer))
        return 1e3 * (time.perf_counter() - began)

    async def _posted(self, request: web.Request) -> web.Response:
        """The same for those who speak HTTP alone: one message in, one out."""
        began = time.perf_counter()
        try:
            data = await request.read()
        except web.RequestPayloadError as error:
            told = " ".join(str(error).split())
            return web.Response(status=400, text=f"the message cannot be read: {told}\n")
        self._batcher.clients += 1
        try:
            answer = await self._answer(data, began)
        except UserError as error:
            return web.Response(status=400, text=f"{error}\n")
        except PolicyFailure as error:
            return web.Response(status=500, text=f"{error}\n")
        finally:
            self._batcher.clients -= 1
        return web.Response(body=pack(answer), content_type="application/msgpack")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        gauges = {"weight_version": self._policy.version, "clients": self._batcher.clients}
        return web.Response(text=self.latencies.exposition(**gauges))

    # -- weights ----------------------------------------------------------------------------------

    async def _reload(self, _: web.Request) -> web.Response:
        try:
            await asyncio.shield(self._renew())  # what was read counts, though who asked has gone
        except CheckpointError as error:
            return web.Response(status=409, text=f"{error}\n")
        return web.json_response({"version": self._policy.version})

    async def _renew(self) -> None:
        """Take the newest weights, between two batches."""
        if self._newest is None:
            return
        async with self._renewing:
            found = await asyncio.to_thread(self._newest, self._policy.version)
            if found is None:
                return
            version, weights = found
            await self._batcher.exclusively(lambda: self._policy.load(weights, version))
            log.info("weights of step %d", version)

    async def _follow(self, interval: float) -> None:
        told = ""
        while True:
            await asyncio.sleep(interval)
            try:
                await self._renew()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next ones may be good
                kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
                if (line := f"{kind}{error}") != told:
                    log.warning("%s; the weights of step %d stay", line, self._policy.version)
                told = line


def _without_trace(record: logging.LogRecord) -> bool:
    """A line of the log in place of a trace, where a client sent what is no HTTP or has gone."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, BadHttpMessage | web.RequestPayloadError | ConnectionResetError):
        gone = isinstance(error, ConnectionResetError)
        record.msg = f"{'a client has gone' if gone else 'refused'}: %s"
        record.args = (" ".join(str(error).split())[:200],)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
    return True
