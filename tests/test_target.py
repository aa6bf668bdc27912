"""Which distribution, root and release are meant, without importing any of it."""

from __future__ import annotations

import os
import sys

import pytest

from patchkit.target import (
    AmbiguousInstallError,
    NoInterpreterError,
    NotARootError,
    NotInstalledError,
    environment,
    locate,
    read_record,
)
from tests import support
from tests.support import DEMO, Venv


def found(venv):
    return locate("demopkg", environment(str(venv.python)))


def test_a_wheel_in_another_environment(venv):
    target = found(venv)
    assert (target.distribution, target.release) == ("demopkg", "1.0")
    assert target.root == os.path.realpath(venv.site)
    assert target.packages == ("demopkg",)
    assert os.path.realpath(target.prefix) == os.path.realpath(venv.prefix)
    assert {entry.path for entry in target.record} >= set(DEMO["1.0"])
    assert target.owns("demopkg/new.py")
    assert not target.owns("other/new.py")


@pytest.mark.parametrize("name", ["Demo.Pkg", "demo_pkg", "DEMO--PKG"])
def test_names_are_compared_as_installers_do(tmp_path, name):
    venv = Venv.create(tmp_path / "venv")
    venv.uv("install", support.build_wheel(tmp_path, "3.0", {"demo_pkg/__init__.py": b""}, name="demo_pkg"))
    assert locate(name, environment(str(venv.python))).release == "3.0"


def test_nothing_of_the_target_is_run(tmp_path):
    venv = Venv.create(tmp_path / "venv")
    venv.uv(
        "install", support.build_wheel(tmp_path, "1.0", {"demopkg/__init__.py": b"raise SystemExit(9)\n"})
    )
    assert found(venv).release == "1.0"


def test_the_variables_and_the_working_directory_do_not_choose(venv, tmp_path, monkeypatch):
    decoy = tmp_path / "decoy/demopkg"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(decoy.parent))
    monkeypatch.chdir(decoy.parent)
    assert found(venv).root == os.path.realpath(venv.site)


def test_the_active_venv_is_the_default(venv, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", str(venv.prefix))
    assert os.path.realpath(environment().prefix) == os.path.realpath(venv.prefix)
    monkeypatch.delenv("VIRTUAL_ENV")
    assert environment().python == sys.executable


def test_a_plain_folder_takes_its_release_from_its_version_file(site):
    target = locate("demopkg", environment(root=str(site)))
    assert (target.release, target.metadata, target.record) == ("1.0", None, ())


def test_a_symlink_to_an_environment_is_the_environment(venv, tmp_path):
    (tmp_path / "link").symlink_to(venv.prefix)
    target = locate("demopkg", environment(str(tmp_path / "link/bin/python")))
    assert target.root == os.path.realpath(venv.site)


def test_two_metadata_folders_are_ambiguous(venv):
    (venv.site / "demopkg-0.9.dist-info").mkdir()
    with pytest.raises(AmbiguousInstallError, match="two metadata folders"):
        found(venv)


def test_what_is_not_there_is_said_with_where(tmp_path, site):
    empty = Venv.create(tmp_path / "empty")
    with pytest.raises(NotInstalledError, match="not installed in"):
        found(empty)
    with pytest.raises(NotARootError, match="no such folder"):
        environment(root=str(tmp_path / "nowhere"))
    with pytest.raises(NotARootError, match="not a folder"):
        environment(root=str(site / "demopkg/core.py"))
    with pytest.raises(NoInterpreterError, match="no such program"):
        environment(str(tmp_path / "python"))
    with pytest.raises(NoInterpreterError, match="does not answer as a Python interpreter"):
        environment("/bin/true")


def test_record_lines_of_every_kind(tmp_path):
    (tmp_path / "RECORD").write_bytes(
        b'"a, b.py",sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n'
        b"../../bin/tool,sha256=!!!,5\nnone.pyc,,\ncaf\xe9.txt,md5=abc,1\n\n"
    )
    entries = {entry.path: entry for entry in read_record(str(tmp_path))}
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert (entries["a, b.py"].sha256, entries["a, b.py"].size) == (empty, 0)
    assert entries["none.pyc"].sha256 is None
    assert entries[os.fsdecode(b"caf\xe9.txt")].sha256 is None
    assert read_record(str(tmp_path / "nowhere")) == ()
