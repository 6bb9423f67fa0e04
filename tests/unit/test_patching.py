"""Applying and removing a patch series: exact bytes, all or nothing, never through a hard link."""

import difflib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_gate import patching, series

VERSION = "1.2.3"
MODULES = {
    "sglang.srt.alpha": '"""Alpha."""\n\nimport os\n\n\ndef run():\n    return os.sep\n',
    "sglang.srt.deep.beta": "import sys\n\nVALUE = 1\n\n\ndef other():\n    return VALUE\n",
    "sglang.gamma": "import re\n\nNAME = re\n",
}
REGISTER = 'import spec_gate.loaded\n\nspec_gate.loaded.register(__name__, "")\n\n'
EDITED = {
    "sglang.srt.alpha": MODULES["sglang.srt.alpha"].replace("import os", REGISTER + "import os"),
    "sglang.srt.deep.beta": REGISTER + MODULES["sglang.srt.deep.beta"].replace("VALUE = 1", "VALUE = 2"),
    "sglang.gamma": REGISTER + MODULES["sglang.gamma"],
}


def path_of(module):
    return module.replace(".", "/") + ".py"


def make_site_packages(root, version=VERSION):
    for module, text in MODULES.items():
        path = root / path_of(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o640)
    info = root / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return root


def snapshot(root):
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def series_directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    (root / VERSION).mkdir()
    for module in MODULES:
        before, after = (files[module].splitlines(keepends=True) for files in (MODULES, EDITED))
        diff = difflib.unified_diff(before, after, path_of(module), path_of(module), n=1)
        (root / VERSION / f"{module}.patch").write_text("".join(diff))
    pristine = make_site_packages(tmp_path_factory.mktemp("pristine"))
    run("spec_gate.series", "build", pristine, root)
    return root


@pytest.fixture
def site_packages(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return make_site_packages(folder)


def run(module, action, site_packages, series_directory, *, check=True, **environment):
    folders = ["--site-packages", str(site_packages), "--series-directory", str(series_directory)]
    result = subprocess.run(
        [sys.executable, "-m", module, action, *folders],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(patching.__file__).parents[1])} | environment,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def patch(action, site_packages, series_directory):
    return json.loads(run("spec_gate.patching", action, site_packages, series_directory).stdout)


