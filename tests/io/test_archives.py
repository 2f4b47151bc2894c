"""Archives: whole or refused, nothing outside the folder, no more than a text can be."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers.folders import contents
from relpos_fairseq.io import archives
from relpos_fairseq.io.archives import extract
from relpos_fairseq.io.errors import UserError


def pack(path: Path, entries: dict[str, bytes | tarfile.TarInfo]) -> Path:
    """Write an archive of the kind that its name says; an entry of a tar may be a link or a device."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in entries.items():
                file.writestr(name, data)
        return path
    with tarfile.open(path, "w:" + path.suffix[1:].replace("tar", "")) as file:
        for name, entry in entries.items():
            if isinstance(entry, tarfile.TarInfo):
                file.addfile(entry)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(entry)
                file.addfile(info, io.BytesIO(entry))
    return path


NOISE = bytes(i * i % 251 for i in range(40_000))
ENTRIES = {"d/a.txt": b"alpha" * 2000, "d/b.txt": NOISE}
KINDS = ["a.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.zip"]


@pytest.mark.parametrize("name", KINDS)
def test_members_come_out(tmp_path, name):
    archive = pack(tmp_path / name, ENTRIES)
    made = extract(archive, tmp_path / "out")
    assert made == [tmp_path / "out" / entry for entry in ENTRIES]
    assert contents(tmp_path / "out") == ENTRIES
    assert extract(archive, tmp_path / "one", ["*/b.txt"]) == [tmp_path / "one" / "d" / "b.txt"]
    with pytest.raises(UserError, match=f"{name} does not contain c.txt"):
        extract(archive, tmp_path / "none", ["d/a.txt", "c.txt"])


@pytest.mark.parametrize("name", KINDS)
def test_a_truncated_archive_is_one_error(tmp_path, name):
    archive = pack(tmp_path / name, ENTRIES)
    whole = archive.read_bytes()
    for length in (0, 1, len(whole) // 3, len(whole) * 2 // 3, len(whole) - 12):
        if name == "a.tar" and length == len(whole) - 12:
            length = 512 + 10_240 + 512 + 40_448  # what is missing is the end mark alone
        archive.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{name} is (truncated|no .* file)"):
            extract(archive, tmp_path / str(length))
        assert contents(tmp_path / str(length)).items() <= ENTRIES.items()


@pytest.mark.parametrize("name", ["../x", "/x", "d/../../x", "..\\x", "c:\\x", "\\x"])
@pytest.mark.parametrize("kind", ["a.tar.gz", "a.zip"])
def test_an_entry_that_leads_out_is_refused(tmp_path, name, kind):
    archive = pack(tmp_path / kind, {"good": b"1", name: b"2"})
    with pytest.raises(UserError, match="leads out of the folder"):
        extract(archive, tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused_unless_unwanted(tmp_path, kind):
    bad = tarfile.TarInfo("bad")
    bad.type, bad.linkname = kind, "/etc/passwd"
    archive = pack(tmp_path / "a.tar", {"good": b"1", "bad": bad})
    with pytest.raises(UserError, match="bad is a (link|device): extract it by hand"):
        extract(archive, tmp_path / "out")
    assert extract(archive, tmp_path / "out", ["good"]) == [tmp_path / "out" / "good"]


def test_a_link_in_a_zip_is_refused(tmp_path):
    info = zipfile.ZipInfo("bad")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(info, "/etc/passwd")
    with pytest.raises(UserError, match="bad is a link"):
        extract(tmp_path / "a.zip", tmp_path / "out")


def test_a_single_compressed_file_and_unknown_kinds(tmp_path):
    archive = tmp_path / "text.txt.gz"
    archive.write_bytes(gzip.compress(b"text"))
    assert extract(archive, tmp_path / "out") == [tmp_path / "out" / "text.txt"]
    (tmp_path / "a.rar").write_bytes(b"")
    with pytest.raises(UserError, match="its name must end in"):
        extract(tmp_path / "a.rar", tmp_path)
    with pytest.raises(UserError, match="not a file"):
        extract(tmp_path / "a.zip", tmp_path)


def test_extraction_checks_room(tmp_path, monkeypatch):
    def full(folder, size):
        raise UserError(f"no room for {size}")

    monkeypatch.setattr(archives, "require_space", full)
    with pytest.raises(UserError, match="no room for 10000"):
        extract(pack(tmp_path / "a.tar", ENTRIES), tmp_path / "out")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2Ja", "a\u2028b"])
def test_a_member_s_name_that_breaks_a_line_is_refused_in_one(tmp_path, name):
    with pytest.raises(UserError, match="control character") as caught:
        extract(pack(tmp_path / "a.tar", {name: b"x"}), tmp_path / "out")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a.tar.xz", "a.zip", "a.gz"])
def test_few_bytes_do_not_become_many(tmp_path, monkeypatch, name):
    monkeypatch.setattr(archives, "FREE_GROWTH", 1 << 20)
    path, content = tmp_path / name, bytes(8 << 20)
    path.write_bytes(gzip.compress(content)) if name == "a.gz" else pack(path, {"a": content})
    with pytest.raises(UserError, match=f"{name} has .* and unpacks to more than"):
        extract(path, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*"))
    if name == "a.gz":
        with pytest.raises(UserError, match="unpacks to more than"):
            archives.unpacked(path)
