"""Archives of releases, whole, damaged and hostile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from ollama_tiering import config
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset import release_archive
from ollama_tiering.patchset.report import Report
from tests.unit.patchset.fake_stock import ollama

Entry = tuple[str, bytes | str]  # a link is a string
LIBRARY = "lib/ollama/cuda_v12/libggml-cuda.so"


def archive(path: Path, *entries: Entry | tarfile.TarInfo, root: Path | None = None) -> Path:
    """A tar file, compressed as its name says."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as out:
        if root:
            out.add(root, ".")
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                out.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            if isinstance(entry[1], str):
                info.type, info.linkname = tarfile.SYMTYPE, entry[1]
                out.addfile(info)
            else:
                info.size = len(entry[1])
                out.addfile(info, io.BytesIO(entry[1]))
    plain = content.getvalue()
    if path.suffix == ".zst":
        plain = zstandard.compress(plain)
    elif path.suffix == ".tgz":
        import gzip

        plain = gzip.compress(plain)
    path.write_bytes(plain)
    return path


def kept() -> list[Path]:
    folder = release_archive.folder()
    files = folder.iterdir() if folder.is_dir() else []
    return [path for path in files if path.name != "lock"]


@pytest.mark.parametrize("name", ["o.tgz", "o.tar.zst", "o.tar"])
def test_what_a_gpu_needs_is_unpacked_and_nothing_else(
    tmp_path: Path, report: Report, name: str
) -> None:
    root = ollama(tmp_path / "root")
    others = {
        *("vulkan/libggml-vulkan.so", "rocm/libggml-hip.so", "rocm/librocblas.so.4"),
        *("rocm/rocblas/library/Kernels.dat", "rocm/rocblas/library/gfx1100/K.co"),
    }
    for name_of_one in (*others, "mlx_cuda_v13/libmlx.so", "rocm/notes.txt"):
        path = root / "lib/ollama" / name_of_one
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name_of_one.encode())
    found = release_archive.unpacked(archive(tmp_path / name, root=root), report)
    names = {str(path.relative_to(found)) for path in found.rglob("*") if not path.is_dir()}
    base = {f"lib/ollama/libggml-base.so{end}" for end in ("", ".0", ".0.0.0")}
    cuda = {
        f"lib/ollama/cuda_v{major}/{file}"
        for major in (12, 13)
        for file in ("libggml-cuda.so", f"libcublas.so.{major}", f"libcublas.so.{major}.8.4")
    }
    assert names == {"bin/ollama"} | base | cuda | {f"lib/ollama/{one}" for one in others}
    assert (found / "lib/ollama/libggml-base.so").readlink() == Path("libggml-base.so.0")
    for path in (LIBRARY, "bin/ollama"):
        assert (found / path).read_bytes() == (root / path).read_bytes()


