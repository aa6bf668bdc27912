"""apply and restore through the real command line, on real installations."""

from __future__ import annotations

import json

from tests import support
from tests.support import DEMO, P1, Kit, Venv, files, patched, snapshot


def test_a_round_trip_leaves_every_byte_mode_time_and_owner_as_installed(venv, guarded):
    before = snapshot(venv.site)
    guarded.spawn("apply", "p1")
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert venv.run("import demopkg.core as c; print(c.answer())") == "BBB"
    guarded.spawn("restore", "--verify")
    assert snapshot(venv.site) == before


def test_each_file_is_told_with_what_happens_to_it(site, rooted, patches):
    before = {f"demopkg/{name}.py": b"x = 1\n" * 9 for name in ("changed", "old", "gone")}
    for path, data in before.items():
        (site / path).write_bytes(data)
    changes = {
        "demopkg/changed.py": b"x = 2\n",
        "demopkg/fresh.py": b"x = 3\n",
        "demopkg/gone.py": None,
        "demopkg/new.py": before["demopkg/old.py"] + b"y = 1\n",
    }
    support.write_patch(patches, "all", before, changes, renames={"demopkg/new.py": "demopkg/old.py"})
    told = rooted("apply", "all").out.splitlines()
    assert {line.strip() for line in told} >= {
        "M demopkg/changed.py",
        "A demopkg/fresh.py",
        "D demopkg/gone.py",
        "R demopkg/new.py (from demopkg/old.py)",
    }
    told = rooted("restore", "all").out.splitlines()
    assert {line.strip() for line in told} >= {
        "M demopkg/changed.py",
        "D demopkg/fresh.py",
        "A demopkg/gone.py",
        "R demopkg/old.py (from demopkg/new.py)",
    }


def test_a_plain_folder_goes_there_and_back(site, rooted):
    before = snapshot(site)
    rooted("apply", "p1")
    assert files(site) == patched(DEMO["1.0"], P1, "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_two_distributions_of_one_environment_share_a_root_and_nothing_else(venv, kit, patches, tmp_path):
    module = {"otherpkg/__init__.py": b"x = 1\n"}
    venv.uv("install", support.build_wheel(tmp_path / "other", "3.0", module, name="otherpkg"))
    support.write_patch(
        patches,
        "q1",
        module,
        {"otherpkg/__init__.py": b"x = 2\n"},
        releases=("3.0",),
        distribution="otherpkg",
    )
    before = snapshot(venv.site)
    kit("apply", "p1")
    kit("apply", "q1")
    assert "several distributions" in kit("apply", "p1", "q1", code=2).err
    kit("restore", "p1", "--verify")
    assert venv.run("import otherpkg; print(otherpkg.x)") == "2"
    kit("apply", "p1")
    kit("restore", "--verify")
    assert snapshot(venv.site) == before


def test_a_name_too_long_for_its_backup_is_an_error_before_anything_changed(site, rooted, patches):
    path = "demopkg/" + "n" * 250 + ".py"
    (site / path).write_bytes(b"1\n")
    support.write_patch(patches, "long", {path: b"1\n"}, {path: b"2\n"})
    before = snapshot(site)
    assert "File name too long" in rooted("apply", "long", code=6).err
    assert snapshot(site) == before


def test_an_editable_checkout_is_patched_where_it_lies(tmp_path, patches):
    checkout = tmp_path / "checkout"
    for path, data in DEMO["1.0"].items():
        file = checkout / "src" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    venv = Venv.create(tmp_path / "venv")
    info = venv.site / "demopkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demopkg\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(
        json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    )
    (info / "RECORD").write_text("demopkg.pth,,\ndemopkg-1.0.dist-info/RECORD,,\n")
    (venv.site / "demopkg.pth").write_text(f"{checkout}/src\n")
    kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
    before = snapshot(checkout)
    kit("apply", "p1")
    assert venv.run("import demopkg.core as c; print(c.answer())") == "BBB"
    kit("restore", "--verify")
    assert snapshot(checkout) == before
