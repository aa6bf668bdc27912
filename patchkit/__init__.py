"""patchkit: source patches for installed Python packages.

The tree is exactly pristine or exactly patched, you can prove which, and it never changes under a
process that uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkit.sessions import session

__all__ = ["__version__", "session"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: `patchkit check` needs none of it.
    if name == "session":
        from patchkit.sessions import session

        return session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
