"""The journal: what was saved is there after a kill, whole, and for one scheduler at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.membership.journal import Journal

PARTS = st.dictionaries(st.sampled_from("abc"), st.text(max_size=50), max_size=3)


@settings(max_examples=6, deadline=None)
@given(saves=st.lists(PARTS, max_size=3))
def test_what_was_saved_is_there(saves, tmp_path_factory):
    path = tmp_path_factory.mktemp("j") / "journal.sqlite"
    expected = {}
    for parts in saves:
        with contextlib.closing(Journal(path)) as journal:
            assert journal.load() == expected
            journal.save(parts)
            expected |= parts
    with contextlib.closing(Journal(path)) as journal:
        assert journal.load() == expected


def test_a_killed_writer_leaves_whole_transactions(tmp_path):
    path = tmp_path / "journal.sqlite"
    program = (
        "import sys\nfrom paceline.membership.journal import Journal\njournal = Journal(sys.argv[1])\n"
        "number = int(journal.load().get('a', 0))\n"
        "while True:\n    number += 1\n    journal.save({'a': str(number), 'b': str(number)})\n"
        "    print(number, flush=True)\n"
    )
    last = 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(20):
            said = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        said = max([said, *(int(line) for line in writer.stdout if line.endswith("\n"))])
        writer.wait()
        writer.stdout.close()
        with contextlib.closing(Journal(path)) as journal:
            kept = journal.load()
        assert kept["a"] == kept["b"]
        assert int(kept["a"]) >= said > last
        last = said


def test_a_journal_belongs_to_one(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.membership.journal._BUSY_S", 0.1)
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(Journal(path)) as journal:
        journal.save({"a": "1"})
        with pytest.raises(ConfigError, match="another scheduler uses it"):
            Journal(path)


def test_what_is_no_journal_is_refused(tmp_path):
    (tmp_path / "text").write_text("this is not a database, and long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match="cannot use journal="):
        Journal(tmp_path / "text")
    with pytest.raises(ConfigError, match="check that its folder exists"):
        Journal(tmp_path / "no" / "folder")


def test_a_full_disk_is_said_and_the_next_save_has_all(tmp_path):
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(Journal(path)) as journal:
        journal.save({"a": "1"})
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(sqlite3.Error, match="full"):
            journal.save({"a": "2", "b": "x" * 100_000})
        journal._db.execute("PRAGMA max_page_count=100000")
        journal.save({"a": "2", "b": "x"})
    with contextlib.closing(Journal(path)) as journal:
        assert journal.load() == {"a": "2", "b": "x"}
