"""The table of sources that take the lines of llama-server's tiering."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest

from ollama_tiering.errors import FetchError
from ollama_tiering.patchset.llama_server import exact_hooks, no_page
from ollama_tiering.patchset.llama_server.compile import EMBED
from ollama_tiering.patchset.llama_server.hooks import CMAKE, CONTEXT
from scripts import llama_server_pins as pins
from scripts import models_page
from tests.unit.patchset.test_llama_exact import GGML
from tests.unit.patchset.test_llama_server import MADE_UP, edit

CACHED = [pin for pin in pins.PINS if pins.sdist_path(pin.version, pins.CACHE).exists()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in pins.PARTS:
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
    for path, text in MADE_UP.items():
        (tmp_path / path).write_text(text)
    (tmp_path / EMBED).touch()
    return tmp_path


def test_what_is_placed_and_what_is_refused_with_the_reason(folder: Path) -> None:
    assert pins.check(folder, "one", only_place=True) == pins.Found("one", "", "", "")
    edit(folder, CONTEXT, "void update_slots()", "void turn()")
    refused = pins.check(folder, "two", only_place=True)
    assert "what is done in each turn is not there" in refused.refused
    assert refused.row().startswith(
        "| two |  | no |  | tools/server/server-context.cpp: the anchor"
    )
    assert "kv_tiering" not in (folder / CONTEXT).read_text()  # a copy was tried


def test_a_source_that_exact_attention_does_not_fit_is_named(folder: Path) -> None:
    for path, text in GGML.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    assert pins.check(folder, "one", only_place=True).errors == ""
    edit(folder, exact_hooks.GRAPH, "MAX(prefill, decode)", "prefill")
    wrong = pins.check(folder, "one", only_place=True).errors
    assert "exact attention: " in wrong
    assert "its work memory is not there" in wrong
    (folder / f"{exact_hooks.BACKEND}/ggml-cpu-impl.h").write_text("\n")
    assert "use_ref" in pins.check(folder, "one", only_place=True).errors


def test_an_architecture_that_nobody_has_decided_about_is_named(folder: Path) -> None:
    decided = [one for one in models_page.load() if one.engine == "llama-server"]
    names = [name for one in decided for name in one.names]

    def with_list(names: list[str]) -> pins.Found:
        lines = "".join(
            f'    {{ LLM_ARCH_{number}, "{name}" }},\n' for number, name in enumerate(names)
        )
        unknown = '    { LLM_ARCH_UNKNOWN, "(unknown)" },\n'
        (folder / pins.ARCHITECTURES).write_text(f"LLM_ARCH_NAMES = {{\n{lines}{unknown}\n}};\n")
        return pins.check(folder, "one", only_place=True)

    assert with_list(names).undecided == ()
    found = with_list([*names, "tomorrow"])
    assert found.undecided == ("tomorrow",)
    pin = pins.PINS[-1]
    assert not pins.as_it_should(found, pin)
    assert pins.as_it_should(with_list(names), pin)
    assert pins.as_it_should(found, None)  # one that nobody has tried yet
    with pytest.raises(ValueError, match="the list of architectures was not found"):
        with_list(names[:50])


def test_a_source_without_a_page_that_can_be_made_is_refused(folder: Path) -> None:
    (folder / EMBED).unlink()
    assert "neither tools/ui/embed.cpp nor" in pins.check(folder, "one", only_place=True).refused
    for name, text in zip(no_page.TEMPLATES, ("array<@N_ASSETS@>", "@UNKNOWN@"), strict=True):
        (folder / name).write_text(text)
    assert "asks for @UNKNOWN@" in pins.check(folder, "one", only_place=True).refused


def test_what_does_not_compile_is_named_by_file_and_line(folder: Path) -> None:
    """The made-up source has no header of llama.cpp."""
    found = pins.check(folder, "one", only_place=False)
    assert found.refused == ""
    assert re.search(r"kvt_cache\.cpp:\d+ error: ggml\.h: No such file", found.errors)
    assert "kvt_crc.cpp" not in found.errors  # this one needs none
    assert found.row().startswith("| one |  | yes | no | ")


def test_a_call_in_another_function_is_wrong_and_not_compiled(folder: Path) -> None:
    edit(folder, CONTEXT, "void pre_decode() {", "void prepare() {")
    found = pins.check(folder, "one", only_place=False)
    assert found.refused == ""
    assert found.errors == (
        "before_shift is in prepare, not in pre_decode; "
        "before_prompt is in prepare, not in pre_decode"
    )


def test_what_the_compiler_passed_it_sees_again_only_if_something_has_changed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, errors, asked = tmp_path_factory.mktemp("noted") / "one.checked", "wrong", 0

    def compiled(tree: Path) -> str:
        nonlocal asked
        asked += 1
        return errors

    def check() -> str:
        return pins.check(folder, "one", only_place=False, noted=noted).errors

    monkeypatch.setattr(pins, "syntax_errors", compiled)
    assert [check(), check(), asked] == ["wrong", "wrong", 2]  # that is not noted
    errors = ""
    assert [check(), check(), asked] == ["", "", 3]
    edit(folder, "common/build-info.h", "void", "int")
    assert [check(), check(), asked] == ["", "", 4]
    monkeypatch.setattr("scripts.llama_server_syntax.FLAGS", ("-std=c++20",))
    assert [check(), check(), asked] == ["", "", 5]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the pin "1", not "2"; the newest version is "4", and the one before it was "3"."""
    made = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(pins, "PINS", (pins.Pin("1", "May"), pins.Pin("2", "June")))
    monkeypatch.setattr(pins, "newest", lambda cache: "4")
    monkeypatch.setattr(
        pins, "sdist", lambda version, cache: pins.sdist_path(version, cache).touch()
    )
    (made / "newest").write_text("3")
    for version in ("1", "3"):
        pins.sdist_path(version, made).touch()
        pins.note_path(version, made).touch()
    return made


