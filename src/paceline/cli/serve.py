"""`paceline serve`: answer requests over HTTP with a model of a run, a checkpoint or a file."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.flags import Parser, seconds, whole
from paceline.cli.plan import nbytes, shape
from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import Settings as RunSettings
from paceline.launch import typed
from paceline.transport.address import is_loopback, join_address

if TYPE_CHECKING:
    from paceline.serve.holdout import Holdout

_PIP = "pip install 'paceline[serve]'"
_MOST_REPLICAS = 4  # by default: each has a model of its own in memory
_TOKEN = "PACELINE_SERVE_TOKEN"
_EPILOG = """\
examples:
  paceline serve big --model train.py:make_model                    the newest version of the run runs/big
  paceline serve weights.safetensors --model package.net:Net --input 1x28x28
  curl -H 'Content-Type: application/json' -d '{"inputs": [[0.1, 0.2]]}' http://127.0.0.1:8000/predict

FUNCTION takes no arguments and makes the model. What one item looks like is said with --input, once for each argument
of the model, or by a function example_inputs() beside it, which returns the arguments for a batch.

On an address that is not loopback every request must bring a token, 'Authorization: Bearer TOKEN': that of
--token-file, else of the variable PACELINE_SERVE_TOKEN, else one that is made and printed. SIGTERM and Ctrl-C end it
when the requests under way are answered.
"""


def main(argv: list[str]) -> int:
    parser = _parser()
    _, rest = parser.split(argv)
    parser.split(rest[1:])  # an unknown option after RUN gets the nearest name too
    given = parser.parse_args(argv)
    if missing := [
        name for name in ("fastapi", "uvicorn", "httptools", "uvloop") if not importlib.util.find_spec(name)
    ]:
        raise ConfigError(f"paceline serve needs {', '.join(missing)}: {_PIP}")
    if not given.model:
        raise ConfigError("what makes the model? paceline serve RUN --model train.py:make_model")
    return _serve(given)


def _parser() -> Parser:
    from paceline.serve.settings import FORMS, PRECISIONS, Settings

    default = Settings(model="")
    parser = Parser(prog="paceline serve", description="Answer requests over HTTP with a model.", epilog=_EPILOG)
    parser.option(
        "--model", parse=str, metavar="FILE:FUNCTION", help="what makes the model; or package.module:FUNCTION"
    )
    parser.option(
        "--input", parse=shape, metavar="SHAPE", action="append", help="of one item, as in 3x224x224 or 128:int64"
    )
    parser.option(
        "--label",
        parse=_label,
        metavar="SHAPE",
        default=default.label,
        help="of one label for /learn, as in float32 or 10:float32 (int64: the number of a class)",
    )
    parser.option("--host", parse=str, metavar="ADDRESS", default="127.0.0.1", help="to listen on (127.0.0.1)")
    parser.option(
        "--port", parse=typed.port, metavar="P", default=8000, help="of that address; 0: any that is free (8000)"
    )
    parser.option(
        "--token-file", parse=str, metavar="FILE", help="that holds the token; on loopback none is asked for without"
    )
    parser.option(
        "--device", parse=str, metavar="NAME", default=default.device, help="where to compute: cpu, cuda, cuda:1 (cpu)"
    )
    parser.option(
        "--replicas",
        parse=whole(1),
        metavar="N",
        help="processes with a model each (one for each core, 4 at most; on a GPU 1)",
    )
    parser.option("--threads", parse=whole(1), metavar="T", help="per replica (measured)")
    parser.option(
        "--max-batch-size",
        parse=whole(1),
        metavar="N",
        default=default.max_batch_size,
        help=f"items in one batch, and in one request ({default.max_batch_size})",
    )
    parser.option(
        "--max-queue-delay-us",
        parse=whole(0),
        metavar="US",
        default=default.max_queue_delay_us,
        help=f"how long a batch that is not full waits for more ({default.max_queue_delay_us})",
    )
    parser.option(
        "--queue-limit",
        parse=whole(1),
        metavar="N",
        default=default.queue_limit,
        help=f"items that may wait in a replica before requests get 429 ({default.queue_limit})",
    )
    parser.option(
        "--deadline-ms",
        parse=whole(1),
        metavar="MS",
        default=int(default.deadline_ms),
        help=f"of requests without X-Paceline-Deadline-Ms; later ones get 504 ({default.deadline_ms:g})",
    )
    parser.option(
        "--max-body", parse=nbytes, metavar="SIZE", default=default.max_body_bytes, help="of a request (16MiB)"
    )
    parser.option("--precision", parse=_one_of(PRECISIONS), metavar="|".join(PRECISIONS), default="fp32", help="(fp32)")
    parser.option(
        "--compile",
        parse=_one_of(FORMS),
        metavar="|".join(FORMS),
        default=default.compile,
        help=f"how the model is run; auto measures ({default.compile})",
    )
    parser.option(
        "--drain-s",
        parse=seconds(0),
        metavar="S",
        default=default.drain_s,
        help="for requests under way at the end (30)",
    )
    parser.option(
        "--codec", parse=_codec, metavar="NAME", default="", help="in which changes travel from servers (exactly)"
    )
    parser.option(
        "--every-s", parse=seconds(0), metavar="S", default=0.0, help="at most one new version in so long (0)"
    )
    parser.option("--holdout", parse=str, metavar="FILE:FUNCTION", help="whose data new versions must not be worse on")
    parser.option(
        "--metric", parse=str, metavar="NAME", help="on the holdout: accuracy, loss, FILE:FUNCTION (accuracy)"
    )
    parser.option("--tolerance", parse=seconds(0), metavar="X", default=0.0, help="by how much one may be worse (0)")
    parser.option(
        "--orders",
        parse=str,
        metavar="DIR",
        help="in which what is pinned or paused is kept for the next start (beside what is served)",
    )
    parser.option("--root", parse=str, metavar="DIR", default=RunSettings().root, help="where runs live (runs)")
    parser.add_argument(
        "what", metavar="RUN|CHECKPOINT", help="a run's name or directory, a checkpoint, or a .safetensors file"
    )
    return parser


def _codec(text: str) -> str:
    """Asked of it here already: a file or a run without servers would never tell that there is no such codec."""
    from paceline.server.outside.calls import make_code

    if text:
        make_code(text)
    return text


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ConfigError(f"{text!r} is not known: {nearest(text, words)}")
        return text

    return parse


def _serve(given: Namespace) -> int:
    from paceline.serve import house
    from paceline.serve.keeper import Keeper, Rules
    from paceline.serve.kept import Kept
    from paceline.serve.learner import make_learner
    from paceline.serve.prepare import make_model
    from paceline.serve.settings import Settings
    from paceline.serve.shelf import Shelf
    from paceline.serve.sources import make_source

    token, where_from = _token(given)
    run_token = os.environ.get("PACELINE_TOKEN", "") if ":" in given.what else ""
    source = make_source(given.what, root=Path(given.root), token=run_token, codec=given.codec)
    holdout = _holdout(given)
    kept = Kept(_orders(given.orders) if given.orders else source.orders)
    listener = _listen(given.host, given.port)
    model, _, _ = make_model(given.model)
    settings = Settings(
        name=source.what,
        model=given.model,
        inputs=tuple((tuple(sizes), kind) for sizes, kind in given.input or ()),
        label=given.label,
        replicas=given.replicas or _replicas(given.device),
        threads=given.threads or 0,
        max_batch_size=given.max_batch_size,
        max_queue_delay_us=given.max_queue_delay_us,
        queue_limit=max(given.queue_limit, given.max_batch_size),
        deadline_ms=float(given.deadline_ms),
        max_body_bytes=given.max_body,
        device=given.device,
        precision=given.precision,
        compile=given.compile,
        token=token,
        drain_s=given.drain_s,
    )
    address = f"http://{join_address(given.host, listener.getsockname()[1])}"
    told = False

    def started(said: str) -> None:
        nonlocal told
        if not told:
            told = True
            where = f"{address}/predict, page at {address}/, described at {address}/docs"
            _say(f"answers at {where} ({settings.replicas} replicas, {said})")

    if where_from:
        _say(where_from)

    def make_keeper(shelf: Path) -> Keeper:
        rules = Rules(every_s=given.every_s)
        return Keeper(Shelf(shelf), source, rules, model=model, holdout=holdout, kept=kept, say=_say)

    return house.serve(settings, listener, make_keeper, make_learner(source), say=_say, started=started)


def _orders(text: str) -> Path:
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--orders {text!r} is no directory: {error.strerror}") from None
    return Path(text) / "serving"


def _replicas(device: str) -> int:
    """One for each core; on a GPU several would take turns, and hold as many models."""
    return min(_MOST_REPLICAS, len(os.sched_getaffinity(0))) if device == "cpu" else 1


def _label(text: str) -> tuple[tuple[int, ...], str]:
    """
    >>> _label("float32"), _label("10:float32")
    (((), 'float32'), ((10,), 'float32'))
    """
    if text.isidentifier():
        return (), text
    sizes, kind = shape(text)
    return tuple(sizes), kind


def _holdout(given: Namespace) -> Holdout | None:
    if not given.holdout:
        if given.metric or given.tolerance:
            raise ConfigError("--metric and --tolerance are of a holdout: give --holdout too")
        return None
    from paceline.core import loading
    from paceline.serve.holdout import Holdout

    module, where, name = loading.named(given.holdout)
    if not name:
        raise ConfigError(f"--holdout {given.holdout!r}: name the function that returns it, as in data.py:holdout")
    metric = given.metric or "accuracy"
    if ":" in metric:
        of, _, called = loading.named(metric)
        metric = getattr(of, called, None)
        if not callable(metric):
            raise ConfigError(f"--metric {given.metric!r} is no function")
    return Holdout(loading.result(module, name, where), metric, given.tolerance)


def _token(given: Namespace) -> tuple[str, str]:
    """The token, and what to say of it."""
    if given.token_file:
        try:
            token = Path(given.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {given.token_file!r} cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"--token-file {given.token_file!r} is empty")
        return token, ""
    if token := os.environ.get(_TOKEN, ""):
        return token, ""
    if is_loopback(given.host) or given.host == "localhost":
        return "", ""
    token = secrets.token_urlsafe(32)
    return token, f"requests need the header 'Authorization: Bearer {token}'"


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # two that only bind the same port both may
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {reason}; choose others, 0: any port"
        ) from None
    return listener


def _say(text: str) -> None:
    print(f"paceline serve: {text}", flush=True, file=sys.stderr)
