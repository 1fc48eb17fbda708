"""Names that a directory may have, and that mean something to somebody on the way."""

from __future__ import annotations

from typing import Final

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
}
