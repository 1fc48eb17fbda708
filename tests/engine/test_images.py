"""Prompts with images: what follows one comes back for the same bytes only, as from memory, and its
encoder does not run again. Its placeholders have the same tokens whatever it shows.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.harness import BLOCK_TOKENS, Result, assert_same, text
from tests.engine.test_restore import Rig, running

MODEL = "vision"
WIDTH, HEIGHT = 112, 56  # pixels: 2 rows of 4 inputs
PLACES = "\n\n\n\n\f\n\n\n\n\r"  # the tokens of such an image, as a text has them
BEFORE, BEHIND = 300, 100  # tokens around an image, more than a block each


def picture(seed: object, behind: bytes = b"") -> str:
    """A PNG of noise, as the API takes it, with bytes behind its end that no decoder looks at."""
    rng = random.Random(repr(seed))
    rows = b"".join(b"\0" + rng.randbytes(3 * WIDTH) for _ in range(HEIGHT))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts + behind).decode()


@pytest.fixture(scope="module")
def rig(binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(binary, models, tmp_path_factory.mktemp("rig"), {}) as found:
        yield found


def restart_everything(rig: Rig) -> None:
    rig.sidecar.settle(rig.server, MODEL)
    rig.server.unload(MODEL)
    rig.server.stop()
    rig.sidecar.restart()
    rig.server.start()


def both(rig: Rig, prompt: str, images: Sequence[str] = ()) -> tuple[Result, Result]:
    """The answers of the tested and of the reference server."""
    return (
        rig.server.generate(MODEL, prompt, images=images),
        rig.reference.generate(MODEL, prompt, images=images),
    )


def comes_back(rig: Rig, prompt: str, images: Sequence[str], reference: Result) -> Result:
    """The tested server answers as the reference, with all that memory had there restored here."""
    before = len(rig.server.restores())
    answer = rig.server.generate(MODEL, prompt, images=images)
    assert_same(answer, reference)
    (restore,) = rig.server.restores()[before:]
    assert (restore.first, restore.tokens) == (0, reference.resumed)
    assert answer.cached == reference.resumed
    return answer


def test_a_conversation_about_an_image_goes_on_behind_it(rig: Rig) -> None:
    images = [picture("conversation")]
    start = text(BEFORE, 1) + "[img-0]" + text(BEHIND, 2)
    behind = BEFORE + len(PLACES) + BEHIND
    answer, expected = both(rig, start + text(60, 3), images)
    assert_same(answer, expected)
    other = start + text(60, 4)
    expected = rig.reference.generate(MODEL, other, images=images)
    assert expected.resumed == behind
    restart_everything(rig)
    comes_back(rig, other, images, expected)
    further = other + expected.text + text(80, 5)
    expected = rig.reference.generate(MODEL, further, images=images)
    assert expected.resumed == behind + 60 + len(expected.text) - 1
    restart_everything(rig)
    comes_back(rig, further, images, expected)


def test_another_image_finds_what_comes_before_it(rig: Rig) -> None:
    """Also where all that differs is a byte behind the end of the picture."""
    prompt = text(BEFORE, "another") + "[img-0]" + text(BEHIND, "behind")
    images = [picture("one", b"\0"), picture("one", b"\1"), picture("two")]
    expected = [rig.reference.generate(MODEL, prompt, images=[image]) for image in images]
    assert [answer.resumed for answer in expected[1:]] == [BEFORE, BEFORE]
    assert expected[1].logprobs != expected[2].logprobs, "the picture makes no difference"
    assert_same(rig.server.generate(MODEL, prompt, images=images[:1]), expected[0])
    for image, reference in zip(images[1:], expected[1:], strict=True):
        restart_everything(rig)
        comes_back(rig, prompt, [image], reference)
    again = [rig.reference.generate(MODEL, prompt, images=images[2:]) for _ in range(2)][1]
    assert again.resumed == again.prompt_tokens - 1
    restart_everything(rig)
    comes_back(rig, prompt, images[2:], again)


@pytest.mark.parametrize("first", ["image", "text"])
def test_a_text_with_the_tokens_of_an_image_is_another_prompt(rig: Rig, first: str) -> None:
    start, end = text(BEFORE, (first, 1)), text(BEHIND, (first, 2))
    prompts = [(start + "[img-0]" + end, [picture(first)]), (start + PLACES + end, [])]
    if first == "text":
        prompts.reverse()
    assert_same(*both(rig, *prompts[0]))
    expected = rig.reference.generate(MODEL, prompts[1][0], images=prompts[1][1])
    assert expected.resumed == BEFORE
    assert expected.prompt_tokens == BEFORE + len(PLACES) + BEHIND
    restart_everything(rig)
    comes_back(rig, *prompts[1], expected)


def test_of_two_images_each_has_to_be_the_same(rig: Rig) -> None:
    one, two, three = (picture(number) for number in (1, 2, 3))
    prompt = (
        text(BEFORE, "two") + "[img-0]" + text(BEHIND, "both") + "[img-1]" + text(BEHIND, "end")
    )
    second = BEFORE + len(PLACES) + BEHIND
    whole = second + len(PLACES) + BEHIND
    assert_same(*both(rig, prompt, [one, two]))
    for images, resumed in ([one, two], whole - 1), ([one, three], second), ([two, one], BEFORE):
        expected = rig.reference.generate(MODEL, prompt, images=images)
        assert (expected.resumed, expected.prompt_tokens) == (resumed, whole)
        restart_everything(rig)
        comes_back(rig, prompt, images, expected)


@pytest.mark.parametrize("into", [0, 10])
def test_an_image_in_a_block_that_is_not_whole(rig: Rig, into: int) -> None:
    """It is found by who goes on after all of that block, not where the block begins with the
    image. Text is as in any other model.
    """
    start, images = text(5 * BLOCK_TOKENS + into, ("tail", into)), [picture(("tail", into))]
    short = start + "[img-0]" + text(20, "few")
    answer, expected = both(rig, short, images)
    assert_same(answer, expected)
    further, other = short + answer.text + text(BEHIND, "more"), start + text(60, "no image")
    if into:
        expected = rig.reference.generate(MODEL, further, images=images)
        assert expected.resumed == expected.prompt_tokens - BEHIND - 1
        without = rig.reference.generate(MODEL, other)
    else:
        without = rig.reference.generate(MODEL, other)
        expected = rig.reference.generate(MODEL, further, images=images)
        assert expected.resumed == len(start)
    assert without.resumed == len(start)
    restart_everything(rig)
    comes_back(rig, further, images, expected)
    restart_everything(rig)
    comes_back(rig, other, [], without)
