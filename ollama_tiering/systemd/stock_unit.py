"""The `ollama.service` of a stock Ollama as systemd reads it: the file that counts, and its
drop-ins in their order. Only read.

Ours among the drop-ins, which puts the patched server in its place, is left out: what is read here
is what would be started without us.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.launch.service_unit import DROP_IN, UNIT_NAME

_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")  # in both cases

HEAD: Final = "# Written by `tiering systemd install --replace`"

# In the order in which they count.
_SYSTEM: Final = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",  # such as Podman's, of a .container file
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_USER: Final = (
    "/etc/systemd/user",
    "/run/systemd/user",
    "/usr/local/lib/systemd/user",
    "/usr/lib/systemd/user",
    "/lib/systemd/user",
)


@dataclass(frozen=True, slots=True)
class UnitSetting:
    """One line of a section [Service]."""

    file: Path
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class StockUnit:
    """Paths are those of the machine that it is of."""

    file: Path
    drop_ins: tuple[Path, ...]
    settings: tuple[UnitSetting, ...]  # those that count later come later
    environment: dict[str, str]

    def value(self, key: str) -> str:
        """Returns the value of a setting that has one; empty if it is not set."""
        return next(
            (setting.value for setting in reversed(self.settings) if setting.key == key), ""
        )

    def is_on(self, key: str) -> bool:
        return self.value(key).lower() in ("1", "yes", "true", "on", "y", "t")

    def values(self, key: str) -> list[UnitSetting]:
        """Lists those of one that may come often; an empty one takes back those before it."""
        return _since_the_empty_one([setting for setting in self.settings if setting.key == key])

    @property
    def proxies(self) -> dict[str, str]:
        """Its variables that name a proxy; without those of a file, which may be secret."""
        words = [word for one in self.values("Environment") for word in _words(one.value)]
        found = dict(word.partition("=")[::2] for word in words)
        return {name: value for name, value in found.items() if name.lower() in _PROXIES}

    @property
    def program(self) -> Path | None:
        """The `ollama` that it starts; None if its command is another than `…/ollama serve`."""
        commands = self.values("ExecStart")
        words = _words(commands[0].value) if len(commands) == 1 else []
        plain = len(words) == 2 and words[0].startswith("/") and words[1] == "serve"
        return Path(words[0]) if plain else None


def read(root: Path | None, own: Path, *, user_mode: bool) -> StockUnit | None:
    """Returns None if there is none. `root`: that directory is treated as `/`; `own`: where this
    user puts units.
    """
    places = _places(own, user_mode=user_mode)
    file = next((p / UNIT_NAME for p in places if os.path.lexists(_at(root, p / UNIT_NAME))), None)
    if file is None:
        return None
    drop_ins = tuple(path for path in _drop_ins(root, places) if path != own / DROP_IN)
    settings: list[UnitSetting] = []
    for path in (file, *drop_ins):
        settings += _settings(path, _text(_at(root, path)))
    return StockUnit(file, drop_ins, tuple(settings), _environment(root, settings))


def is_ours(file: Path) -> bool:
    """Whether install wrote this drop-in."""
    return file.name == DROP_IN.name and _text(file).startswith(HEAD)


def is_masked(unit: StockUnit, root: Path | None) -> bool:
    here = _at(root, unit.file)
    return os.path.realpath(here) == os.devnull or not _text(here).strip()


def _places(own: Path, *, user_mode: bool) -> tuple[Path, ...]:
    if user_mode:
        return (
            own,
            *map(Path, _USER[:2]),
            config.home() / ".local/share/systemd/user",
            *map(Path, _USER[2:]),
        )
    return tuple(
        dict.fromkeys(own if path == "/etc/systemd/system" else Path(path) for path in _SYSTEM)
    )


def _drop_ins(root: Path | None, places: tuple[Path, ...]) -> list[Path]:
    """Sorts them by their names, wherever they lie. Of two with one name the one of the first place
    counts, and one for all services last.
    """
    by_name: dict[str, Path] = {}
    for folder in (f"{UNIT_NAME}.d", "service.d"):
        for directory in places:
            here = _at(root, directory / folder)
            if here.is_dir():
                for path in here.glob("*.conf"):
                    by_name.setdefault(path.name, directory / folder / path.name)
    return [by_name[name] for name in sorted(by_name)]


def _at(root: Path | None, path: Path) -> Path:
    """Says where it lies here; what a link of another root leads to is below that root."""
    if root is None:
        return path
    here = root / path.relative_to("/")
    with contextlib.suppress(OSError):
        if (target := here.readlink()).is_absolute() and str(target) != os.devnull:
            return root / target.relative_to("/")
    return here


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not ours to read, or a link that leads nowhere
        return ""


def _settings(file: Path, text: str) -> Iterator[UnitSetting]:
    section, begun = "", ""
    for line in text.splitlines():
        if line.lstrip()[:1] in ("#", ";"):  # also within a line that goes on
            continue
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        if header := re.fullmatch(r"\[(.+)\]", begun):
            section = header[1]
        elif section == "Service" and "=" in begun:
            key, _, value = begun.partition("=")
            yield UnitSetting(file, key.strip(), value.strip())
        begun = ""


def _since_the_empty_one(settings: list[UnitSetting]) -> list[UnitSetting]:
    empty = max((n for n, setting in enumerate(settings, start=1) if not setting.value), default=0)
    return settings[empty:]


def _environment(root: Path | None, settings: list[UnitSetting]) -> dict[str, str]:
    """What a file says counts more than what the unit says."""
    assignments: list[str] = []
    for setting in _since_the_empty_one([s for s in settings if s.key == "Environment"]):
        assignments += _words(setting.value)
    for setting in _since_the_empty_one([s for s in settings if s.key == "EnvironmentFile"]):
        lines = _text(_at(root, Path(setting.value.lstrip("-")))).splitlines()
        for line in lines:
            if line.strip()[:1] not in ("#", ";", ""):
                assignments += [" ".join(_words(line, specifiers=False))]
    return dict(text.partition("=")[::2] for text in assignments if "=" in text)


def _words(value: str, *, specifiers: bool = True) -> list[str]:
    """Divides it as a shell does, which is nearly as systemd does. One that cannot be divided is
    whole.
    """
    try:
        words = shlex.split(value)
    except ValueError:
        return [value]
    return [word.replace("%%", "%") for word in words] if specifiers else words
