"""Images in a list of tokens, in C++ (llama_server/src/kvt_images): where a prompt may go on, where
its rows are, and what the sidecar is told of them.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.integration.engine_program import SANITIZERS, compiled


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_pictures", SANITIZERS[0], tmp_path_factory.mktemp("kvt"))


def listed(program: Path, *parts: str) -> tuple[list[list[int]], dict[str, list[str]]]:
    """Of each number of rows the three numbers; and the words of the lines behind them."""
    done = subprocess.run([program, "list", *parts], capture_output=True, text=True, check=True)
    rows: list[list[int]] = []
    words: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        head, _, rest = line.partition(": ")
        if head.isdigit():
            rows.append([int(word) for word in rest.split()])
        else:
            name = "up to" if line.startswith("up to") else line.split()[0]
            words.setdefault(name, []).append(line.removeprefix(name).strip())
    return rows, words


@pytest.mark.parametrize("count", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 100_003])
def test_sha256_is_that_of_others(program: Path, count: int) -> None:
    data = bytes(number * 7 % 251 for number in range(count))
    done = subprocess.run([program, "sha256"], input=data, capture_output=True, check=True)
    assert done.stdout.decode().strip() == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "parts",
    [("30", "100x100", "20", "70x10", "90"), ("100x10", "100x10", "5"), ("64", "64x8", "1")],
)
def test_nobody_goes_on_within_an_image(program: Path, parts: tuple[str, ...]) -> None:
    ends = [0]
    for part in parts:
        rows = int(part.partition("x")[0])
        ends += [ends[-1] + rows] if "x" in part else range(ends[-1] + 1, ends[-1] + rows + 1)
    rows, _ = listed(program, *parts)
    assert len(rows) == ends[-1] + 1
    for count, (goes_on, asked, _) in enumerate(rows):
        assert goes_on == max(end for end in ends if end <= count)
        assert asked in ends
        assert asked <= goes_on
        assert asked // 64 * 64 in ends  # what comes begins there
        better = [end for end in ends if asked < end <= count and end // 64 * 64 in ends]
        assert not better or asked == goes_on or all(end > goes_on for end in better)


def test_positions_are_those_of_llama_server(program: Path) -> None:
    rows, words = listed(program, "2", "6x3", "2")
    assert [position for _, _, position in rows] == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7]
    places = "0,0,0 1,1,1 2,2,2 2,2,3 2,2,4 2,3,2 2,3,3 2,3,4 5,5,5 6,6,6"
    assert words["places"] == [places]
    # size_up_to_pos: the first number of tokens whose next position is no less
    assert words["up to"] == ["1 1 2 8 8 8 9 10"]


def test_the_sidecar_is_told_a_digest_where_an_image_begins(program: Path) -> None:
    _, words = listed(program, "1", "3x3", "1", "2x1")
    assert words["stored"] == ["5 -1 -1 -1 5 -1 -1"]
    wanted = [hashlib.sha256(name).hexdigest() for name in (b"3 3 1", b"2 1 2")]
    assert words["extra"] == [f"at 1 {wanted[0]}", f"at 5 {wanted[1]}"]
