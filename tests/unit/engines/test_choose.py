"""Which engine runs, and the reason that is given."""

from pathlib import Path

import pytest

from ollama_tiering.engines.choose import choose, stock_beside
from ollama_tiering.errors import BuildError, UsageError
from ollama_tiering.patchset import finished
from ollama_tiering.patchset.binary import ENV_BINARY, cpu_of_newest

BUILT = Path("/built/ollama")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_BINARY, raising=False)


def build() -> Path:
    return BUILT


def no_build() -> Path:
    raise BuildError("go failed with exit code 1", hint="read the log", told="and more")


def test_a_named_binary_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "ollama"
    program.touch(mode=0o755)
    monkeypatch.setenv(ENV_BINARY, str(program))
    assert choose("auto", source_cached=lambda: False, build=no_build).binary == program


def test_a_named_binary_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENV_BINARY, str(tmp_path / "nothing"))
    with pytest.raises(UsageError):
        choose("auto", source_cached=lambda: True, build=build)


def test_auto_builds_from_the_cached_source() -> None:
    assert choose("auto", source_cached=lambda: True, build=build).binary == BUILT


def test_auto_never_fetches() -> None:
    choice = choose("auto", source_cached=lambda: False, build=build)
    assert choice.engine == "reference"
    assert "tiering fetch" in choice.why


def test_auto_falls_back_where_the_build_fails_and_says_why() -> None:
    choice = choose("auto", source_cached=lambda: True, build=no_build)
    assert choice.engine == "reference"
    assert choice.why == "Ollama could not be built: go failed with exit code 1 (read the log)"


def test_asked_for_ollama_a_failed_build_is_an_error() -> None:
    with pytest.raises(BuildError):
        choose("ollama", source_cached=lambda: True, build=no_build)


def test_asked_for_the_reference_nothing_is_built() -> None:
    assert choose("reference", source_cached=lambda: True, build=no_build).engine == "reference"


def test_the_kind_of_the_newest_build_of_a_version_is_used_again() -> None:
    names = ("v0.24.0-variants", "v0.16.3-native-cuda12", "v0.16.3-variants")
    built = [Path("/cache/trees") / name / "src" / "ollama" for name in names]
    assert cpu_of_newest("v0.16.3", built) == "native"
    assert cpu_of_newest("v0.24.0", built) == "variants"
    assert cpu_of_newest("v0.16", built) is None


def test_the_stock_build_of_the_same_version_and_kind_is_found_once_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path))
    names = ("v0.16.3-native", "v0.16.3-native-stock", "v0.17.0-native-stock")
    ours, stock, _ = (finished.root() / name / "0/ollama" for name in names)
    for name in (names[0], names[2]):
        with finished.filling(finished.root() / name / "0", "ollama", "0" * 16) as fresh:
            (fresh / "ollama").touch(mode=0o755)
    stock.parent.mkdir(parents=True)
    stock.touch(mode=0o755)
    assert stock_beside(ours) is None  # not finished
    with finished.filling(stock.parent, "ollama", "0" * 16) as fresh:
        (fresh / "ollama").touch(mode=0o755)
    assert stock_beside(ours) == stock
    assert stock_beside(tmp_path / names[0] / "ollama") is None  # no build of ours
    stock.unlink()
    assert stock_beside(ours) is None
