"""A prompt with an image: what comes before it is restored, what follows is computed as in stock,
and never stored.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from pathlib import Path

from tests.engine.harness import BLOCK_TOKENS, Server, Sidecar, assert_same, text

MODEL = "vision"
WIDTH, HEIGHT = 112, 56  # pixels: 2 rows of 4 inputs


def picture(seed: object) -> str:
    """A PNG of noise, as the API takes it."""
    rng = random.Random(repr(seed))
    rows = b"".join(b"\0" + rng.randbytes(3 * WIDTH) for _ in range(HEIGHT))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def test_text_before_an_image_is_restored_and_the_image_is_computed(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    before, after = text(300, "before"), text(60, "after")
    prompt, other = before + "[img-0]" + after, before + text(60, "else")
    pictures = [[picture(number)] for number in range(2)]
    with Server(binary, tmp_path / "reference", models) as reference:
        expected = []
        for images in pictures:
            reference.generate(MODEL, other)
            expected.append(reference.generate(MODEL, prompt, images=images))
            assert expected[-1].resumed == len(before)
    assert expected[0].logprobs != expected[1].logprobs, "the picture makes no difference"

    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        server.generate(MODEL, other)
        sidecar.settle(server, MODEL)
        for images, reference_answer in zip(pictures * 2, expected * 2, strict=True):
            server.unload(MODEL)
            restores = len(server.restores())
            assert_same(server.generate(MODEL, prompt, images=images), reference_answer)
            (restore,) = server.restores()[restores:]
            assert restore.first == 0
            assert restore.tokens == len(before)
            sidecar.settle(server, MODEL)


def test_nothing_that_follows_an_image_is_stored(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """Its tokens are the same whatever it shows: a text that has them must not find its rows."""
    before, after = text(20, "few"), text(400, "many")
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        server.generate(MODEL, before + "[img-0]" + after, images=[picture(7)])
        sidecar.settle(server, MODEL)
        assert sidecar.stat().put_blocks == 0  # 20 tokens are too few
        server.generate(MODEL, before + after)
        sidecar.settle(server, MODEL)
        assert sidecar.stat().put_blocks >= len(after) // BLOCK_TOKENS
