"""patchkit: source patches for installed Python packages.

The tree is exactly pristine or exactly patched, you can prove which, and it never changes under a
process that uses it.
"""

from __future__ import annotations

__version__ = "0.1.0"
