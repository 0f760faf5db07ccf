"""Lines out of whatever a process prints."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.membership.lines import Lines, clean


def whole(*chunks, hold_s=0.0):
    lines = Lines(hold_s=hold_s)
    return [line for chunk in chunks for line in lines.feed(chunk, now=0.0)] + lines.end()


def test_partial_lines_are_joined():
    assert whole(b"on", b"e\ntw", b"o", b"\n\nthree") == ["one", "two", "", "three"]


def test_carriage_return_and_newline_may_be_cut_apart():
    assert whole(b"one\r", b"\ntwo\r\n") == ["one", "two"]


def test_bytes_that_are_not_text():
    assert whole(b"a\xff\xfeb\x00\x07\n") == ["a��b"]


def test_a_character_may_be_cut_apart():
    assert whole("naï".encode()[:-1], "naï".encode()[-1:] + b"ve\n") == ["naïve"]


def test_a_very_long_line_is_cut():
    lines = whole(*[b"x" * 50_000] * 4, b"\n")
    assert "".join(lines) == "x" * 200_000
    assert max(map(len, lines)) == 1 << 16


def test_an_unfinished_line_is_shown_after_a_silence_and_once():
    lines = Lines()
    assert lines.feed(b"loading", now=0) == []
    assert lines.settle(now=0.9) == []
    assert lines.settle(now=1.1) == ["loading"]
    assert lines.settle(now=9) == []
    assert lines.feed(b"\nnext\n", now=10) == ["next"]


def test_a_progress_bar_is_shown_once_a_second_and_at_its_end():
    lines = Lines()
    shown = []
    for i in range(100):
        shown += lines.feed(f"\r{i}%".encode(), now=i / 20)  # five seconds
    shown += lines.feed(b"\r100%\n", now=5)
    assert shown[-1] == "100%"
    assert 5 <= len(shown) <= 7


def test_a_display_that_is_drawn_again_is_taken_back():
    frame = b"\r\x1b[2K\x1b[1A\x1b[2Kepoch %d\nloss %d"
    above = b"\r\x1b[2K\x1b[1A\x1b[2Kprinted\nepoch 2\nloss 2\n"
    out = whole(b"hello\nepoch 0\nloss 0", frame % (1, 1), above, hold_s=1)
    assert out == ["hello", "printed", "epoch 2", "loss 2"]


def test_held_lines_count_after_a_while():
    lines = Lines(hold_s=1.0)
    assert lines.feed(b"one\n", now=0) == []
    assert lines.settle(now=0.5) == []
    assert lines.settle(now=1.5) == ["one"]


def test_nothing_moves_the_cursor_or_rings_the_bell():
    assert clean("\x1b]0;title\x07\x1b[2J\x1b[10;10Hx\x1b[31mred\x1b[0m\x1b(\x08") == "x\x1b[31mred\x1b[0m("
    assert clean("\x1b[1;31mred\x1b[m", colours=False) == "red"


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_where_the_chunks_are_cut_does_not_matter(data, cuts):
    cuts = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    chunks = [data[a:b] for a, b in itertools.pairwise(cuts)]
    assert whole(*chunks) == whole(data)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), max_size=20))
def test_plain_text_passes_unchanged(texts):
    assert whole("".join(t + "\n" for t in texts).encode()) == texts