def test_ci_takes_the_pins_that_are_there_and_the_newest_which_it_fetches(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [version for _, version in pins.for_ci(cache)] == ["1", "4"]
    assert capsys.readouterr().out.startswith(f"SKIPPED: 2: not in {cache}, where `make pins`")
    assert not pins.sdist_path("3", cache).exists()  # 75 MB that nobody asks for any more
    assert not pins.note_path("3", cache).exists()
    assert pins.note_path("1", cache).exists()


def test_without_network_ci_takes_what_is_there_and_says_so(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(cache: Path) -> str:
        raise FetchError("no network")

    monkeypatch.setattr(pins, "newest", offline)
    assert [version for _, version in pins.for_ci(cache)] == ["1", "3"]
    said = capsys.readouterr().out
    assert said.startswith("SKIPPED: the newest llama-cpp-python: no network\n")


@pytest.mark.parametrize(
    ("fits", "refused", "errors", "exit_code"),
    [
        (None, "", "", 0),
        (None, "lacks get_k", "", 0),
        (None, "", "a.cpp:1 error", 1),
        (True, "", "", 0),
        (True, "lacks get_k", "", 1),
        (True, "", "a.cpp:1 error", 1),
        (False, "lacks get_k", "", 0),
        (False, "", "", 1),
    ],
)
def test_a_source_is_right_or_refused_by_name_and_a_pin_is_as_its_table_says(
    fits: bool | None,
    refused: str,
    errors: str,
    exit_code: int,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `fits` it is no pin."""
    pinned = () if fits is None else (pins.Pin("4", "July", fits),)
    monkeypatch.setattr(pins, "PINS", pinned)
    monkeypatch.setattr(pins, "check", lambda *_, **__: pins.Found("4", "", refused, errors))
    monkeypatch.setattr("sys.argv", ["pins", "--newest", "--cache", str(cache)])
    assert pins.main() == exit_code
    said = capsys.readouterr().out
    assert refused in said
    assert ("not as it should be: 4" in said) == (exit_code == 1)


def test_of_an_archive_only_what_is_needed_is_taken(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    inside = "llama_cpp_python-1/vendor/llama.cpp"
    said = b"- feat: update llama.cpp to ggml-org/llama.cpp@abc123\n- ggml-org/llama.cpp@def456\n"
    archive, to = folder / "one.tar.gz", tmp_path_factory.mktemp("to")
    with tarfile.open(archive, "w:gz") as opened:
        for name, data in {
            "llama_cpp_python-1/CHANGELOG.md": said,
            f"{inside}/{CMAKE}": MADE_UP[CMAKE].encode(),
            f"{inside}/models/vocab.gguf": b"x",
            f"{inside}/src/picture.png": b"x",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    assert pins.take(archive, to) == "abc123"
    assert [str(p.relative_to(to)) for p in to.rglob("*") if p.is_file()] == [CMAKE]


def test_the_table_stands_between_its_marks() -> None:
    text = f"before\n{pins.BEGIN}old\n{pins.END}after\n"
    made = pins.page(text, [pins.Found("one", "abc", "", "a | b")])
    assert made.startswith(f"before\n{pins.BEGIN}Checked on ")
    assert made.endswith(f"| one | abc | yes | no | a \\| b |\n{pins.END}after\n")
    assert "old" not in made
    with pytest.raises(SystemExit, match="no place"):
        pins.page("no marks", [])


def test_the_page_has_every_source() -> None:
    table = pins.PAGE.read_text().partition(pins.BEGIN)[2].partition(pins.END)[0]
    for pin in pins.PINS:
        assert f"| {pin.version}, {pin.month} |" in table
    assert table.count("| yes | yes |") == sum(pin.fits for pin in pins.PINS)


@pytest.mark.upstream
@pytest.mark.parametrize("pin", CACHED or [None], ids=lambda pin: pin.version if pin else "none")
def test_a_real_source_takes_the_lines_as_the_table_says(pin: pins.Pin | None) -> None:
    if pin is None:
        pytest.skip(f"no sdist of llama-cpp-python in {pins.CACHE}")
    found = pins.check(pins.sdist(pin.version, pins.CACHE), pin.version, only_place=True)
    assert (found.refused == "" and found.errors == "") == pin.fits