def test_it_is_unpacked_once_and_again_when_the_file_is_another(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive(tmp_path / "o.tar", (LIBRARY, b"old"))
    first = release_archive.unpacked(path, report)
    with monkeypatch.context() as without:
        without.setattr(tarfile, "open", None)
        assert release_archive.unpacked(path, report) == first
    archive(path, (LIBRARY, b"newer"))
    assert (release_archive.unpacked(path, report) / LIBRARY).read_bytes() == b"newer"


def _special(kind: bytes, name: str = LIBRARY, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE: dict[str, tuple[Entry | tarfile.TarInfo, ...]] = {
    "leads out of it": (("../evil", b"x"),),
    "path that leads out of it": (("lib/ollama/cuda_v12/../../../../evil", b"x"),),
    "a path that leads": (("/etc/evil", b"x"),),
    "leaves the folder: '/etc/passwd'": ((LIBRARY, "/etc/passwd"),),
    "leaves the folder: '../libggml-base.so'": ((LIBRARY, "../libggml-base.so"),),
    "leaves the folder: '..'": ((LIBRARY, ".."),),
    "leaves the folder: ''": ((LIBRARY, ""),),
    "link 'bin/ollama' leaves": (("bin/ollama", "evil"), ("bin/evil", b"x")),
    "leads to no file": ((LIBRARY, "libnot-there.so"),),
    f"link {LIBRARY} leads to no file": ((LIBRARY, "libggml-cuda.so"),),
    "twice": ((LIBRARY, b"one"), (LIBRARY, b"two")),
    f"it has '{LIBRARY}' twice": ((LIBRARY, "libother.so"), (LIBRARY, b"through the link")),
    "neither a file nor a symbolic link": (
        ("bin/ollama", b"x"),
        _special(tarfile.LNKTYPE, link="bin/ollama"),
    ),
    "neither a file": (_special(tarfile.FIFOTYPE),),
    "neither a file nor": (_special(tarfile.GNUTYPE_SPARSE),),
    f"'{LIBRARY}' is neither": (_special(tarfile.CHRTYPE),),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, report: Report, said: str
) -> None:
    path = archive(tmp_path / "evil.tgz", *HOSTILE[said])
    before = {p for p in tmp_path.rglob("*") if config.cache_dir() not in (p, *p.parents)}
    with pytest.raises(UsageError) as caught:
        release_archive.unpacked(path, report)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert kept() == []
    after = {p for p in tmp_path.rglob("*") if config.cache_dir() not in (p, *p.parents)}
    assert after == before


def test_a_link_under_a_wanted_folder_cannot_move_what_is_written(
    tmp_path: Path, report: Report
) -> None:
    """lib/ollama/cuda_v12 itself as a link: passed over, and the file lies where its name says."""
    path = archive(
        tmp_path / "evil.tar", ("lib/ollama/cuda_v12", str(tmp_path)), (LIBRARY, b"library")
    )
    found = release_archive.unpacked(path, report)
    assert not (found / "lib/ollama/cuda_v12").is_symlink()
    assert (found / LIBRARY).read_bytes() == b"library"


def test_an_archive_that_grows_beyond_a_release_is_refused(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by what is passed over: it has to be decompressed."""
    path = archive(tmp_path / "o.tar.zst", ("elsewhere", bytes(30_000)), (LIBRARY, b"x"))
    with monkeypatch.context() as less:
        less.setattr(release_archive, "MOST_BYTES", 20_000)
        with pytest.raises(UsageError, match="larger than a release"):
            release_archive.unpacked(path, report)
    with monkeypatch.context() as less:
        less.setattr(release_archive, "MOST_MEMBERS", 1)
        with pytest.raises(UsageError, match="larger than a release"):
            release_archive.unpacked(path, report)
    assert kept() == []
    assert release_archive.unpacked(path, report).is_dir()


def _cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) * 8 + content[middle + 8 :]


@pytest.mark.parametrize("name", ["o.tgz", "o.tar.zst"])
@pytest.mark.parametrize("damage", [_cut, _flipped, lambda _: b"<html>Not Found</html>"])
def test_a_damaged_archive_is_refused(
    tmp_path: Path, report: Report, name: str, damage: Callable[[bytes], bytes]
) -> None:
    path = archive(tmp_path / name, root=ollama(tmp_path / "root"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match="no whole tar archive"):
        release_archive.unpacked(path, report)
    assert kept() == []


def test_an_archive_that_ends_between_two_members_is_not_whole(
    tmp_path: Path, report: Report
) -> None:
    path = archive(tmp_path / "o.tar", (LIBRARY, bytes(600)), ("bin/ollama", b"program"))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))  # in the last member
    for length in range(512, end + 512, 512):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="no whole tar archive"):
            release_archive.unpacked(path, report)
    assert kept() == []


def test_an_archive_with_a_damaged_head_of_a_later_member_is_not_whole(
    tmp_path: Path, report: Report
) -> None:
    path = archive(tmp_path / "o.tar", (LIBRARY, bytes(600)), ("bin/ollama", b"program"))
    content = bytearray(path.read_bytes())
    content[512 + 1024 + 150] ^= 0xFF  # its checksum
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no whole tar archive"):
        release_archive.unpacked(path, report)


def test_an_archive_in_several_frames_is_whole(tmp_path: Path, report: Report) -> None:
    plain = archive(tmp_path / "o.tar", (LIBRARY, b"library")).read_bytes()
    path = tmp_path / "o.tar.zst"
    path.write_bytes(zstandard.compress(plain[:512]) + zstandard.compress(plain[512:]))
    assert (release_archive.unpacked(path, report) / LIBRARY).read_bytes() == b"library"


def test_setuid_and_the_like_are_not_taken_over(tmp_path: Path, report: Report) -> None:
    program, data = _special(tarfile.REGTYPE, "bin/ollama"), _special(tarfile.REGTYPE)
    program.mode = data.mode = 0o6777
    found = release_archive.unpacked(archive(tmp_path / "o.tar", program, data), report)
    assert (found / "bin/ollama").stat().st_mode & 0o7777 == 0o755
    assert (found / LIBRARY).stat().st_mode & 0o7777 == 0o644
