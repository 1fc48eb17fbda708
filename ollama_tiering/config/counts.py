"""Numbers of things as people read them. No I/O."""

from __future__ import annotations

_SEVERAL = {"is": "are", "was": "were", "has": "have"}


def count(number: int, noun: str, verb: str = "") -> str:
    """`1 block`, `3,000 blocks`; with a verb `1 block is`, `2 blocks are`. Of a noun with `to`
    behind it the words before that are counted: `2 calls to the sidecar`.
    """
    noun, to, behind = noun.partition(" to ")
    text = f"{number:,} {noun}{'' if number == 1 else 's'}{to}{behind}"
    return f"{text} {agreeing(number, verb)}" if verb else text


def agreeing(number: int, verb: str) -> str:
    """`is`, `was` or `has` of one, `are`, `were` or `have` of any other number."""
    return verb if number == 1 else _SEVERAL[verb]
