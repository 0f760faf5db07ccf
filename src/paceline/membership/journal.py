"""The scheduler's journal: what it must still know after it was killed, in an SQLite file of the run.

Named texts, of which `save` writes those that have changed, in one transaction. The file belongs to one scheduler at a
time. A killed process loses nothing; after a power cut the last changes may be missing (the file stays whole), which
the roster notices by the numbers of the views that members hold.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import ConfigError

_BUSY_S = 2.0  # for the one before to be gone


class Journal:
    """Named texts in a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in "1", "2":
    ...         with contextlib.closing(Journal(Path(folder) / "journal.sqlite")) as journal:
    ...             before = journal.load()
    ...             journal.save({"number": number})
    >>> before
    {'number': '1'}
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            # One thread at a time uses it: whoever holds the scheduler's lock.
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot open journal={str(path)!r}: {error}; check that its folder exists") from None
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # for the first save, which has the term
            self._db.execute("CREATE TABLE IF NOT EXISTS journal (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            self._kept: dict[str, str] = dict(self._db.execute("SELECT name, value FROM journal"))
        except sqlite3.Error as error:
            self._db.close()
            why = "another scheduler uses it" if "locked" in str(error) else str(error)
            raise ConfigError(f"cannot use journal={str(path)!r}: {why}") from None
        self._saved = False

    def load(self) -> dict[str, str]:
        """All that was saved."""
        return dict(self._kept)

    def save(self, parts: Mapping[str, str]) -> None:
        """Write what has changed; sqlite3.Error where that fails, and the next save writes it again."""
        changed = [(name, value) for name, value in parts.items() if self._kept.get(name) != value]
        if not changed:
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("INSERT OR REPLACE INTO journal VALUES (?, ?)", changed)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._kept.update(changed)
        if not self._saved:
            self._saved = True
            self._db.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        self._db.close()
