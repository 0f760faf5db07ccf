"""Steps to a target accuracy, and the accuracy at the end: the Fashion-MNIST CNN with every codec and with DDP's hooks.

Four members as processes of this host train for real, every one encoding its own gradients, as between hosts. What
comes out does not depend on how fast they are, so this can run anywhere, also on a GPU that they share (`--device
cuda`), and several teams at once (`--teams`). `bench.network --outcomes FILE` takes the time to the target from it.

  accuracy_gap_points_CODEC   points that its accuracy at the end lies behind plain DDP's, in the mean of the seeds,
                              with the interval of 95 %
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
from pathlib import Path

import msgspec

from bench import _network_accuracy as accuracy
from bench.harness import Figure, Report, arguments, short
from bench.network import SIDES, connect, on_this_host, ours


def main() -> None:
    options = arguments(__doc__, _options)
    env = {"BENCH_DEVICE": options.device} | ({"BENCH_DATA": options.data} if options.data else {})
    if options.data:
        accuracy.FOLDER = Path(options.data)
    if reason := accuracy.missing():
        raise SystemExit(f"bench.to_target: {reason}")
    names = options.sides or [name for name in SIDES if name not in ("alone", "auto")]
    if options.quick:
        names, options.lrs, options.seeds, options.epochs = options.sides or ["ddp", "sign"], [0.05], 1, 0.05
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    found: dict[str, accuracy.Outcome] = {}
    teams = [threading.Thread(target=_work, args=(waiting, found, env, options)) for _ in range(options.teams)]
    for team in teams:
        team.start()
    for team in teams:
        team.join()
    found = {name: found[name] for name in names if name in found}
    if options.outcomes:
        Path(options.outcomes).write_bytes(msgspec.json.encode(found))
    report = Report("bench.to_target")
    report.note(
        f"{options.epochs} epochs, global batch {4 * accuracy.BATCH}, rates tried {options.lrs}, {options.seeds} seeds"
    )
    plain = found.get("ddp")
    for name, outcome in found.items():
        report.extra[f"steps_to_target {name}"] = outcome.to_target
        report.extra[f"accuracy {name}"] = statistics.mean(outcome.final)
        if plain and name != "ddp":
            mean, half = accuracy.gap(plain, outcome)
            spread = f"{short(mean - half)} .. {short(mean + half)}"
            text = f"{100 * statistics.mean(outcome.final):.2f} %, lr {outcome.lr}, {_steps(outcome)}"
            peer = f"ddp {100 * statistics.mean(plain.final):.2f} %, lr {plain.lr}, {_steps(plain)}"
            figure = Figure(
                name=f"accuracy_gap_points_{name}", value=mean, ours=text, peer=peer, spread=spread, goal="<= 0.3"
            )
            report.add(figure)
    report.finish(options.json)
    if len(found) < len(names):
        raise SystemExit(f"bench.to_target: no outcome of {sorted(set(names) - set(found))}")


def _work(
    waiting: queue.SimpleQueue[str],
    found: dict[str, accuracy.Outcome],
    env: dict[str, str],
    options: argparse.Namespace,
) -> None:
    """One team: takes side after side."""
    with on_this_host(env) as team:
        connect(team)
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            side = SIDES.get(name) or ours(name)
            outcome = accuracy.run_side(team, side, epochs=options.epochs, num_seeds=options.seeds, lrs=options.lrs)
            found[name] = outcome
            if options.outcomes:  # as it comes: what is there stays, should this be stopped
                Path(options.outcomes).write_bytes(msgspec.json.encode(dict(found)))
            final = ", ".join(f"{100 * a:.2f}" for a in outcome.final)
            print(
                f"{name}: lr {outcome.lr}, {accuracy.TARGET:.0%} after {_steps(outcome)}, final {final} %", flush=True
            )


def _steps(outcome: accuracy.Outcome) -> str:
    each = ", ".join("never" if n == accuracy.NEVER else f"{n:.0f}" for n in outcome.steps)
    return f"{each} steps"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="codecs, or DDP's sides of bench.network")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of all members")
    parser.add_argument("--data", metavar="DIR", help="with the four idx files; else Debian's package")
    parser.add_argument("--teams", type=int, default=1, help="that train at once, four processes each")
    parser.add_argument("--outcomes", metavar="FILE", help="to write, for bench.network")
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=list(accuracy.LEARNING_RATES))


if __name__ == "__main__":
    main()
