"""Whatever the configuration file says: settings that hold, or one line on what to mend."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from pathlib import Path

import pytest

from ollama_tiering.config import SidecarConfig, load
from ollama_tiering.config.settings import SETTINGS
from ollama_tiering.errors import ConfigError
from tests.fuzz.campaign import Campaign, at_most, count, time_limit
from tests.fuzz.mutations import EDGES
from tests.places import short_directory

INPUTS = count("config")
BOUND_BYTES = 64 << 20
MAX_LINE = 2000

VALID = {
    "socket": "/run/x.sock",
    "ram_dir": "/tmp/ram",
    "ram_budget": "1GiB",
    "local_dir": "~/blocks",
    "local_budget": 1 << 30,
    "remote_dir": "/mnt/x",
    "remote_budget": "2.5TB",
    "high_watermark": 0.9,
    "low_watermark": 0.8,
    "admission": "second-touch",
    "local_encoding": "zstd",
    "metrics_port": 9100,
    "log_format": "json",
    "daily_write": "50GB",
    "min_tokens": 64,
    "remote_deadline_seconds": 5,
    "remote_rescan_seconds": 60.5,
    "lease_seconds": 60,
    "reserve_seconds": "90",
    "pin_share": 0.25,
    "min_free_percent": 10,
    "write_queue": "1GiB",
    "write_queue_seconds": 0,
    "tail_seconds": 10,
    "ttl_days": 30,
    "remote_encoding": "none",
    "zstd_level": 3,
    "log_level": "debug",
    "source": "https://example.org/ollama.git",
    "tag": "v0.16.3",
    "cpu": "native",
    "cuda": "off",
}
VALUES = (
    *("0", "-1", "1e400", "-1e400", "nan", "inf", "-inf", "true", "false", "''", '""', "[]", "{}"),
    *("[1, [2]]", "{ a = 1 }", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "0x7fffffffffff"),
    *(
        '"\\u0000"',
        '"a\\u0000b"',
        '"~nobody-at-all/x"',
        '"~"',
        '"."',
        '"none"',
        '"eager"',
        '"8GiB"',
    ),
    *('"9" * 3', '"""\n\n"""', "'''\\'''", '"9999999999999999999999999999YB"', '"1.9999999999e"'),
    *('"1e5"', '"٣"', '"\\ud800"', '"\\U0010ffff"', "1_000", "9" * 400, '"' + "9" * 5000 + 'b"'),
    *('"' + "9" * 400 + '.5g"', '"/' + "x" * 300 + '"', '"\t"', "0.1", '"unix:"', '"unix://"'),
)
PIECES = (
    *("[sidecar]", "[patch]", "[[sidecar]]", "[sidecar.x]", "[x]", "[]", "[", "]", "=", "'", '"""'),
    *("#", "\n", "\r", "\0", "\ufeff", "\u2028", "{", "}", ",", ".", "sidecar = 1", "a.b.c = 1"),
    *('[models."a*"]\n', "[models.a]\nstore = false\n", "[models]\n", "budget = 0", "models = 1"),
    *("sidecar.ram_budget = 1", '"sidecar".x = 1', "[sidecar]\n[sidecar]", "\x7f", "[" * 3000),
)


def document(rng: random.Random) -> str:
    """A file somebody might have written: some keys, most of them right."""
    keys = [setting.key for setting in SETTINGS]
    lines = []
    for section in rng.sample(("sidecar", "patch"), rng.choice((1, 2))):
        lines.append(f"[{section}]")
        own = [key.partition(".")[2] for key in keys if key.startswith(f"{section}.")]
        for name in rng.sample(own, rng.randrange(min(6, len(own)) + 1)):
            lines.append(f"{name} = {value_of(rng, name)}")
    return "\n".join(lines) + "\n"


def value_of(rng: random.Random, name: str) -> str:
    kind = rng.random()
    if kind < 0.75 and name in VALID:
        return json.dumps(VALID[name])
    if kind < 0.9:
        return rng.choice(VALUES)
    number = rng.choice((rng.choice(EDGES), rng.uniform(-2, 2), rng.randrange(100)))
    return str(number) if rng.random() < 0.7 else json.dumps(str(number))


def mutated(rng: random.Random, text: str) -> bytes:
    data = bytearray(text.encode())
    for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(5)
        if action == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[at:at] = rng.choice(PIECES).encode()
        elif action == 2:
            del data[at : at + rng.choice((1, 5, 50))]
        elif action == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 6))
        else:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + 30]
    return bytes(data)


def hold(config: SidecarConfig) -> None:
    """What the rest of the program relies on."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Path):
            assert value.is_absolute()
            os.fsencode(value)
            assert "\0" not in str(value), field.name
        elif isinstance(value, float):
            assert math.isfinite(value), field.name
            assert value >= 0, field.name
        elif isinstance(value, int):
            assert 0 <= value < 1 << 63, field.name
    assert config.low_watermark < config.high_watermark
    assert len(os.fsencode(config.socket_path)) <= 107


def outcome(path: Path) -> str:
    try:
        config = load(path=path)
    except ConfigError as error:
        message, hint = error.message, error.hint
    else:
        hold(config.sidecar)
        return "settings"
    assert str(path) in f"{message} {hint}"
    assert len(message.splitlines()) == 1, message
    assert len(message) <= MAX_LINE, message
    assert message.isprintable(), message
    assert hint
    return "refused"


@pytest.mark.timeout(time_limit(INPUTS))
def test_no_configuration_file_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as short:
        no_harm_in(short, monkeypatch)


def no_harm_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OLLAMA_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    campaign = Campaign("config", INPUTS)
    path = tmp_path / "config.toml"
    with at_most(BOUND_BYTES):
        for number in campaign:
            with campaign.input(number) as rng:
                path.write_bytes(mutated(rng, document(rng)))
                campaign.outcomes[outcome(path)] += 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml"]
    campaign.report()
