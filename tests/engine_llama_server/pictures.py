"""Prompts with images for a llama-server: text and pictures, and models that take them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.models.pictures import AXES, BOTH_WAYS, PLAIN, make_image, rows_of
from ollama_tiering.models.projector import make_projector
from ollama_tiering.models.shapes import make_shape
from tests.engine_llama_server.server import Answer, LlamaServer, answer, request

WIDTH_PX, HEIGHT_PX = 280, 196


@dataclass(frozen=True)
class Picture:
    """Two of one size differ in their pixels only."""

    seed: int
    width_px: int = WIDTH_PX
    height_px: int = HEIGHT_PX

    def data(self) -> bytes:
        return make_image(self.seed, self.width_px, self.height_px)


Part = str | Picture
KINDS: Final = {  # model, encoder, options
    "one position": ("llama-tiny", PLAIN),
    "several axes": ("qwen2vl-tiny", AXES),
    "windows, rows that see one another": ("gemma3-tiny", BOTH_WAYS),
    "states, several axes": ("qwen35-plain", AXES),
}


def projector_for(kind: str, folder: Path, seed: int = 1) -> Path:
    shape, encoder = KINDS[kind]
    path = folder / f"{shape}-{seed}.mmproj"
    if not path.exists():
        make_projector(path, encoder, make_shape(shape.replace("-plain", "-tiny")).embd, seed)
    return path


def rows_in(kind: str, picture: Picture) -> int:
    return rows_of(KINDS[kind][1], picture.width_px, picture.height_px)


def ask(server: LlamaServer, parts: Sequence[Part], count: int = 8, **options: object) -> Answer:
    marker = server.media_marker()
    pictures = [part.data() for part in parts if isinstance(part, Picture)]
    words = "".join(part if isinstance(part, str) else marker for part in parts)
    prompt: object = words
    if pictures:
        encoded = [base64.b64encode(data).decode() for data in pictures]
        prompt = {"prompt_string": words, "multimodal_data": encoded}
    return answer(server.post_completion({**request([], count, **options), "prompt": prompt}))
