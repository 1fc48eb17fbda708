"""Names that a directory may have, and that mean something to somebody on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from ollama_tiering import cli

Said = tuple[int, bytes, bytes]
Tiering = Callable[..., Said]
WRONG: Final = (
    *("nothing", "a file", "below a file", "a file with a slash", "a link to itself"),
    *("a link to nothing", "a name that is too long", "a path that is too long", "above nothing"),
    *("no user", "no variable"),
)

NAMES: Final = {
    "spaces": " a  b ",
    "single quote": "it's",
    "double quotes": '"quoted"',
    "newline": "a\nb",
    "tab": "a\tb",
    "percent": "100%",
    "encoded": "a%20b%2Fc",
    "hash": "a#b",
    "question mark": "a?b=c&d",
    "brackets": "[a]",
    "star": "*",
    "backslash": "a\\b\\n",
    "semicolon": "a;b",
    "equals": "a=b",
    "comma and colon": "a,b:1",
    "dollar": "$HOME${x}",
    "braces": "{a}%s{0}",
    "not UTF-8": "\udcff\udcfe",
    "Latin-1": "caf\udce9",
    "emoji": "😀",
    "right to left": "\u202eabc\u05d0",
    "control": "\x1b[31m\x07",
    "leading dash": "-rf",
    "tilde": "~root",
    "long": "x" * 100,
    "scheme": "unix:",
    "dots": "..a",
    "as long as may be": "x" * 255,
}


def nothing_there(place: Path) -> dict[str, str]:
    """Paths at which neither a directory is nor one can be used. Makes what they lead to."""
    file, loop, lost = place / "file", place / "loop", place / "lost"
    file.write_bytes(b"\xff\x00 no text\n")
    loop.symlink_to(loop)
    lost.symlink_to(place / "nothing")
    return {
        "nothing": str(place / "nothing"),
        "a file": str(file),
        "below a file": str(file / "x"),
        "a file with a slash": f"{file}/",
        "a link to itself": str(loop),
        "a link to nothing": str(lost),
        "a name that is too long": str(place / ("x" * 256)),
        "a path that is too long": str(place) + "/x" * 2500,
        "above nothing": str(place / "nothing" / ".."),
        "no user": "~no-such-user/x",
        "no variable": "$NO_SUCH_VARIABLE/x",
    }


def run_command(capfdbinary: pytest.CaptureFixture[bytes], *args: str) -> Said:
    """Runs `tiering` in this process; exit code, stdout, stderr. Nothing it says is a bug."""
    capfdbinary.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    code, said = caught.value.code, capfdbinary.readouterr()
    assert isinstance(code, int)
    for text in said:
        assert b"Traceback" not in text
        assert b"this is a bug" not in text
    return code, said.out, said.err
