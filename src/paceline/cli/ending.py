"""The one place at the end of a run that says what happened: which member failed first, how, and where to
read on."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from paceline.core import status
from paceline.core.lost import was
from paceline.membership.agent import Ended, Outcome
from paceline.membership.lines import clean

_HINTS = {
    signal.SIGKILL: "killed from outside: out of memory? `dmesg` tells; fewer members or a smaller batch need less, "
    "and `paceline plan memory` says which mesh would do",
    signal.SIGSEGV: "a crash in native code: the lines above show where Python was",
    signal.SIGBUS: "often a full /dev/shm: give data loaders fewer workers",
    signal.SIGABRT: "native code gave up: the lines above may say why",
    signal.SIGILL: "the processor does not know an instruction: `paceline doctor` tries bfloat16, the usual cause",
    signal.SIGXCPU: "a limit of CPU time: see `ulimit -t`",
}


def failure(
    outcome: Outcome, first: Ended, logs: dict[int, Path], *, workers: int, again: list[str], reason: str = ""
) -> str:
    """What to say about a run that failed; `again` is the command that goes on with it, `reason` was said already."""
    others = [e for e in outcome.ended if e.rank != first.rank]
    # When does not matter: it may have written a report after it left.
    if first.followed and (gone := [e for e in others if e.code == 0 and not e.asked]):
        return _left(gone, [e for e in outcome.ended if e.failed], logs)
    lines = [f"rank {first.rank} failed first: {exit_text(first.code)}, after {first.seconds:.1f} s"]
    if first.error and first.code < 0:
        lines = [f"rank {first.rank} failed first: {first.error} (and {was(first.how)} while it ended)"]
    if first.rank >= workers:
        lines = [
            f"server {first.rank - workers} (rank {first.rank}) {was(first.how)}, after {first.seconds:.1f} s: it held "
            "a part of the parameters",
            f"  to go on from the last checkpoint, where there is one: {shlex.join(again)}",
        ]
    elif (hint := _HINTS.get(-first.code)) and not first.error:  # type: ignore[call-overload]
        lines.append(f"  ({hint})")
    if any("OutOfMemoryError" in text for text in first.tail):
        lines.append(
            "  (`paceline plan memory` says what each strategy and mesh needs, and the smallest that would do)"
        )
    if any(text.startswith("EOFError: EOF when reading a line") for text in first.tail):
        lines.append("  (members have no standard input: give the script what it asks for as an argument, or a file)")
    if first.sure and first.sure in reason:
        pass  # it was said already
    elif first.tail:
        lines.append("  its last lines:")
        lines += [f"    {clean(text, colours=False)}" for text in first.tail]
    else:
        lines.append("  it printed nothing")
    lines.append(f"  its whole output: {logs[first.rank]}")
    for ended in others:
        if ended.failed:
            verb = "ended because of" if ended.followed else "failed after"
            lines.append(f"  rank {ended.rank} {verb} it: {exit_text(ended.code)} ({logs[ended.rank]})")
    if stopped := [str(e.rank) for e in others if e.asked and not e.failed]:
        lines.append(f"  stopped because of it: rank {', '.join(stopped)}")
    return "\n".join(lines)


def _left(gone: list[Ended], others: list[Ended], logs: dict[int, Path]) -> str:
    """What to say where nobody failed, but for the sake of those who had left."""
    lines = [
        f"rank {e.rank} left in the middle of the run: its script ended with exit code 0, after {e.seconds:.1f} s; "
        f"does it end early? ({logs[e.rank]})"
        for e in gone
    ]
    lines += [f"  rank {e.rank} could not go on without it: {exit_text(e.code)} ({logs[e.rank]})" for e in others]
    return "\n".join(lines)


def left_early(outcome: Outcome, directory: Path, logs: dict[int, Path], workers: int) -> list[str]:
    """What to say of workers whose script ended before the run did, where the others went on and finished."""
    said = {e.rank: status.read(directory / "status" / f"rank-{e.rank}", e.rank) for e in outcome.ended}
    what = {e: doing.what for e in outcome.ended if e.rank < workers and (doing := said[e.rank])}
    if "finished" not in what.values():
        return []
    return [
        f"rank {e.rank} left in the middle of the run: its script ended with exit code 0, after {e.seconds:.1f} s; the "
        f"others went on without it ({logs[e.rank]})"
        for e, text in what.items()
        if text == "left early" and e.code == 0
    ]


def lost(rank: int, how: str) -> str:
    """What to say at once of a member without which the others go on."""
    return f"member {rank} was lost ({how}); the others go on, its batches are dealt to them"


def lost_on_the_way(lost: list[Ended], logs: dict[int, Path]) -> str:
    """What to say at the end of an elastic run that finished all the same."""
    count = "a member was lost" if len(lost) == 1 else f"members were lost {len(lost)} times"
    who = "; ".join(f"{e.rank}: {e.how} ({logs[e.rank]})" for e in sorted(lost, key=lambda e: e.at))
    return f"{count} on the way, and the run finished: {who}"


def stopped(number: int, directory: Path, again: list[str]) -> str:
    """What to say about a run that was told to stop."""
    why = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal's closing"}.get(
        signal.Signals(number), signal.Signals(number).name
    )
    return f"stopped by {why}; to go on: {shlex.join(again)}\n  the run's files: {directory}"


def never_joined(num_members: int) -> str:
    """What to say of a script that ended well without `paceline.join()`."""
    return (
        f"the script never called paceline.join(), so {num_members} independent copies of it ran; to train together, "
        f"add run = paceline.join(), run.optimizer(optimizer, model) and run.loader(dataset, batch_size)"
    )


def exit_text(code: int) -> str:
    """
    >>> exit_text(3), exit_text(-9)
    ('exit code 3', 'exit code -9 (SIGKILL)')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"exit code {code} (signal {-code})"
