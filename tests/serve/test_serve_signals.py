"""Signals are heard before the loop, told to it, and end nobody after it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from paceline.serve.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_before_within_and_after_the_loop(number: signal.Signals) -> None:
    told: list[int] = []

    async def go(signals: Signals) -> None:
        signals.to(lambda: told.append(1))
        assert len(told) == 1  # that of before
        os.kill(os.getpid(), number)
        async with asyncio.timeout(30):
            while len(told) < 2:
                await asyncio.sleep(0.01)

    before = signal.getsignal(number)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        asyncio.run(go(signals))
        os.kill(os.getpid(), number)  # while what is left is put away
    assert len(told) == 2
    assert signal.getsignal(number) is before
