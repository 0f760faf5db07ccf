"""What guests bring: how it is weighed, what is refused, and that it is in one round only."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import Context
from paceline.core.errors import ConfigError
from paceline.server.outside import calls as c
from paceline.server.outside import offers as offers_module
from paceline.server.outside.offers import Mass, Offers
from paceline.server.outside.shelf import Shelf

NUMELS = [5, 300]
MEMBER = 32.0  # samples of a mean member


def offers(round: int = 3, *, tokens: bool = False, squares: float = 1.0) -> Offers:
    """Of a run that is in this round."""
    made = Offers(NUMELS, most=2, oldest=2, tokens=tokens)
    made.settle(round, merged=True, member=MEMBER, squares=squares)
    return made


def payload(value: float, codec: str = "none") -> tuple[list[int], torch.Tensor]:
    code = c.make_code(codec)
    data, sizes = torch.empty(sum(map(code.nbytes, NUMELS)), dtype=torch.uint8), []
    for numel in NUMELS:
        sizes.append(code.encode_into(torch.full((numel,), value), None, data[sum(sizes) :], Context()))
    return sizes, data[: sum(sizes)]


def bring(
    made: Offers, value: float = 0.01, guest: str = "a", codec: str = "none", size: int = 0, **said: float
) -> c.Thanks:
    sizes, data = payload(value, codec)
    asked = {"number": 1, "round": 3, "samples": MEMBER, "tokens": 0.0, **said}
    return made.bring(guest, c.Bring(**asked, codec=codec, sizes=sizes), data)  # type: ignore[arg-type]


def mean(made: Offers) -> torch.Tensor:
    view = torch.zeros(NUMELS[0])
    made.add_to(0, view, 1.0)
    return view


@pytest.mark.parametrize(
    ("said", "weight"),
    [
        ({}, 32.0),
        ({"samples": 8.0}, 8.0),
        ({"samples": 1e6}, 32.0),  # never more than a member
        ({"round": 2}, 16.0),
        ({"round": 1}, 32.0 / 3),
        ({"round": 1, "samples": 1e6}, 32.0),  # of so many, a third is a member's too
    ],
)
def test_a_difference_weighs_its_samples_less_for_its_age_and_no_more_than_a_member(
    said: dict[str, float], weight: float
) -> None:
    made = offers()
    assert bring(made, **said).taken
    assert made.close(1.0) == Mass(pytest.approx(weight), 1.0)


def test_differences_are_averaged_by_their_weights() -> None:
    made = offers()
    bring(made, 0.01, "a", samples=30.0)
    bring(made, 0.05, "b", samples=10.0)
    assert made.close(1.0) == Mass(40.0, 2.0)
    assert torch.allclose(mean(made), torch.full((5,), 0.02))


def test_a_round_takes_what_so_many_guests_bring() -> None:
    made = offers()
    assert all(bring(made, guest=guest).taken for guest in "ab")
    third = bring(made, guest="c")
    assert (third.taken, third.stale) == (False, False)
    assert not made.asked(c.Call(guest="c", model="", round=3)).takes


def test_tokens_weigh_where_members_count_them() -> None:
    made = offers(tokens=True)
    assert bring(made, tokens=0.0).stale
    assert bring(made, tokens=5.0).taken
    assert made.close(1.0).weight == 5.0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"round": 0}, "3 rounds old"),
        ({"round": 4}, "resumed"),
        ({"value": 10.0}, "times as long"),
        ({"samples": 0.0}, "samples"),
        ({"samples": float("nan")}, "samples"),
        ({"samples": float("inf")}, "samples"),
        ({"number": 0}, "number"),
    ],
)
def test_what_is_refused_for_good(said: dict[str, float], why: str) -> None:
    made = offers()
    thanks = bring(made, **said)  # type: ignore[arg-type]
    assert thanks.stale
    assert not thanks.taken
    assert why in thanks.why
    assert made.close(1.0) == Mass()
    assert sum(made.story.refused.values()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    made = offers()
    data = torch.full((sum(NUMELS),), 0.01)
    data[7] = value
    said = c.Bring(number=1, round=3, samples=1.0, tokens=0.0, codec="none", sizes=[4 * n for n in NUMELS])
    assert made.bring("a", said, data.view(torch.uint8)).stale
    assert made.close(1.0) == Mass()


@pytest.mark.parametrize("sizes", [[], [20], [20, 1200, 0], [-1, 1221], [20, 1 << 40]])
def test_sizes_that_do_not_fit_are_refused_before_memory_is_taken(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        offers_module.check_sizes(sizes, NUMELS, c.make_code("none"))


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=0, max_size=200),
    codec=st.sampled_from(["none", "topk(0.1, values=2bit)", "quantize(8)", "sign", "cast(bf16)", "threshold(0.1)"]),
)
def test_any_bytes_are_refused_or_finite(data: bytes, codec: str) -> None:
    made = offers()
    code = c.make_code(codec)
    sizes = [min(len(data) // 2, code.nbytes(NUMELS[0])), min(len(data) // 2, code.nbytes(NUMELS[1]))]
    flat = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[: sum(sizes)]
    said = c.Bring(number=1, round=3, samples=1.0, tokens=0.0, codec=codec, sizes=sizes)
    thanks = made.bring("a", said, flat)
    assert thanks.taken != thanks.stale
    assert bool(torch.isfinite(mean(made)).all())
    assert (made.close(1.0) == Mass()) == thanks.stale


def test_one_difference_of_a_guest_is_in_a_round_and_each_is_counted_once() -> None:
    made = offers()
    assert bring(made, number=1).taken
    assert bring(made, number=1).taken  # said again, since the first answer was lost
    assert made.close(1.0) == Mass(MEMBER, 1.0)
    made.settle(3, merged=False)  # no round was held
    second = bring(made, number=2)
    assert (second.taken, second.stale) == (False, False)
    made.close(1.0)
    made.settle(4, merged=True, member=MEMBER, squares=1.0)
    assert made.asked(c.Call(guest="a", model="", round=3)).taken == 1
    assert bring(made, number=1).taken  # it was in the round before
    assert made.waiting == 0
    assert bring(made, number=2, round=4).taken
    assert made.story.samples == MEMBER
    assert made.story.rounds == 1


def test_a_resumed_run_knows_what_was_in_its_rounds_and_nothing_else() -> None:
    made = offers()
    bring(made, guest="a")
    made.close(1.0)
    made.settle(4, merged=True, member=MEMBER, squares=1.0)
    bring(made, guest="b", round=4)
    again = offers(4)
    again.load(made.state())
    assert again.asked(c.Call(guest="a", model="", round=4)).taken == 1
    assert again.asked(c.Call(guest="b", model="", round=4)).taken == 0
    assert again.story == made.story


def test_before_the_first_round_the_sum_is_compared_with_the_first_members_own() -> None:
    for value, kept in ((0.01, 2.0), (1.0, 0.0)):
        made = Offers(NUMELS, most=2, oldest=2, tokens=False)
        made.settle(0, merged=False)
        assert bring(made, value, "a", round=0).taken
        assert bring(made, value, "b", round=0).taken
        assert made.close(squares=0.01).guests == kept
        assert made.story.refused == ({} if kept else {"too long": 2})


def test_while_a_round_is_held_the_sum_stays_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = offers()
    bring(made, guest="a")
    told = made.close(1.0)
    thanks: list[c.Thanks] = []
    thread = threading.Thread(target=lambda: thanks.append(bring(made, guest="b")))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert told == Mass(MEMBER, 1.0)
    made.settle(4, merged=True, member=MEMBER, squares=1.0)
    thread.join(10)
    assert thanks[0].taken
    assert made.close(1.0) == Mass(MEMBER / 2, 1.0)  # of round 3, for round 5
    monkeypatch.setattr(offers_module, "_ROUND_S", 0.05)
    late = bring(made, guest="d", round=4)
    assert (late.taken, late.stale) == (False, False)


def test_guests_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_module, "_KNOWN", 2)
    made = offers()
    for guest in "abc":
        bring(made, guest=guest)
        made.close(1.0)
        made.settle(3, merged=True, member=MEMBER, squares=1.0)
    assert list(made.state()["merged"]) == ["b", "c"]


# ---- weights


def test_weights_are_encoded_once_and_only_when_somebody_asks() -> None:
    calls: list[int] = []
    weights = [torch.arange(300.0)]

    def now() -> list[torch.Tensor]:
        calls.append(1)
        return weights

    shelf = Shelf(now)
    shelf.look(0)
    assert not calls
    assert shelf.fetch("none", 0, 0.0, 0.05) is None  # it has these
    assert shelf.fetch("none", -1, 0.0, 0.05) is None  # the training thread is busy
    shelf.look(0)
    first, second = (shelf.fetch("none", -1, 0.0, 0.05) for _ in range(2))
    assert first is second
    assert len(calls) == 1
    assert first is not None
    values = torch.zeros(300)
    c.make_code("none").decode_add(first.data, values)
    assert torch.equal(values, weights[0])


def test_at_most_two_rounds_are_kept_however_many_read() -> None:
    shelf = Shelf(lambda: [torch.zeros(100)])
    held = []
    for round in range(5):
        shelf.look(round)
        shelf.fetch("none", -1, 0.0, 0.01)
        shelf.look(round)
        held.append(shelf.fetch("none", -1, 0.0, 0.01))
    assert [wrapped.round for wrapped in held if wrapped] == [0, 1, 1, 1, 1]  # both are being read
    held[:2] = []
    del held[:]
    shelf.fetch("none", -1, 0.0, 0.01)
    shelf.look(5)
    newest = shelf.fetch("none", -1, 0.0, 0.01)
    assert newest is not None
    assert newest.round == 5


@pytest.mark.parametrize("words", ["topk(0.1)", "quantize(4)", "quantize(8, shared=True)", "dgc", "sign", "cast(fp16)"])
def test_codes_that_do_not_say_all_weights_are_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        c.make_weights_code(words)
