"""The door of the parent: with no descriptor left it waits, and says so once."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

import pytest

from paceline.cli.serve import _listen
from paceline.core.errors import ConfigError
from paceline.serve.door import Door, room


def test_two_servers_that_start_at_once_do_not_get_one_port() -> None:
    with (
        _listen("127.0.0.1", 0) as first,
        pytest.raises(ConfigError, match="Address already in use; choose others, 0: any port"),
    ):
        _listen("127.0.0.1", first.getsockname()[1])


def test_without_descriptors_it_rests_and_goes_on() -> None:
    """The loop is not kept busy meanwhile, and who has connected is taken in afterwards."""
    given: list[int] = []
    said: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def give(connection: socket.socket) -> bool:
        given.append(connection.fileno())
        return True

    async def go() -> None:
        door = Door(listener, give, b"", say=said.append)
        door.open()
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname()), socket.socket() as another:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                another.connect(listener.getsockname())
                await asyncio.sleep(1.2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert (given, len(said)) == ([], 1)
            async with asyncio.timeout(30):
                while len(given) < 2:
                    await asyncio.sleep(0.01)
        door.close()

    asyncio.run(go())
    assert "cannot be taken for now: Too many open files" in said[0]


def test_who_is_turned_away_hears_why_although_it_asks() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    async def go() -> bytes:
        door = Door(listener, lambda connection: False, b"full", say=print)
        door.open()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await asyncio.sleep(0.05)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.05)
        heard = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        door.close()
        return heard

    assert asyncio.run(go()) == b"full"


def test_room_is_what_the_raised_limit_leaves() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
        assert hard // 2 <= room() < hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
