"""apply and restore through the real command line, on real installations."""

from __future__ import annotations

from tests.support import DEMO, P1, files, patched, snapshot


def test_a_round_trip_leaves_every_byte_mode_time_and_owner_as_installed(venv, guarded):
    before = snapshot(venv.site)
    guarded.spawn("apply", "p1")
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert venv.run("import demopkg.core as c; print(c.answer())") == "BBB"
    guarded.spawn("restore", "--verify")
    assert snapshot(venv.site) == before


def test_a_plain_folder_goes_there_and_back(site, rooted):
    before = snapshot(site)
    rooted("apply", "p1")
    assert files(site) == patched(DEMO["1.0"], P1, "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before
