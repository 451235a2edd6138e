"""The bundle file: one legal form, and nothing changed in it goes unseen."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8_aot.loader.schema import BundleError, IntegrityError, damaged, read, write

MANIFEST = b'{"schema": 1}\n'


def name_of(data, extension="cubin"):
    return f"objects/{hashlib.sha256(data).hexdigest()}.{extension}"


SMALL = {name_of(data): data for data in (b"first object", b"", b"\0" * 70)}


@given(manifest=st.binary(max_size=200), contents=st.lists(st.binary(max_size=300), max_size=6))
def test_what_is_written_is_read(manifest, contents):
    objects = {name_of(data, "hsaco"): data for data in contents}
    data = write(manifest, objects)
    entries = read(data, "here")
    assert list(entries) == ["manifest.json", *sorted(objects)]
    assert {name: bytes(view) for name, view in entries.items()} == {"manifest.json": manifest, **objects}
    assert damaged(data, "here") == []
    assert data == write(manifest, dict(reversed(objects.items())))


def test_ordinary_zip_tools_read_it():
    with zipfile.ZipFile(io.BytesIO(write(MANIFEST, SMALL))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["manifest.json", *sorted(SMALL)]
        assert archive.read("manifest.json") == MANIFEST
        for info in archive.infolist():
            assert (info.compress_type, info.date_time, info.external_attr >> 16) == (
                zipfile.ZIP_STORED,
                (1980, 1, 1, 0, 0, 0),
                0o100644,
            )
            assert archive.read(info) == {"manifest.json": MANIFEST, **SMALL}[info.filename]


def test_every_flipped_bit_is_found():
    """At once where it stands outside of the objects' contents, else by the CRC."""
    whole = write(MANIFEST, SMALL)
    inside = {}
    for name, view in read(whole, "here").items():
        start = whole.index(name.encode()) + len(name)
        assert whole[start : start + len(view)] == view
        inside |= dict.fromkeys(range(start, start + len(view)), name)
    by_crc = 0
    for position in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[position] ^= 1 << bit
            if inside.get(position, "manifest.json") == "manifest.json":
                with pytest.raises(IntegrityError, match=r"^here: not a whole bundle: .*; build or fetch it again$"):
                    read(bytes(broken), "here")
            else:
                assert damaged(bytes(broken), "here") == [inside[position]]
                by_crc += 1
    assert by_crc == 8 * sum(map(len, SMALL.values()))


def test_every_truncation_and_every_added_byte_is_found():
    whole = write(MANIFEST, SMALL)
    for length in range(len(whole)):
        with pytest.raises(IntegrityError, match="not a whole bundle"):
            read(whole[:length], "here")
    for place in range(0, len(whole) + 1, 7):
        with pytest.raises(IntegrityError, match="not a whole bundle"):
            read(whole[:place] + b"\0" + whole[place:], "here")
    with pytest.raises(IntegrityError):
        read(whole + whole, "here")


def test_bytes_that_belong_to_no_entry_are_found():
    """Even where the end of the archive says the right place of the directory."""
    whole = write(MANIFEST, SMALL)
    size, start = struct.unpack("<II", whole[-10:-2])
    for place, more_size, more_start in ((start, 0, 1), (len(whole) - 22, 1, 0)):
        end = whole[-22:-10] + struct.pack("<IIH", size + more_size, start + more_start, 0)
        with pytest.raises(IntegrityError, match="there are bytes that belong to no entry"):
            read(whole[:place] + b"\0" + whole[place:-22] + end, "here")


@given(st.binary(max_size=400))
def test_garbage_is_an_integrity_error(data):
    with pytest.raises(IntegrityError):
        read(data, "here")
    with pytest.raises(IntegrityError):
        read(data + write(MANIFEST, {})[-22:], "here")


@given(st.data())
def test_a_damaged_directory_is_an_integrity_error_or_no_damage(data):
    """Several bytes replaced at once, by bytes that occur in the file too."""
    whole = write(MANIFEST, SMALL)
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(whole) - 4))
        broken[place : place + 4] = data.draw(st.one_of(st.binary(min_size=4, max_size=4), st.just(whole[-10:-6])))
    try:
        entries = read(bytes(broken), "here")
    except IntegrityError:
        return
    # The bytes that the directory describes are all the bytes there are.
    headers = sum((30 + 46) + 2 * len(name) for name in entries)
    assert headers + sum(map(len, entries.values())) + 22 == len(broken)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_another_tools_archive_is_refused(method):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("manifest.json", MANIFEST)
    with pytest.raises(IntegrityError, match="not a whole bundle"):
        read(buffer.getvalue(), "here")


@pytest.mark.parametrize("name", ["objects/abc.cubin", "x", "../manifest.json", "objects/" + "0" * 64 + ".so", ""])
def test_other_entry_names_are_not_written(name):
    with pytest.raises(BundleError, match=r"is not objects/<sha256>\.cubin or \.hsaco"):
        write(MANIFEST, {name: b""})


def raw_archive(names):
    """An archive in the legal form but for its entry names."""
    stand_ins = {f"objects/{index:064x}.cubin": b"x" for index in range(len(names))}
    data = write(MANIFEST, stand_ins)
    for stand_in, name in zip(stand_ins, names, strict=True):
        assert len(stand_in) == len(name)
        data = data.replace(stand_in.encode(), name.encode())
    return data


def test_names_out_of_place_are_refused():
    good = [f"objects/{index:064x}.cubin" for index in (3, 5)]
    read(raw_archive(good), "here")
    for names in (reversed(good), [good[0], good[0]], [good[0], good[1].upper()], ["/" + good[0][1:], good[1]]):
        with pytest.raises(IntegrityError, match=r"entry . is called"):
            read(raw_archive(list(names)), "here")
    with pytest.raises(IntegrityError, match="entry 0 is called"):
        read(write(MANIFEST, {}).replace(b"manifest.json", b"manifest.jsox"), "here")
    with pytest.raises(IntegrityError, match=r"it has no manifest\.json"):
        read(write(MANIFEST, {})[-22:-14] + bytes(14), "here")


def test_a_huge_directory_takes_time_and_memory_in_proportion():
    data = write(MANIFEST, {f"objects/{index:064x}.cubin": b"" for index in range(2000)})
    assert len(read(data, "here")) == 2001
    # A count that the directory does not have ends at the first missing entry.
    broken = bytearray(data)
    broken[-14:-10] = b"\xff\xff\xff\xff"
    with pytest.raises(IntegrityError):
        read(bytes(broken), "here")
    noise = bytearray(random.Random(0).randbytes(len(data)))
    noise[-22:] = data[-22:]
    with pytest.raises(IntegrityError):
        read(bytes(noise), "here")
