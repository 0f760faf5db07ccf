"""Random plans of faults for bench.chaos, in the words of `FaultPlan`: the same for the same seed.

All-reduce, with members that are started again: kills of any member, of the first and of the scheduler, two at once,
one after the other (the second while the others form their group again, or a newcomer is healed), kills during a
checkpoint, and pauses of members and of the scheduler, shorter and longer than the silence after which a member is lost
or a scheduler replaced; and somebody asks for more members, or fewer. The servers' strategies start
lost workers again too, where they are told to, and there too pauses are shorter or longer than the silence; where they
are not, a run has as many kills as it can do without, and all who are paused are waited for. Between hosts, links fail
as well: they part, one way or both, are slow, reset, or flip a byte; whole hosts die, or are told that they must go and
are taken away a while later, ready or not; disks are full, clocks jump.
"""

from __future__ import annotations

from random import Random

from paceline.testing.plan import FaultPlan

_SCHEDULERS = 4  # that a run may lose: with one that ends too often within a minute it does without
_KINDS = {
    "kill": 8,
    "first": 2,
    "scheduler": 2,
    "two": 3,
    "chase": 4,
    "checkpoint": 3,
    "short": 4,
    "long": 2,
    "asleep": 3,
    "scale": 5,
}

_ABROAD = {
    "kill": 4,
    "host": 2,
    "scheduler": 1,
    "pause": 2,
    "parted": 5,
    "slow": 2,
    "reset": 3,
    "corrupt": 3,
    "disk": 2,
    "clock": 2,
    "asleep": 2,
    "scale": 3,
    "drain": 4,
}


