"""Copy the working directory to another host, into the same folder: by rsync where both have it, else as one archive.

In a git repository that is what git knows or would add, else all but what is made again by itself. Nothing is deleted
there, and run directories stay where they are.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.launch import listed

_NOT = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_LIMIT_S = 600.0
_MOST_BYTES = 1 << 30


def files(cwd: Path, root: Path) -> list[str]:
    """What is copied, relative to the working directory; not what lies in `root`, where runs are.

    Raises ConfigError where it is more than one would copy by mistake.
    """
    found = [name for name in _listed(cwd) if not (cwd / name).absolute().is_relative_to(root.absolute())]
    size = sum(os.lstat(cwd / name).st_size for name in found)
    if size > _MOST_BYTES:
        raise ConfigError(
            f"--sync: {cwd} holds {size / 1e9:.1f} GB in {len(found)} files: start from the folder of your code, name "
            "data in .gitignore, or copy it once by yourself"
        )
    return found


def send(
    ssh: Sequence[str], host: str, cwd: Path, names: Sequence[str], *, rsync: bool, to: Path | None = None
) -> None:
    """Copy these files to a host, into the same folder or into `to`; ConfigError says why not."""
    to = to or cwd
    folder = shlex.quote(str(to))
    made = _run([*ssh, host, f"mkdir -p {folder}"], b"")
    if not made and rsync and shutil.which("rsync"):
        given = b"\0".join(os.fsencode(name) for name in names)
        command = ["rsync", "-a", "--from0", "--files-from=-", "--protect-args", "-e", shlex.join(ssh)]
        said = _run([*command, f"{cwd}/", f"{listed.bracketed(host)}:{to}/"], given)
    else:
        said = made or _archive([*ssh, host, f"tar -xzf - -C {folder}"], cwd, names)
    if said:
        raise ConfigError(f"host {host}: {cwd} cannot be copied there: {said}; check that you may write there")


def _listed(cwd: Path) -> list[str]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "-C", str(cwd), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, capture_output=True, timeout=60.0)
        if done.returncode == 0:
            names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
            return [name for name in names if os.path.lexists(cwd / name)]
    found = []
    for folder, folders, inside in os.walk(cwd):
        folders[:] = [name for name in folders if name not in _NOT]
        found += [os.path.relpath(os.path.join(folder, name), cwd) for name in inside]
    return found


def _archive(command: Sequence[str], cwd: Path, names: Sequence[str]) -> str:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stdin: Any = process.stdin
    with contextlib.suppress(OSError), stdin:  # it has ended, and says why
        with tarfile.open(fileobj=stdin, mode="w|gz") as archive:
            for name in names:
                archive.add(cwd / name, arcname=name, recursive=False)
    return _ended(process)


def _run(command: Sequence[str], given: bytes) -> str:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stdin
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(given)
    return _ended(process)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """What went wrong, in a line; "": nothing did."""
    assert process.stderr
    with process.stderr:
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    code = process.wait(_LIMIT_S)
    return (said or [f"exit code {code}"])[-1] if code else ""
