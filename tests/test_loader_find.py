"""Which bundle a device gets, and what is said of the others."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from fake_driver import FakeCuda, FakeDevice, FakeHip
from loader_kit import manifest_of, objects_of, views_of, write_bundle

import fp8_aot
from fp8_aot import loader
from fp8_aot.loader import config, driver
from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.find import Accepted, Rejected, find
from fp8_aot.loader.runtime import runtime

pytest_plugins = "loader_fixtures"

pytestmark = pytest.mark.usefixtures("clean_loader")


def decisions(arch="90", version=13040, kind=FakeCuda):
    fake = kind([FakeDevice(arch)], version=version)
    made = fake.driver()
    found = tuple(find(made, made.devices()[0]))
    assert fake.errors == []
    return found


def only(*args, **options):
    """The one decision besides that on ./artifacts, which does not exist."""
    first, last = decisions(*args, **options)
    assert str(last) == "artifacts (./artifacts): rejected: does not exist"
    return first


def test_the_order_of_the_places(bundles, tmp_path, monkeypatch):
    good = bundles / "sm90.zip"
    places = [tmp_path / name / "b.zip" for name in ("first", "second", "env1", "env2", "site/fp8_aot/artifacts/sm90")]
    for place in [*places, tmp_path / "artifacts" / "sm90.zip"]:
        place.parent.mkdir(parents=True)
        shutil.copy(good, place)
    loader.configure(bundle_path=f"{places[0]}{os.pathsep}{places[1].parent}")
    monkeypatch.setenv("FP8_AOT_BUNDLE_PATH", f"{places[2].parent}{os.pathsep}{os.pathsep}{places[3]}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = decisions()
    assert [(d.path.resolve(), d.origin) for d in found] == [
        (places[0], "configure(bundle_path=...)"),
        (places[1], "configure(bundle_path=...)"),
        (places[2], "FP8_AOT_BUNDLE_PATH"),
        (places[3], "FP8_AOT_BUNDLE_PATH"),
        (places[4], "installed wheel"),
        (tmp_path / "artifacts" / "sm90.zip", "./artifacts"),
    ]
    assert all(isinstance(d, Accepted) for d in found)
    assert str(found[0]) == f"{places[0]} (configure(bundle_path=...)): accepted"
    driver.install(FakeCuda(version=13040).driver())
    assert runtime.state("cuda", 0).bundle.path == places[0]
    # A candidate that is no use leaves the next one.
    places[0].write_bytes(b"")
    runtime.unload()
    assert runtime.state("cuda", 0).bundle.path == places[1]


def test_two_installed_portions(bundles, tmp_path, monkeypatch):
    """Each wheel brings fp8_aot/artifacts/<target>; they may lie on different entries of sys.path."""
    for target in ("sm90", "sm100"):
        folder = tmp_path / f"site-{target}" / "fp8_aot" / "artifacts" / target
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('an artifact wheel is looked at, not imported')")
        shutil.copy(bundles / f"{target}.zip", folder)
        monkeypatch.syspath_prepend(str(tmp_path / f"site-{target}"))
    assert len(list(fp8_aot.__path__)) >= 3
    found = decisions()[:-1]
    assert {(d.path.name, type(d)) for d in found} == {("sm90.zip", Accepted), ("sm100.zip", Rejected)}
    assert {d.origin for d in found} == {"installed wheel"}
    assert not any(name.startswith("fp8_aot.artifacts.") for name in sys.modules)


@pytest.mark.parametrize("arch", ["100", "103", "89", "120"])
def test_the_architecture_must_be_exact(bundles, arch):
    loader.configure(bundle_path=bundles / "sm90.zip")
    assert only(arch).reason == f"built for cuda 90, this device is cuda {arch}"


@pytest.mark.parametrize("arch", ["gfx940", "gfx950", "gfx90a:sramecc+"])
def test_the_architecture_must_be_exact_on_amd(bundles, arch):
    loader.configure(bundle_path=bundles / "gfx942.zip")
    reason = only(arch, kind=FakeHip, version=70000000).reason
    assert reason == f"built for hip gfx942, this device is hip {arch.partition(':')[0]}"
    assert isinstance(only("gfx942:sramecc+:xnack-", kind=FakeHip, version=70000000), Accepted)


def test_an_old_driver_is_told_both_versions(bundles):
    loader.configure(bundle_path=bundles / "sm90.zip")
    toolchain = manifest_of(bundles / "sm90.zip")["toolchain"]
    least = toolchain["min_driver"]
    assert isinstance(only(version=least), Accepted)
    reason = only(version=least - 10).reason
    assembler = toolchain["assembler"]
    assert reason.startswith(f"made by {assembler['name']} {assembler['version']}, needs driver API {least} or newer")
    assert f"this machine's is {least - 10}: update the driver" in reason


def test_places_without_a_bundle(tmp_path):
    (tmp_path / "folder.zip").mkdir()
    (tmp_path / "nest" / "inner.zip").mkdir(parents=True)
    (tmp_path / "text.zip").write_text("not an archive at all, but longer than the end of one")
    loader.configure(bundle_path=tmp_path / "folder.zip")
    assert only().reason == "holds no bundle (*.zip)"
    loader.configure(bundle_path=tmp_path / "nest")
    assert only().reason == "holds no bundle (*.zip)"
    loader.configure(bundle_path=tmp_path / "nothing.zip")
    assert only().reason == "does not exist"
    loader.configure(bundle_path=tmp_path / "text.zip" / "below.zip")
    assert "cannot be read" in only().reason and "Not a directory" in only().reason
    loader.configure(bundle_path=tmp_path / ("x" * 300))
    assert "File name too long" in only().reason
    loader.configure(bundle_path=str(tmp_path / "nul\0.zip"))
    assert "cannot be read: embedded null byte" in only().reason
    loader.configure(bundle_path=tmp_path / "text.zip")
    assert only().reason.startswith("not a whole bundle: the end of the archive is missing or damaged; build or ")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may read everything")
def test_a_bundle_that_may_not_be_read(bundles, tmp_path):
    shutil.copy(bundles / "sm90.zip", tmp_path / "secret.zip")
    (tmp_path / "secret.zip").chmod(0)
    loader.configure(bundle_path=tmp_path / "secret.zip")
    assert "Permission denied" in only().reason


def test_a_path_that_cannot_be_looked_at(bundles, monkeypatch):
    """Without the right to pass a folder, every question about what is in it is a PermissionError."""
    path = bundles / "sm90.zip"

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    loader.configure(bundle_path=path)
    monkeypatch.setattr(type(path), "stat", refuse)
    monkeypatch.setattr(type(path), "read_bytes", refuse)
    first, _ = decisions()
    assert "cannot be read: [Errno 13] Permission denied" in first.reason


def test_damage_anywhere_is_a_rejection_or_found_at_load(bundles, tmp_path):
    """A real bundle cut and changed at many places."""
    whole = (bundles / "gfx942.zip").read_bytes()
    path = tmp_path / "b.zip"
    manifest_end = whole.index(b"objects/") - 30
    for length in (
        0,
        1,
        21,
        22,
        1000,
        manifest_end,
        manifest_end + 5,
        len(whole) // 2,
        len(whole) - 23,
        len(whole) - 1,
    ):
        path.write_bytes(whole[:length])
        loader.configure(bundle_path=path)
        assert "not a whole bundle" in only("gfx942", kind=FakeHip, version=70000000).reason
    rejected = 0
    places = [
        *range(0, manifest_end, 9973),
        *range(manifest_end, len(whole), 40009),
        *range(len(whole) - 30, len(whole)),
    ]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 0x10
        path.write_bytes(bytes(broken))
        loader.configure(bundle_path=path)
        decision = only("gfx942", kind=FakeHip, version=70000000)
        if isinstance(decision, Rejected):
            rejected += 1
            continue
        objects = {v.object: v for v in decision.bundle.manifest.variants}
        bad = []
        for variant in objects.values():
            try:
                decision.bundle.object(variant)
            except loader.IntegrityError as error:
                bad.append(str(error))
        (message,) = bad
        assert message.endswith("is damaged (sha256): build or fetch the bundle again")
    assert 30 <= rejected < len(places)


def test_a_damaged_object_is_refused_at_load_and_others_serve(bundles, tmp_path, on):
    fake = on("sm90")
    manifest, objects = manifest_of(bundles / "sm90.zip"), objects_of(bundles / "sm90.zip")
    views = views_of(manifest, "act_quant_lhs", {"in": "bf16"}, {"M": 16, "K": 16})
    variant = next(v for v in manifest["variants"] if v["id"].startswith("act_quant_lhs/in=bf16/BLOCK_R=4,"))
    name = f"objects/{variant['object']}.cubin"
    damage = {
        "is damaged (sha256)": objects[name][:-1] + bytes([objects[name][-1] ^ 1]),
        f"has {variant['object_size'] - 1} bytes, the manifest says {variant['object_size']}": objects[name][:-1],
    }
    for says, data in damage.items():
        path = write_bundle(tmp_path / "b.zip", manifest, objects | {name: data})
        loader.configure(bundle_path=path)
        with pytest.raises(loader.IntegrityError) as caught:
            loader.launch("act_quant_lhs", views)
        assert str(caught.value).startswith(f"{path}: {name} {says}")
    assert fake.loads == []
    other = views_of(manifest, "act_quant_lhs", {"in": "fp32"}, {"M": 16, "K": 16})
    loader.launch("act_quant_lhs", other)
    assert len(fake.launches) == 1


def test_a_file_replaced_on_disk_changes_nothing(bundles, tmp_path):
    path = tmp_path / "b.zip"
    shutil.copy(bundles / "sm90.zip", path)
    bundle = Bundle(path)
    path.write_bytes(b"")
    for variant in bundle.manifest.variants[:3]:
        assert len(bundle.object(variant)) == variant.object_size


def test_the_mode_comes_from_the_environment(monkeypatch):
    assert config.settings().mode == "warn"
    monkeypatch.setattr(config, "_settings", None)
    monkeypatch.setenv("FP8_AOT_MODE", "strict")
    assert config.settings().mode == "strict"
    monkeypatch.setattr(config, "_settings", None)
    monkeypatch.setenv("FP8_AOT_MODE", "fast")
    with pytest.raises(ValueError, match="FP8_AOT_MODE is 'fast', expected one of strict, warn, jit"):
        config.settings()
    with pytest.raises(ValueError, match="FP8_AOT_MODE is 'fast'"):
        loader.configure(bundle_path="x")
    with pytest.raises(ValueError, match="mode is 'fast', expected one of strict, warn, jit"):
        loader.configure(mode="fast")
    with pytest.raises(TypeError, match="bundle_path is a int, expected a path"):
        loader.configure(mode="jit", bundle_path=5)
    loader.configure(mode="jit")
    assert config.settings().mode == "jit"
    loader.configure(bundle_path="x")
    assert config.settings().mode == "jit"
    loader.configure(mode="strict")
    assert [str(path) for path in config.settings().bundle_path] == ["x"]
