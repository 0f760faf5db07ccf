"""Who is here: the rendezvous where members meet, and the agent that starts and watches those of one host."""

from __future__ import annotations

from paceline.membership.kept import settle
from paceline.membership.meeting import Meeting, meet
from paceline.membership.rendezvous import Rendezvous

__all__ = ["Meeting", "Rendezvous", "meet", "settle"]