def elastic(
    seed: int, *, faults: int, least: int, members: int, first_step: int, gap: int, silence_s: float
) -> FaultPlan:
    """About `gap` steps between one moment and the next; a moment may have two faults."""
    dice, plan, step, schedulers = Random(seed), FaultPlan(), first_step, 0
    while len(plan.faults) < faults:
        kind = dice.choices(list(_KINDS), list(_KINDS.values()))[0]
        after_s = round(dice.uniform(0.0, 0.05), 3)
        one, other = dice.sample(range(members), 2)
        match kind:
            case "first":
                plan = plan.kill(member="first", step=step, after_s=after_s)
            case "scheduler" if schedulers < _SCHEDULERS:
                schedulers += 1
                plan = plan.kill("scheduler", step=step, after_s=after_s)
                if dice.random() < 0.5:
                    plan = plan.kill(member=one, step=step, after_s=after_s)
            case "two":
                plan = plan.kill(member=one, step=step, after_s=after_s).kill(member=other, step=step, after_s=after_s)
            case "chase":
                later_s = round(after_s + dice.choice((0.1, 0.5, 2.0)) * dice.random(), 3)
                plan = plan.kill(member=one, step=step, after_s=after_s)
                plan = plan.kill(member=other, step=step, after_s=later_s)
            case "checkpoint":
                who = dice.choice((one, "first"))
                later_s = round(dice.uniform(0.0, 0.01), 4)
                plan = plan.kill(member=who, step=step, doing="checkpointing", after_s=later_s)
            case "short":
                for_s = round(dice.uniform(0.1, 0.8) * silence_s, 2)
                plan = plan.pause(member=one, step=step, for_s=for_s, after_s=after_s)
            case "long":
                for_s = round(dice.uniform(1.2, 3.5) * silence_s, 2)
                plan = plan.pause(member=one, step=step, for_s=for_s, after_s=after_s)
            case "asleep":
                for_s, schedulers = _asleep(dice, silence_s, schedulers)
                plan = plan.pause("scheduler", step=step, for_s=for_s, after_s=after_s)
            case "scale":
                plan = plan.scale(dice.randrange(least, members + 1), step=step, after_s=after_s)
            case _:
                plan = plan.kill(member=one, step=step, after_s=after_s)
        step += dice.randrange(gap // 2, gap + gap // 2)
    return plan


def served(
    seed: int,
    *,
    kills: int,
    shorts: int,
    longs: int,
    workers: int,
    first_step: int,
    gap: int,
    replaced: bool,
    silence_s: float,
) -> FaultPlan:
    """Kills and pauses of any worker; where they are not replaced, not of the first, which holds the run together.

    `shorts` and `longs`: pauses that are shorter, and longer, than the silence.
    """
    dice, plan, step = Random(seed), FaultPlan(), first_step
    victims = [dice.randrange(workers) for _ in range(kills)] if replaced else dice.sample(range(1, workers), kills)
    order = ["kill"] * kills + ["short"] * shorts + ["long"] * longs
    dice.shuffle(order)
    for kind in order:
        after_s = round(dice.uniform(0.0, 0.05), 3)
        if kind == "kill":
            plan = plan.kill(member=victims.pop(), step=step, after_s=after_s)
        else:
            least, most = (0.05, 0.8) if kind == "short" else (1.2, 3.5)
            for_s = round(dice.uniform(least, most) * silence_s, 2)
            plan = plan.pause(member=dice.randrange(workers), step=step, for_s=for_s, after_s=after_s)
        step += dice.randrange(gap // 2, gap + gap // 2)
    return plan


def abroad(seed: int, *, faults: int, hosts: int, first_step: int, gap: int, silence_s: float) -> FaultPlan:
    """Over hosts: the first has the launcher, the scheduler and one member, each other one an agent and two members."""
    dice, plan, step, schedulers, members = Random(seed), FaultPlan(), first_step, 0, 2 * hosts - 1
    for _ in range(faults):
        after_s = round(dice.uniform(0.0, 0.05), 3)
        member, host = dice.randrange(members), dice.randrange(1, hosts)
        short_s, long_s = round(dice.uniform(0.1, 0.8) * silence_s, 2), round(dice.uniform(1.2, 3.5) * silence_s, 2)
        match dice.choices(list(_ABROAD), list(_ABROAD.values()))[0]:
            case "scheduler" if schedulers < _SCHEDULERS:
                schedulers += 1
                plan = plan.kill("scheduler", step=step, after_s=after_s)
            case "asleep":
                for_s, schedulers = _asleep(dice, silence_s, schedulers)
                plan = plan.pause("scheduler", step=step, for_s=for_s, after_s=after_s)
            case "scale":
                plan = plan.scale(dice.randrange(1, members + 1), step=step, after_s=after_s)
            case "drain":
                grace_s = round(after_s + dice.choice((1.0, 4.0)) * dice.random() * silence_s, 2)
                plan = plan.kill(f"agent {host}", signal="TERM", step=step, after_s=after_s)
                plan = plan.kill(f"host {host}", step=step, after_s=grace_s)
            case "host":
                plan = plan.kill(f"host {host}", step=step, after_s=after_s)
            case "pause":
                plan = plan.pause(member=member, step=step, for_s=dice.choice((short_s, long_s)), after_s=after_s)
            case "parted":
                apart = dice.choice(([host], [0], list(range(1, hosts))))
                way = dice.choice(("both", "both", "out", "in"))
                plan = plan.partition(apart, for_s=dice.choice((short_s, long_s)), way=way, step=step, after_s=after_s)
            case "slow":
                plan = plan.slow(dice.randrange(hosts), dice.choice(("1mbit", "10mbit")), for_s=long_s, step=step)
            case "reset":
                plan = plan.reset(dice.randrange(hosts), step=step, after_s=after_s)
            case "corrupt":
                plan = plan.corrupt(f"host {dice.randrange(hosts)}", after_bytes=dice.randrange(20_000), step=step)
            case "disk":
                plan = plan.fill_disk(for_s=long_s, step=step, after_s=after_s)
            case "clock":
                by_s = dice.choice((-86400.0, -5.0, 5.0, 86400.0))
                plan = plan.jump_clock(by_s, member=member, step=step, after_s=after_s)
            case _:
                plan = plan.kill(member=member, step=step, after_s=after_s)
        step += dice.randrange(gap // 2, gap + gap // 2)
    return plan


def _asleep(dice: Random, silence_s: float, schedulers: int) -> tuple[float, int]:
    """For how long the scheduler sleeps, and how many are lost by then: one that sleeps for too long is replaced."""
    long = schedulers < _SCHEDULERS and dice.random() < 0.5
    least, most = (1.2, 3.5) if long else (0.1, 0.8)
    return round(dice.uniform(least, most) * silence_s, 2), schedulers + long


def last_step(plan: FaultPlan) -> int:
    return max((fault.step or 0 for fault in plan.faults), default=0)