def refused(action, site_packages, series_directory, **environment):
    before = snapshot(site_packages)
    result = run("spec_gate.patching", action, site_packages, series_directory, check=False, **environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert snapshot(site_packages) == before
    return result.stderr


def test_apply_check_apply_remove(site_packages, series_directory):
    pristine = snapshot(site_packages)
    assert patch("check", site_packages, series_directory)["state"] == "pristine"

    applied = patch("apply", site_packages, series_directory)
    assert (applied["changed"], applied["state"]) == (True, "applied")
    manifest = json.loads((series_directory / VERSION / "manifest.json").read_text())
    assert applied["series"] == manifest["series"]
    assert {f["path"]: f["sha256"] for f in applied["files"]} == {
        f["path"]: f["patched_sha256"] for f in manifest["files"]
    }
    for module in MODULES:
        assert f'register(__name__, "{manifest["series"]}")' in (site_packages / path_of(module)).read_text()

    inodes = {path: path.stat() for path in site_packages.rglob("*.py")}
    again = patch("apply", site_packages, series_directory)
    assert (again["changed"], again["state"]) == (False, "applied")
    assert {path: path.stat() for path in site_packages.rglob("*.py")} == inodes

    assert patch("remove", site_packages, series_directory)["state"] == "pristine"
    assert snapshot(site_packages) == pristine
    assert patch("remove", site_packages, series_directory)["changed"] is False


def test_a_hard_linked_twin_keeps_its_bytes(site_packages, series_directory, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(site_packages, cache, copy_function=os.link)
    before = snapshot(cache)
    assert (cache / path_of("sglang.gamma")).stat().st_nlink == 2
    patch("apply", site_packages, series_directory)
    assert snapshot(cache) == before
    patch("remove", site_packages, series_directory)
    assert snapshot(cache) == before


def test_stale_compiled_files_of_the_replaced_modules_are_removed_and_no_others(site_packages, series_directory):
    folder = site_packages / "sglang" / "srt" / "__pycache__"
    folder.mkdir()
    for name in ("alpha.cpython-311.pyc", "alpha.cpython-312.opt-1.pyc", "alphabet.cpython-311.pyc"):
        (folder / name).write_bytes(b"stale")
    patch("apply", site_packages, series_directory)
    assert [path.name for path in folder.iterdir()] == ["alphabet.cpython-311.pyc"]


@pytest.mark.parametrize("action", ["apply", "remove"])
def test_an_unknown_file_is_refused_with_what_was_found_and_what_is_known(site_packages, series_directory, action):
    path = site_packages / path_of("sglang.srt.deep.beta")
    path.write_text(path.read_text().replace("VALUE = 1", "VALUE = 7"))
    message = refused(action, site_packages, series_directory)
    manifest = json.loads((series_directory / VERSION / "manifest.json").read_text())
    (known,) = [file for file in manifest["files"] if file["module"] == "sglang.srt.deep.beta"]
    for part in (
        known["path"],
        known["upstream_sha256"],
        known["patched_sha256"],
        hashlib.sha256(path.read_bytes()).hexdigest(),
        VERSION,
    ):
        assert part in message
    result = run("spec_gate.patching", "check", site_packages, series_directory, check=False)
    assert result.returncode == 1
    assert json.loads(result.stdout)["state"] == "unknown"


def test_a_missing_file_is_refused(site_packages, series_directory):
    (site_packages / path_of("sglang.gamma")).unlink()
    assert "missing" in refused("apply", site_packages, series_directory)


def test_another_version_is_refused_with_the_known_ones(tmp_path, series_directory):
    message = refused("apply", make_site_packages(tmp_path, version="1.2.4"), series_directory)
    assert "1.2.4" in message
    assert VERSION in message


def test_a_folder_without_sglang_is_refused(tmp_path, series_directory):
    assert "no SGLang is installed" in refused("apply", tmp_path, series_directory)


def test_without_gnu_patch_the_package_to_install_is_named(site_packages, series_directory, tmp_path):
    message = refused("apply", site_packages, series_directory, PATH=str(tmp_path))
    assert "install the package `patch`" in message


def test_patches_that_are_not_those_of_the_manifest_are_refused(site_packages, series_directory, tmp_path):
    other = tmp_path / "series"
    shutil.copytree(series_directory, other)
    path = other / VERSION / "sglang.srt.deep.beta.patch"
    path.write_text(path.read_text().replace("VALUE = 2", "VALUE = 3"))
    assert "build it again" in refused("apply", site_packages, other)


def test_a_run_beside_another_is_refused(site_packages, series_directory):
    descriptor = os.open(site_packages, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "another run" in refused("apply", site_packages, series_directory)
    finally:
        os.close(descriptor)


class Killed(BaseException):
    """Stands for a kill: no handler of the code under test catches it."""


@given(data=st.data())
def test_a_run_killed_anywhere_is_completed_by_the_next_one(data, series_directory, tmp_path_factory):
    site_packages = make_site_packages(tmp_path_factory.mktemp("killed"))
    pristine = snapshot(site_packages)
    known = series.load(site_packages, series_directory)
    to = data.draw(st.sampled_from(["applied", "pristine"]))
    if to == "pristine":
        patching.convert(site_packages, known, "applied")
    # Each step on the way to a replaced file is a place to be killed at.
    left = data.draw(st.integers(0, 12))

    def killed_after(function):
        def wrapper(*arguments, **keywords):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*arguments, **keywords)

        return wrapper

    with pytest.MonkeyPatch.context() as context:
        for name in ("_prepare", "_remove_compiled", "_sync"):
            context.setattr(patching, name, killed_after(getattr(patching, name)))
        context.setattr(Path, "replace", killed_after(Path.replace))
        context.setattr(shutil, "rmtree", lambda *arguments, **keywords: None)  # a killed run cleans nothing up
        try:
            patching.convert(site_packages, known, to)
            completed = True
        except Killed:
            completed = False
    states = {found.state for found in patching.examine(site_packages, known)}
    assert "unknown" not in states
    assert completed <= (states == {to})

    patching.convert(site_packages, known, to)
    assert patching.state_of(patching.examine(site_packages, known)) == to
    assert not list(site_packages.glob(".spec_gate-*"))
    if to == "pristine":
        assert snapshot(site_packages) == pristine
    shutil.rmtree(site_packages)


def test_a_series_that_does_not_fit_leaves_everything_as_it_was(site_packages, series_directory, tmp_path):
    other = tmp_path / "series"
    shutil.copytree(series_directory, other)
    manifest = other / VERSION / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"][-1]["patched_sha256"] = "0" * 64
    manifest.write_text(json.dumps(document))
    assert "build the series again" in refused("apply", site_packages, other)


def test_building_twice_gives_the_same_bytes(site_packages, series_directory, tmp_path):
    other = tmp_path / "series"
    shutil.copytree(series_directory, other)
    run("spec_gate.series", "build", site_packages, other)
    assert snapshot(other) == snapshot(series_directory)


def test_building_from_a_changed_patch_gives_another_id(site_packages, series_directory, tmp_path):
    other = tmp_path / "series"
    shutil.copytree(series_directory, other)
    path = other / VERSION / "sglang.srt.deep.beta.patch"
    path.write_text(path.read_text().replace("VALUE = 2", "VALUE = 3"))
    run("spec_gate.series", "build", site_packages, other)
    assert series.load(site_packages, other).id != series.load(site_packages, series_directory).id
    assert patch("apply", site_packages, other)["changed"]


def test_a_patch_that_does_not_register_its_module_is_not_built(site_packages, series_directory, tmp_path):
    other = tmp_path / "series"
    shutil.copytree(series_directory, other)
    path = other / VERSION / "sglang.gamma.patch"
    path.write_text("--- a\n+++ b\n@@ -1,1 +1,2 @@\n+import sys\n import re\n")
    result = run("spec_gate.series", "build", site_packages, other, check=False)
    assert result.returncode == 1
    assert "register(__name__" in result.stderr
