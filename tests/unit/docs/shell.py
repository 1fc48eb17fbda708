"""Commands in a line of shell: enough of it for what documentation writes."""

from __future__ import annotations

import re
import shlex

_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_ENDS = {"|", "||", "&", "&&", ";", "(", ")"}
_WRAPPERS = {"sudo", "time", "nice", "exec", "env", "command"}


def commands(line: str) -> list[list[str]]:
    """The words of each command of a line: those in `$(…)` first, then what `|`, `&&`, `;` divide.

    Without comments, redirections, variables before a command, and `sudo` with the like.
    ValueError where quotes do not match.
    """
    found = [words for inner in _SUBSTITUTION.findall(line) for words in commands(inner)]
    lexer = shlex.shlex(
        _SUBSTITUTION.sub("SUBSTITUTED", line), posix=True, punctuation_chars="|&;()<>"
    )
    lexer.commenters = ""  # shlex would end a word at it, as in docs/page.md#anchor
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token.startswith("#"):
            break
        if token in _ENDS:
            found.append(words)
            words = []
        elif set(token) <= set("<>&"):
            next(tokens, None)  # where to
            if words and words[-1].isdigit():
                words.pop()  # 2>
        else:
            words.append(token)
    return [bare for words in [*found, words] if (bare := _bare(words))]


def _bare(words: list[str]) -> list[str]:
    """Without what may stand before the program."""
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS):
        words = words[1:]
    return words
