"""`paceline doctor --hosts a,b`: what each host has, and how fast each reaches each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.launch import listed, preflight
from paceline.launch.preflight import Preflight, Report
from paceline.launch.secure_shell import SecureShell
from paceline.transport.wires import own_address


def look(hosts: str, way: SecureShell, interface: str = "", port: int = 0) -> Report:
    """All that can be found out; what is wrong is in it too."""
    found = listed.some(hosts)
    with Preflight(way, list(found)) as flight:
        flight.meet(str(Path.cwd()))
        if flight.report.facts:
            listen = preflight.interface_address(interface) if interface else _towards(way, list(flight.report.facts))
            flight.routes(listen)
            flight.measure(listen, port)
    slots = {name: room.slots for name, room in found.items()}
    flight.report.odd += preflight.crowded(flight.report.facts, slots)
    return flight.report


def _towards(way: SecureShell, hosts: Sequence[str]) -> str:
    return preflight.towards(map(way.target, hosts), own_address)


def lines(report: Report) -> list[str]:
    """For people."""
    rows = [("host", "Python", "torch", "Paceline", "cores", "GPUs", "address", "interface", "this folder")]
    for host, f in report.facts.items():
        folder = "shared" if f.shared else "another one" if f.cwd else "missing"
        network = (report.address.get(host, "-"), report.interface.get(host) or "-")
        rows.append((host, f.python, f.torch or "-", f.paceline or "-", str(f.cores), str(f.gpus), *network, folder))
    out = _columns(rows) if report.facts else []
    if report.links:
        names = list(report.address)
        head = ("Mbit/s, round trip in ms", *(f"to {name}" for name in names))
        out += ["", *_columns([head, *((f"from {a}", *(_cell(report, a, b) for b in names)) for a in names)])]
    wrong = [*report.unreached.values(), *report.wrong]
    out += [""] + [f"error    {line}" for line in wrong] + [f"warning  {line}" for line in report.odd]
    out.append("something above would stop a run" if wrong else "a run can start on these hosts")
    return out


def as_json(report: Report) -> dict[str, Any]:
    links = [
        {"from": a, "to": b, "bytes_per_s": link.bytes_per_s, "rtt_s": link.rtt_s}
        for (a, b), link in report.links.items()
    ]
    hosts = {
        host: {**vars(facts), "address": report.address.get(host), "interface": report.interface.get(host)}
        for host, facts in report.facts.items()
    }
    errors = [*report.unreached.values(), *report.wrong]
    return {"ok": not errors, "hosts": hosts, "links": links, "errors": errors, "warnings": report.odd}


def way_of(ssh: str | None, python: str | None, env: Mapping[str, str]) -> SecureShell:
    if ssh is not None and not ssh.strip():
        raise ConfigError("--ssh '': say what is called, as in 'ssh -F FILE'")
    return SecureShell(ssh=ssh or "ssh", python=python or "", cwd=str(Path.cwd()), env=env)


def _cell(report: Report, a: str, b: str) -> str:
    if link := report.links.get((a, b)):
        return f"{link.bytes_per_s * 8 / 1e6:.0f}, {link.rtt_s * 1e3:.2g}"
    return "-"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
