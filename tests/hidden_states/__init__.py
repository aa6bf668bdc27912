"""Tests of the commands that need the extra ``[extract]``."""

import pytest

pytest.importorskip("torch", reason="the extra [extract] is not installed")
