"""The pages around /predict, by FastAPI: health, metrics, versions, learning, status, and a description that is true.

/predict is here too, for requests that the fast lane leaves (large or chunked bodies, other kinds of clients); both end
in `Predict`, so they answer alike. What only the parent knows (counts of all replicas, versions) is asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serve import description
from paceline.serve.fast_lane import LATE
from paceline.serve.fields import Field
from paceline.serve.labelled import Labelled
from paceline.serve.page import Page, make_docs, make_page
from paceline.serve.permit import is_foreign, permit
from paceline.serve.predict import VERSION, Answer, Predict, refusal
from paceline.serve.refused import Refused
from paceline.serve.settings import JSON

OPEN = ("/health", "/ready", "/", "/docs")  # without a token: who looks after processes has none, and pages ask for it
ORDERS = ("pin", "unpin", "pause", "resume", "rollback")
# An order or a question, or samples for the run; and a version -> status, kind, body.
Relay = Callable[[str | list[bytes], int | None], Awaitable[tuple[int, str, bytes]]]


class Pin(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /versions/pin."""

    version: Annotated[int, msgspec.Meta(ge=1, le=description.MOST)]


def make_app(predict: Predict, labelled: Labelled, relay: Relay, ready: Callable[[], str]) -> FastAPI:
    """`ready` says why this replica is not ready, or "" when it is."""
    app = FastAPI(
        title="Paceline",
        description=description.TEXT,
        version="1",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own load scripts from elsewhere
        redoc_url=None,
        responses=description.ANYWHERE,
    )
    answers = description.ANSWERS

    @app.post("/predict", responses=answers, openapi_extra=description.body([], []), summary="Results for some items")
    async def post_predict(request: Request) -> Response:
        try:
            head = predict.head(request.headers)
            body = await _body(request, predict.settings.max_body_bytes)
        except Refused as refused:
            return _response(predict.refuse(refused))
        return _response(await predict.answer(head, body))

    @app.post(
        "/learn",
        status_code=202,
        responses=description.LEARN,
        openapi_extra=description.labelled([], labelled.label),
        summary="Labelled items, for the run to learn from",
    )
    async def post_learn(request: Request) -> Response:
        try:
            body = await _body(request, predict.settings.max_body_bytes)
            kind = request.headers.get("content-type", JSON)
            samples = await asyncio.to_thread(labelled.samples, kind, body)
        except Refused as refused:
            return _response(refusal(refused))
        return await _relayed(relay, samples, None)

    def show(path: str, page: Page) -> None:
        @app.get(path, include_in_schema=False)
        async def shown() -> Response:
            return Response(page.body, headers=page.headers, media_type="text/html; charset=utf-8")

    show("/", make_page())
    show("/docs", make_docs())

    @app.get("/status", summary="What the page at / shows", responses=description.VERSIONS)
    async def status() -> Response:
        return await _relayed(relay, "status", None)

    @app.get("/health", summary="Whether the process lives", response_model=dict[str, str])
    async def health() -> Response:
        return Response(b'{"status":"alive"}', media_type=JSON)

    @app.get("/ready", summary="Whether a version is loaded and warm", responses=description.NOT_READY)
    async def is_ready() -> Response:
        why = ready()
        if why:
            return _response(refusal(Refused(503, why, retry_after_s=1)))
        return Response(b'{"status":"ready"}', media_type=JSON)

    @app.get("/metrics", summary="Counts of all replicas, as Prometheus reads them", responses=description.METRICS)
    async def metrics() -> Response:
        return await _relayed(relay, "metrics", None)

    @app.get("/versions", summary="Versions, what is pinned, and how the source is", responses=description.VERSIONS)
    async def versions() -> Response:
        return await _relayed(relay, "versions", None)

    @app.post(
        "/versions/pin",
        summary="Answer with this version until unpinned",
        responses=description.ORDERED,
        openapi_extra=description.PIN,
    )
    async def pin(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await _body(request, 1 << 12), type=Pin)
        except Refused as refused:
            return _response(refusal(refused))
        except msgspec.ValidationError as error:
            return _response(refusal(Refused(422, f'{error}; wanted: {{"version": N}}')))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _response(refusal(Refused(400, f"the body is not JSON: {error}")))
        return await _relayed(relay, "pin", wanted.version)

    def order(name: str, summary: str) -> None:
        @app.post(f"/versions/{name}", summary=summary, responses=description.ORDERED, name=name)
        async def ordered() -> Response:
            return await _relayed(relay, name, None)

    order("unpin", "Follow the source again")
    order("pause", "Take no further versions")
    order("resume", "Take versions again")
    order("rollback", "Answer with the version before this one")
    app.add_middleware(_Guard, token=predict.settings.token)
    return app


def describe(app: FastAPI, inputs: list[Field], outputs: list[Field], label: Field) -> None:
    """Put the model's fields into the description of /predict and /learn, once they are known."""
    for route in app.routes:
        if getattr(route, "path", "") == "/predict":
            route.openapi_extra = description.body(inputs, outputs)  # type: ignore[attr-defined]
            route.responses[200] = description.result(outputs)  # type: ignore[attr-defined]
        elif getattr(route, "path", "") == "/learn":
            route.openapi_extra = description.labelled(inputs, label)  # type: ignore[attr-defined]
    app.openapi_schema = None


class _Guard:
    """Asks on every page but /predict, which asks by itself, who may ask; those of OPEN need no token.

    A page of another site cannot give orders through its visitor's browser, which may reach us where it cannot.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/predict":
            headers = Headers(scope=scope)
            try:
                if not (self._token and scope["path"] in OPEN):
                    permit(self._token, headers)
                if scope["method"] == "POST" and is_foreign(headers):
                    raise Refused(403, f"a page of {headers['origin']} may not do this")
            except Refused as refused:
                await _response(refusal(refused))(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request, most: int) -> bytes:
    """At most so many bytes; 413 as soon as more are announced or come, 400 where the rest does not, 408 where we have
    waited for it long enough (who asked has heard that: it is for the counts).

    Of a body that is refused the rest is read and thrown away: who is still sending when we close loses the answer.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise Refused(413, f"the body has {announced} bytes, {most} are allowed")
    pieces = bytearray()
    try:
        async for piece in request.stream():
            pieces += piece
            if len(pieces) > most:
                raise Refused(413, f"the body has more than {most} bytes, which are allowed")
    except ClientDisconnect:  # or what came was no HTTP any more
        if LATE in request.scope["state"]:
            raise Refused(408, "the body has not come to its end in time") from None
        raise Refused(400, "the body was cut off") from None
    return bytes(pieces)


async def _relayed(relay: Relay, what: str | list[bytes], version: int | None) -> Response:
    status, kind, body = await relay(what, version)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return Response(body, status, headers, kind)


def _response(answer: Answer) -> Response:
    headers: dict[str, Any] = {}
    if answer.version:
        headers[VERSION] = str(answer.version)
    if answer.retry_after_s:
        headers["Retry-After"] = str(answer.retry_after_s)
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(answer.body, answer.status, headers, answer.kind)
