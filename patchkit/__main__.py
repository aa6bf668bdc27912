from __future__ import annotations

from patchkit.cli.main import main

main()
