"""One keyed request: its state, its answer, and the `send` that the app is given."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from retrysafe import errors, keys
from retrysafe.context import SCOPE_KEY, context_of, enter, leave
from retrysafe.events import Event, emit
from retrysafe.middleware import problems
from retrysafe.middleware.body import Body, Disconnected, TooLarge, read_body
from retrysafe.middleware.callers import Counted
from retrysafe.middleware.recording import Recording
from retrysafe.middleware.recovery import answer_recovered, ask_recovery
from retrysafe.middleware.request_id import new_context
from retrysafe.middleware.response_record import Headers, decode, replay_messages
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Call
from retrysafe.records import CorruptRecord, Record
from retrysafe.steps import unprotected

if TYPE_CHECKING:
    from retrysafe.middleware.idempotency import IdempotencyMiddleware

logger = logging.getLogger("retrysafe")

Scope = MutableMapping[str, Any]

# A duplicate that waits this long (seconds) is worth a look at whether its client is still there.
_WATCH_AFTER = 0.05

# Work goes on when the server has let go of its request; these are its only references then.
_works: set[asyncio.Task[None]] = set()


class Responder:
    """Answers one request with an idempotency key."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        receipts: AsyncReceipts,
        scope: Scope,
        receive: Any,
        send: Any,
    ) -> None:
        self.middleware = middleware
        self.receipts = receipts
        self.policy = receipts.policy
        self.scope = scope
        self.receive = receive
        self.send = send
        self.body = Body()
        self.request_id = ""
        self._id_line: tuple[bytes, bytes] | None = None
        self._count: Counted | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[Any] | None = None
        self._left = False
        self._handed_over = False

    async def respond(self, values: Sequence[bytes]) -> None:
        """The table of contents: identify, read, begin, then replay or run."""
        # The scope says whose request this is: a server may start a pipelined one from inside the
        # task, and so the context variables, of the one before.
        context = context_of(self.scope)
        if context is None:
            header = self.middleware.id_header
            context = new_context(self.scope, header, trusted=True)
            self.scope[SCOPE_KEY] = context
            self._id_line = (header, context.request_id.encode("ascii"))
        self.request_id = context.request_id
        token = enter(context)
        try:
            try:
                held = await self._receipt(values)
            except errors.RetrySafeError as error:
                await self._problem(problems.of(error))
                return
            if isinstance(held, AsyncHeld):
                self._handed_over = True
                work = self._begin_work(held)
                try:
                    await self._over
                except asyncio.CancelledError:
                    if not work.done():
                        work.add_done_callback(_report_orphan)
                    raise
                await work  # it has ended: with what it raised
            elif held:
                await self._run_unprotected()
        finally:
            leave(token)
            if not self._handed_over:  # the work closes the body itself, when it ends
                self.body.close()
            if self._watcher is not None:
                self._watcher.cancel()

    async def _receipt(self, values: Sequence[bytes]) -> AsyncHeld | bool:
        """Take the receipt; False where the request was answered without the work, True where it
        is to be run without one."""
        if not values:
            raise errors.KeyMissing(self.middleware.settings.key_header)
        key = keys.parse_key(values)
        try:
            caller = await self.middleware.caller(self.scope)
        except Exception:
            logger.exception("the scope callable failed; nothing was run")
            await self._problem(problems.SCOPE_FAILED)
            return False
        try:
            fingerprint = await self._read()
        except TooLarge:
            await self._problem(problems.body_too_large(self.policy.max_request_body))
            return False
        except Disconnected:
            return False
        call = Call(key, caller, fingerprint, self.request_id)
        try:
            got = await self.receipts.begin(call, self._on_wait)
        except asyncio.CancelledError:
            if self._left and self._waiting is not None and not self._waiting.uncancel():
                return False
            raise
        except errors.RecordCorrupt:
            raise
        except errors.StoreUnavailable as error:
            if self.policy.on_store_error != "run":
                raise
            emit(Event("unprotected", error.key, request_id=self.request_id))
            return True
        finally:
            self._waiting = None
            if self._timer is not None:
                self._timer.cancel()
        if isinstance(got, Record):
            await self._replay(got)
            return False
        return await self._counted(caller, got) if self.policy.max_receipts else got

    async def _counted(self, caller: str, held: AsyncHeld) -> AsyncHeld | bool:
        """Count the receipt as its caller's; one too many is given up, and the request answered."""
        policy = self.policy
        count = Counted(self.receipts.store, caller, bytes.fromhex(held.name))
        # A dead worker's was counted by it; and given up, it would be forgotten that one died.
        most = policy.max_receipts if held.abandoned is None else 0
        try:
            wait = await count.note(policy.ttl_for(None), most)
        except (Exception, asyncio.CancelledError) as error:
            unavailable = isinstance(error, errors.StoreUnavailable)
            if unavailable and policy.on_store_error == "run":
                return held
            _go_on(self._give_up(held, count))  # the store may take as long once more
            if unavailable:
                emit(Event("store-unavailable", held.name, request_id=self.request_id))
            raise
        if wait is None:
            self._count = count
            return held
        await held.release()
        emit(Event("too-many-receipts", held.name, request_id=self.request_id))
        await self._problem(problems.too_many_receipts(policy.max_receipts, wait))
        return False

    @staticmethod
    async def _give_up(held: AsyncHeld, count: Counted) -> None:
        # In this order, while it is ours: whether it was noted is not known.
        given_back = held.release() if held.abandoned is None else held.interrupt()
        await asyncio.gather(count.drop(), given_back)

    async def release(self, held: AsyncHeld) -> None:
        """Give the receipt up: it is its caller's no more."""
        await held.release()
        if self._count is not None:
            _go_on(self._count.drop())

    def recorded(self, ttl: float) -> None:
        """The result was recorded for so many seconds."""
        if self._count is not None and self.policy.ttl_by_status is not None:
            _go_on(self._count.keep(ttl))

    # The request

    def _path(self) -> bytes:
        """The full path, as the client sent it."""
        raw: bytes | None = self.scope.get("raw_path")
        if raw:
            return raw.partition(b"?")[0]
        path, root = self.scope.get("path", ""), self.scope.get("root_path", "")
        full = path if path.startswith(root) else root + path
        return bytes(full.encode("utf-8", "surrogatepass"))

    async def _read(self) -> bytes:
        """Read the body and take the request's fingerprint."""
        scope, how = self.scope, self.policy.fingerprint
        path, query = self._path(), scope.get("query_string", b"")
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"")
        streaming = keys.RequestFingerprint(scope["method"], path, query, encoding)
        length = headers.get(b"content-length", b"")
        # One of more digits than any body has is taken for none: what comes is counted anyway.
        declared = int(length) if length.isdigit() and len(length) < 20 else None
        limit = self.policy.max_request_body
        if declared is not None and declared > limit and b"expect" in headers:
            raise TooLarge  # the client asks before it sends: reading would invite the body
        await read_body(
            self.body,
            self.receive,
            declared,
            limit,
            streaming.update if how == "body" else lambda chunk: None,
        )
        if how == "body":
            return streaming.finish()
        if how == "none":
            return keys.NO_FINGERPRINT
        whole = self.body.whole()
        if how == "json":
            kind = headers.get(b"content-type", b"").decode("latin-1")
            return keys.json_fingerprint(scope["method"], path, query, encoding, whole, kind)
        assert callable(how)
        own = how(Request(scope), whole)
        if inspect.isawaitable(own):
            own = await own
        return keys.fingerprint("callable", own if isinstance(own, bytes) else str(own).encode())

    # A duplicate that waits for long: its client may leave.

    def _on_wait(self) -> None:
        if self._timer is None:
            self._waiting = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER, self._watch)

    def _watch(self) -> None:
        self._watcher = asyncio.ensure_future(self.receive())
        self._watcher.add_done_callback(self._client_left)

    def _client_left(self, told: asyncio.Task[Any]) -> None:
        if self._waiting is not None and not told.cancelled():
            self._left = True
            self._waiting.cancel()

    async def _receive(self) -> Any:
        """After the body: the real disconnect, when it comes."""
        if self._watcher is None:
            return await self.receive()
        try:
            return await asyncio.shield(self._watcher)
        except asyncio.CancelledError:
            if self._watcher.cancelled():  # the server has let go of the request: so has the client
                return {"type": "http.disconnect"}
            raise

    async def app_receive(self) -> Any:
        """The `receive` that the app is given: the body once more, then the real one."""
        piece = self.body.next()
        return await self._receive() if piece is None else piece

    # The work

    def _begin_work(self, held: AsyncHeld) -> asyncio.Task[None]:
        """Run the app in a task of its own: it goes on when the server lets go of the request."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        work = loop.create_task(self._run(held), name="retrysafe-work")
        _works.add(work)
        work.add_done_callback(self._end)
        if self.policy.on_lease_lost == "cancel":
            held.on_lost = work.cancel
        return work

    def _end(self, work: asyncio.Task[None]) -> None:
        _works.discard(work)
        if not self._over.done():
            self._over.set_result(None)

    async def _run(self, held: AsyncHeld) -> None:
        recording = Recording(self, held)
        recording.prepare(self.scope)
        try:
            with held.working():
                if held.abandoned is None or not await self._recovered(held, recording):
                    await self.middleware.app(self.scope, self.app_receive, recording.send)
        except Exception:
            if not held.ending:
                await self.release(held)
            raise
        except BaseException:
            if not held.ending:
                await held.interrupt()
            raise
        else:
            if not held.ending:  # the app ended without an answer, or in the middle of one
                await self.release(held)
                await recording.flush()
        finally:
            self.body.close()
        if recording.send_error is not None:
            raise recording.send_error

    async def _recovered(self, held: AsyncHeld, recording: Recording) -> bool:
        """Ask the recovery function about a call whose worker died; True where it was done."""
        ask = self.policy.on_abandoned
        if not callable(ask):
            return False
        assert held.abandoned is not None
        try:
            found = await ask_recovery(ask, held.abandoned)
            if found is None:
                return False
            held.control.keep()  # the work was done: whatever its status, it is not run again
            await answer_recovered(found, self.scope, recording.send)
        except Exception:
            # Not known is not "not done": a release would forget that there is something to ask.
            if not held.ending:
                await held.interrupt()
            raise
        return True

    async def _run_unprotected(self) -> None:
        """The user's choice for a store out of reach: run, and say so."""

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"idempotent-unprotected", b"true")]
                message = {**message, "headers": self.identified(headers)}
            await self.send(message)

        with unprotected():
            await self.middleware.app(self.scope, self.app_receive, send)

    # The answer

    def identified(self, headers: Headers) -> Headers:
        """The headers of this answer with the request's ID, where nobody outside sees to it."""
        line = self._id_line
        if line is None:
            return headers
        for name, _ in headers:
            if name.lower() == line[0]:
                return headers
        return [*headers, line]

    async def _problem(self, problem: problems.Problem) -> None:
        headers, body = problem.render(self.request_id)
        headers = self.identified(headers)
        await self._answer(
            [
                {"type": "http.response.start", "status": problem.status, "headers": headers},
                {"type": "http.response.body", "body": body},
            ]
        )

    async def _replay(self, record: Record) -> None:
        if record.payload is None:
            await self._problem(problems.RESULT_NOT_KEPT)
            return
        await self._answer(self.replay_of(record))

    def replay_of(self, record: Record) -> list[dict[str, Any]]:
        """The messages that answer this request from a record."""
        assert record.payload is not None
        try:
            stored = decode(record.payload)
        except CorruptRecord as error:
            emit(Event("record-corrupt", request_id=self.request_id, detail=str(error)))
            raise errors.RecordCorrupt("", str(error)) from None
        trailers = "http.response.trailers" in (self.scope.get("extensions") or {})
        messages = replay_messages(stored, record.request_id, self.scope["method"], trailers)
        messages[0]["headers"] = self.identified(messages[0]["headers"])
        return messages

    async def _answer(self, messages: list[dict[str, Any]]) -> None:
        try:
            for message in messages:
                await self.send(message)
        except OSError:
            logger.debug("the client left before its answer")


async def interrupt_works(grace: float) -> None:
    """Give what still runs on this loop `grace` seconds to end, then interrupt it: its receipts
    are abandoned now, not when their leases end."""
    loop = asyncio.get_running_loop()
    works = {work for work in _works if work.get_loop() is loop}
    if not works:
        return
    _, left = await asyncio.wait(works, timeout=grace)
    for work in left:
        work.cancel()
    if left:
        await asyncio.wait(left, timeout=grace)


def _go_on(rest: Coroutine[Any, Any, None]) -> None:
    """Let what is left to do go on when its request is answered."""
    work = asyncio.get_running_loop().create_task(rest, name="retrysafe-background")
    _works.add(work)
    work.add_done_callback(_works.discard)


def _report_orphan(work: asyncio.Task[None]) -> None:
    """The server has let go of this request: its failure would be seen by nobody."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("a request whose client had left failed", exc_info=error)
