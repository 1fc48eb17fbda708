"""What a prompt's batches copy of paged K/V to their device, on a GPU that is not there
(tests/attention/fakegpu): what the conversation has by then, once for each batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import devices
from tests.engine.harness import Server, text

PROMPT = 4096
TOKEN_BYTES = 8 << 10  # of the model, over its 8 layers
PADDING = 256  # cells: attention reads whole ones of so many


@pytest.mark.parametrize(("num_batch", "cells"), [(512, 18432), (2048, 6144)])
@pytest.mark.parametrize("hot", [0, 4, 8])
@pytest.mark.timeout(300)
def test_a_prompt_copies_its_paged_rows_once_for_each_batch(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    num_batch: int,
    cells: int,
    hot: int,
) -> None:
    assert cells == sum(range(num_batch, PROMPT + 1, num_batch))
    log = tmp_path / "devices.log"
    env = paged.hot(hot) | devices(2048, LOG=str(log))
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        options = {"num_ctx": 2 * PROMPT, "num_batch": num_batch, "predict": 1}
        assert server.generate(eight, text(PROMPT, "batches"), **options).tokens
    paged_bytes = TOKEN_BYTES * (8 - hot) // 8
    ahead = (
        PROMPT + PADDING
    )  # cells of the batch that was built for a second token, if it was computed
    assert paged.staged_bytes(log) in {paged_bytes * cells, paged_bytes * (cells + ahead)}
