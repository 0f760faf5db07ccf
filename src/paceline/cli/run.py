"""`paceline run`: start the members, here or by an engine, show what they print, and end as they end."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import types
from argparse import Namespace
from collections import deque
from pathlib import Path

from paceline.cli import ending, recipes
from paceline.cli.display import Display, Screen, can_draw
from paceline.cli.flags import LABEL_HELP, Flag, Parser, add_settings, seconds, settings_of, size, variable, whole
from paceline.core.errors import ConfigError
from paceline.core.labels import word
from paceline.core.settings import Settings
from paceline.launch import beforehand, cores, engines, held, listed, servers, typed
from paceline.launch.detach import Left, leave_terminal
from paceline.launch.elastic import DRAIN_S
from paceline.launch.engines import Engine, Seating, Shown, Submitted
from paceline.launch.spec import Away, Elastic, Job, JobSpec, Replacing
from paceline.membership.agent import Outcome

_LOOK_S = 0.1
_STUCK_S = 10.0  # beyond what it takes to ask the members, and to kill them
_EPILOG = """\
examples:
  paceline run -n 2 train.py --lr 0.1           what follows the script belongs to the script
  paceline run -n 4 -m package.train            a module, as with python -m
  paceline run -n 2 --name big train.py         again with the same name: goes on where it stopped
  paceline run -n 2 --name big --fresh train.py starts over
  paceline run -n 8 --dry-run train.py          prints what would be started
  paceline run --on ENGINE --help               the options of an engine besides
  paceline run -n 2:4 train.py                  elastic: starts 4, goes on while 2 are left, replaces lost ones
  paceline run -n 4 --strategy async --replacements 2 train.py    with servers: each lost worker, up to twice
  paceline run -n 4:8 --hosts hosts.txt train.py    on the hosts of a list, which may change
  paceline run big.toml --set args.lr=0.1       a run written down: script, args, members and any option as keys
  paceline run --again big                      what the run was started with, as a new run

Ctrl-C stops all members, a second Ctrl-C kills them. The exit code is that of the member that failed first,
130 after Ctrl-C, 143 after SIGTERM; of an elastic run that finished it is 0, whoever was lost on the way.
"""


_DEFAULT = Elastic(least=1, most=1)
_ELASTIC = (
    Flag("replacements", "N", whole(0), "how often each member may be started again; with servers also with -n N"),
    Flag("silence_s", "S", seconds(0.1), "after which a member or host that is stopped or not heard of is lost"),
    Flag("standbys", "K", whole(0), "processes that wait, with torch imported, to replace a lost member"),
    Flag("listen", "ADDRESS", str, "of this host, on which others reach it, to join with `paceline agent`"),
    Flag("port", "P", typed.port, "of that address; 0: any that is free"),
    Flag("slots", "K", whole(0), "members that this host may have"),
    Flag(
        "hosts",
        "a:4,b:4|FILE",
        typed.hosts,
        "other hosts, also in lines of a file: names, slots, labels; or a program",
    ),
    Flag("start_on", "COMMAND", typed.command, "what leads to such a host, instead of --on ssh"),
)
_SERVED = ("replacements", "silence_s")  # of these, for runs with servers too
_PLACED = ("hosts", "listen", "port")  # and these where members that stay are on other hosts
_SCRIPTS = (".py", ".pyw", ".pyc", ".pyz")
_ONCE_S = 0.3  # signals so close to each other are one
_NOTES = {"listen": "none", "port": "0", "slots": "MAX, or 0 with --hosts", "hosts": "none"}


def main(argv: list[str]) -> int:
    given, engine, spec, recipe = _asked(argv)
    spec = engine.prepare(spec)
    shown = engine.preview(spec)  # also finds out whether the script can be started
    here = spec.elastic.own_slots > 0 if spec.elastic else spec.away is None
    members = (spec.elastic.least, spec.elastic.most) if spec.elastic else spec.num_members

    def check() -> None:
        beforehand.check_rounds(spec.settings.strategy, members)
        beforehand.check(spec.settings, here=here and not engine.elsewhere)

    beforehand.aside(check)
    if given.dry_run:
        print(shown)
        return 0
    engine.check(spec)
    return _run(spec, engine, recipe)


def _asked(argv: list[str]) -> tuple[Namespace, Engine, JobSpec, recipes.Table]:
    """What the command line and its recipe ask for, by which engine, and both as a recipe."""
    given, rest, recipe = recipes.resolve(lambda words: _parser(*_named(words)), argv)
    if given.on is None:  # not "", a variable that is not set, which would start all members here
        given.on = "ssh" if given.hosts and not given.start_on else "local"
    if given.members is None:
        raise ConfigError(_no_members(rest))
    own = {option.field: getattr(given, option.field) for option in engines.options(given.on)}
    engine = engines.make(given.on, {field: value for field, value in own.items() if value is not None})
    return given, engine, _spec(given, rest, engine), recipe


def _named(argv: list[str]) -> tuple[str, str]:
    """The engine that --on names: which other options there are depends on it; and what it says, if that is none."""
    hosts = command = False
    wrong = ""
    for option, value in zip(argv, [*argv[1:], ""]):
        if option in ("-m", "--") or (option.endswith(_SCRIPTS) and not option.startswith("--")):
            break
        hosts = hosts or option.startswith("--hosts")
        command = command or option.startswith("--start-on")
        name = value if option == "--on" else option.removeprefix("--on=")
        if option == "--on" or option.startswith("--on="):
            if name in engines.ENGINES:
                return name, ""
            wrong = wrong or name
    return "ssh" if hosts and not command else "local", wrong


def _parser(on: str = "local", wrong: str = "") -> Parser:
    parser = Parser(
        prog="paceline run",
        usage="paceline run -n N [options] script.py [arguments of the script]\n"
        "       paceline run recipe.toml [--set KEY=VALUE] [options]\n"
        "       paceline run --again RUN [--set KEY=VALUE] [options]",
        description="Train a script on N members of this host; with -n MIN:MAX, members may come and go.",
        epilog=_EPILOG,
        elsewhere=lambda option: _elsewhere(option, wrong),
    )
    parser.option(
        "-n", "--members", parse=size, metavar="N", help="how many members to start; MIN:MAX: they may come and go"
    )
    known = ", ".join(f"{name} ({what})" for name, what in engines.ENGINES.items())
    parser.option("--on", parse=str, metavar="ENGINE", help=f"where: {known} (default: local)")
    for option in engines.options(on):
        if option.metavar:
            parser.option(option.name, parse=option.parse, metavar=option.metavar, help=f"{option.help}; --on {on}")
        else:
            parser.option(option.name, help=f"{option.help}; --on {on}")
    parser.option("--threads", parse=whole(1), metavar="T", help="per member (default: its share of the cores)")
    for flag in _ELASTIC:
        default = getattr(_DEFAULT, flag.field)
        note = _NOTES.get(flag.field) or (f"{default:g}" if isinstance(default, int | float) else default)
        text = f"{flag.help}; with -n MIN:MAX (default: {note})"
        parser.option(flag.option, parse=flag.parse, metavar=flag.metavar, help=text)
    parser.option("--label", parse=word, metavar="LABEL", action="append", help=LABEL_HELP)
    parser.option(
        "--env", parse=variable, metavar="NAME[=VALUE]", action="append", help="for the members; may be repeated"
    )
    parser.option("--detach", help="go on in the background; paceline logs, status and stop find it there")
    parser.option("--dry-run", of_recipe=False, help="print what would be started, and start nothing")
    parser.option(
        "--again", of_recipe=False, parse=str, metavar="RUN", help="what this run was started with, as a new run"
    )
    parser.option(
        "--set",
        of_recipe=False,
        parse=str,
        metavar="KEY=VALUE",
        action="append",
        help="change a recipe, as in seed=3 or args.lr=0.1; may be repeated",
    )
    parser.add_argument("-m", metavar="MODULE", help="run a module instead of a script; comes last, as with python")
    add_settings(parser)
    return parser


def _elsewhere(option: str, wrong: str) -> str:
    """Of an option that is not known: the engine that has it. `wrong`: no engine, but named as one, which comes first,
    since the option may well be of the one that was meant."""
    if wrong:
        engines.load(wrong)
    name = engines.owner(option)
    return f"it is an option of --on {name}" if name else ""


def _no_members(rest: list[str]) -> str:
    if any(word.startswith(("-n", "--members")) for word in rest[1:]):
        return f"-n came after the script {rest[0]!r}, so it belongs to the script: paceline run -n N {rest[0]} …"
    return f"how many members? paceline run -n 2 {rest[0] if rest else 'train.py'}"


def _spec(given: Namespace, rest: list[str], engine: Engine) -> JobSpec:
    module = rest[:1] == ["-m"]
    rest = rest[1:] if module else rest
    if not rest:
        what = "module" if module else "script"
        raise ConfigError(
            f"which {what}? paceline run -n {given.members} {'-m package.train' if module else 'train.py'}"
        )
    if given.hosts and engine.no_hosts and (engine.stays or not given.start_on):
        hosts = given.hosts if listed.is_list(given.hosts) else "a:4,b:4"
        raise ConfigError(f"--hosts {given.hosts} with --on {given.on}: {engine.no_hosts.format(hosts=hosts)}")
    settings = settings_of(given)
    served = servers.served(settings.strategy)
    away = _away(given, settings, served, engine)
    replacing = _replacing(given, away is not None) if served else None
    elastic = None if served or away else _elastic(given, engine)
    comes = "" if elastic is None else "-n MIN:MAX" if given.members.elastic else f"--on {given.on}"
    if elastic:
        beforehand.check_elastic(settings, comes)
    else:
        beforehand.check_fixed(settings)
    most = given.members.most
    beforehand.check_mesh(settings, most, elastic=comes, served=served)
    num_servers, _ = servers.choose(settings.strategy, settings.servers, most, replaces=replacing is not None)
    forgives = replacing is not None or servers.forgives(settings.strategy, num_servers)
    if served and given.silence_s and not forgives:
        raise ConfigError(
            f"--silence-s: {settings.strategy} cannot go on without a worker that is stopped, and waits for it for "
            "--wait-limit-s; leave it out, or give --replacements"
        )
    return JobSpec(
        script=rest[0],
        args=tuple(rest[1:]),
        module=module,
        num_members=given.members.most,
        num_servers=num_servers,
        forgives=forgives,
        elastic=elastic,
        replacing=replacing,
        away=away,
        silence_s=given.silence_s or _DEFAULT.silence_s,
        settings=settings,
        threads=given.threads,
        labels=tuple(given.label or ()),
        env=dict(given.env or ()),
        detached=given.detach,
        terminal=can_draw() and settings.progress in ("auto", "rich") and not given.detach,
    )


def _away(given: Namespace, settings: Settings, served: bool, engine: Engine) -> Away | None:
    """Hosts for members that stay, where the run is one that a scheduler cannot have."""
    torch_groups = settings.transport in ("gloo", "nccl")
    if not engine.spreads or not (served or (not given.members.elastic and (settings.mesh or torch_groups))):
        return None
    if not isinstance(engine, Seating):
        what = f"--strategy {settings.strategy}" if served else "--mesh" if settings.mesh else "--transport"
        raise ConfigError(
            f"{what} needs members that stay, which --on {given.on} does not start: leave one of them out"
        )
    for flag in _ELASTIC if not served else ():
        if getattr(given, flag.field) is not None and flag.field not in _PLACED:
            raise ConfigError(f"{flag.option} is for runs whose members may come and go: leave it out here")
    return Away(hosts=given.hosts or "", listen=given.listen or "", port=given.port or 0)


def _elastic(given: Namespace, engine: Engine) -> Elastic | None:
    values = {flag.field: value for flag in _ELASTIC if (value := getattr(given, flag.field)) is not None}
    if given.members.elastic or engine.spreads:
        return Elastic(least=given.members.least, most=given.members.most, **values)
    if values:
        flag = next(flag for flag in _ELASTIC if flag.field in values)
        if engine.stays:
            raise ConfigError(f"{flag.option} does not go with --on {given.on}: {engine.stays}; leave it out")
        raise ConfigError(
            f"{flag.option} is for runs whose members may come and go: give -n MIN:MAX, such as -n "
            f"{given.members}:{given.members}"
        )
    return None


def _replacing(given: Namespace, away: bool) -> Replacing | None:
    """With servers: what is done about lost workers; None: they are not started again."""
    values = [flag for flag in _ELASTIC if getattr(given, flag.field) is not None]
    known = (*_SERVED, *_PLACED) if away else _SERVED
    if other := next((flag for flag in values if flag.field not in known), None):
        raise ConfigError(
            f"{other.option} is for elastic runs of all-reduce: with servers, lost workers are started again on this "
            "host; leave it out"
        )
    if given.members.elastic or given.replacements:
        least = given.members.least if given.members.elastic else 1
        return Replacing(least=least, replacements=3 if given.replacements is None else given.replacements)
    return None


def _run(spec: JobSpec, engine: Engine, recipe: recipes.Table) -> int:
    settle = leave_terminal() if spec.detached else None
    if isinstance(settle, Left):
        if name := settle.name:
            ways = ", ".join(f"paceline {what}" for what in (f"status {name}", f"logs {name} --follow", f"stop {name}"))
            print(f"paceline: run {name} goes on without this terminal: {ways}")
        return settle.code
    display = Screen(spec.size) if spec.terminal else Display(spec.size)
    signals = _catch_signals()
    on_lost = lambda rank, how: display.say(ending.lost(rank, how))  # noqa: E731
    job = engine.start(spec, Shown(show=display, say=display.say, on_lost=on_lost))
    if directory := job.directory if isinstance(job, Submitted) else job.dir:
        _keep(recipe, directory, display)
    if isinstance(job, Submitted):
        display.say(job.text)
        return 0
    _say_what_starts(spec, job, display)
    if settle:
        settle(job.dir)
    deadline, asked = math.inf, -math.inf
    while (outcome := job.wait(_LOOK_S)) is None:
        display.tick()
        while signals:
            number = signals.popleft()
            if number == signal.SIGWINCH:
                job.resize()
                continue
            before, asked = asked, time.monotonic()
            if number == signal.SIGTERM and asked - before < _ONCE_S:
                continue  # `timeout` and batch systems send it to us and to our process group
            job.stop(number)
            drains = spec.elastic is not None and number == signal.SIGTERM
            deadline = min(deadline, time.monotonic() + _STUCK_S + (DRAIN_S if drains else 0.0))
            display.say(f"{'draining' if drains else 'stopping'} the members (again: kill them)")
        if time.monotonic() > deadline:
            # Whoever reads our output neither reads nor goes away. Our end is the members' end.
            os._exit(128 + number)
    display.close()
    _say_how_it_ended(spec, job, outcome, display)
    return outcome.code


def _keep(recipe: recipes.Table, directory: Path, display: Display) -> None:
    try:
        if not held.is_this(directory):  # else who submitted it keeps what was asked for, with its nodes and time
            recipes.write(directory, recipe)
    except (OSError, UnicodeEncodeError, ConfigError) as error:  # a full disk, or a file's name that is no text
        display.say(f"warning: {recipes.FILE} could not be written, so --again will not find it: {error}")


def _catch_signals() -> deque[int]:
    """Signals in the order in which they come. Those that whoever started us ignores (nohup) stay ignored."""
    received: deque[int] = deque()

    def note(number: int, frame: types.FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
        if number == signal.SIGWINCH or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)
    return received


def _say_what_starts(spec: JobSpec, job: Job, display: Display) -> None:
    usable = cores.cores().usable
    here = min(spec.num_members, spec.elastic.own_slots) if spec.elastic else 0 if spec.away else spec.num_members
    threads, warning = cores.share(max(1, here), usable)
    if warning:
        display.say(f"warning: {warning}")
    replaces = spec.replacing is not None
    _, reason = servers.choose(spec.settings.strategy, spec.settings.servers, spec.num_members, replaces=replaces)
    if reason:
        display.say(reason)
    members = "1 member" if spec.num_members == 1 else f"{spec.num_members} members"
    shown = spec.threads or os.environ.get("OMP_NUM_THREADS") or threads
    if spec.elastic:
        members += f" (elastic, {spec.elastic.least} to {spec.elastic.most})"
    if spec.replacing:
        members += f" (at least {spec.replacing.least}; each started again up to {spec.replacing.replacements} times)"
    there = "" if here == spec.num_members else f"{here} of them here, " if here else "all on other hosts, "
    each = f"{shown} thread{'' if str(shown) == '1' else 's'} each; " if here else ""
    display.say(f"{members}, {there}{each}files in {_short(job.dir)}")


def _say_how_it_ended(spec: JobSpec, job: Job, outcome: Outcome, display: Display) -> None:
    logs = {rank: _short(path) for rank, path in job.logs().items()}
    again = _again(spec, job)
    if outcome.lost and (spec.elastic or (spec.replacing and not outcome.code)):
        display.say(f"warning: {ending.lost_on_the_way(outcome.lost, logs)}")
    for lost in () if spec.elastic or spec.replacing else outcome.lost:
        how = f"{lost.why or ending.exit_text(lost.code)}, after {lost.seconds:.1f} s ({logs[lost.rank]})"
        display.say(f"warning: rank {lost.rank} was lost: {how}; the others went on without it")
    for line in ending.left_early(outcome, job.dir, logs, spec.num_members) if spec.num_servers else ():
        display.say(f"warning: {line}")
    if job.reason and not outcome.stopped_by:
        display.say(f"the run is over: {job.reason}")
    if outcome.stopped_by:
        display.say(ending.stopped(outcome.stopped_by, _short(job.dir), again))
    elif first := outcome.first_failed:
        workers = spec.elastic.most if spec.elastic else spec.num_members
        display.say(ending.failure(outcome, first, logs, workers=workers, again=again, reason=job.reason))
    elif spec.num_members > 1 and not job.met and not job.reason:
        display.say(ending.never_joined(spec.num_members))


def _again(spec: JobSpec, job: Job) -> list[str]:
    """The command that goes on with this run."""
    args = [a for a in sys.argv[1:] if a != "--fresh"]
    if not spec.settings.name:
        args[1:1] = ["--name", job.dir.name]
    return ["paceline", *args]


def _short(path: Path) -> Path:
    """Relative to where the user stands, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
