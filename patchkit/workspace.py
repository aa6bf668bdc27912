"""What a command works on: the environment meant, its targets, and the catalog of patches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from patchkit.catalog import Catalog, PatchFolderError
from patchkit.errors import USAGE, PatchkitError
from patchkit.state import STATE, State
from patchkit.target import Environment, NotInstalledError, Target, environment, locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.catalog import Patch


class SeveralDistributionsError(PatchkitError):
    """Patches of different distributions were named together."""

    code = "several-distributions"
    exit_code = USAGE

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the patches belong to several distributions ({', '.join(names)})",
            hint="apply those of each by themselves",
        )


@dataclass(frozen=True)
class Workspace:
    python: str | None = None
    root: str | None = None
    patches: tuple[str, ...] = ()

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.patches)

    @cached_property
    def environment(self) -> Environment:
        return environment(self.python, self.root)

    def target(self, distribution: str) -> Target:
        """The installed ``distribution``; raises NotInstalledError."""
        return locate(distribution, self.environment, self._packages(distribution))

    def target_of(self, patches: Sequence[Patch]) -> Target:
        """The one target of all ``patches``."""
        names = sorted({patch.distribution for patch in patches})
        if len(names) != 1:
            raise SeveralDistributionsError(names)
        return self.target(names[0])

    def targets(self) -> list[Target]:
        """Every installed distribution that a patch of the catalog or of a state is for.

        Raises NotInstalledError when there is none.
        """
        found: dict[tuple[str, str], Target] = {}
        names = self._distributions()
        for name in names:
            try:
                target = self.target(name)
            except NotInstalledError:
                continue
            found[target.root, name] = target
        for root in self.state_roots():
            for applied in State.load(root).stack:
                if not any(key[0] == root and key[1] == applied.distribution for key in found):
                    found[root, applied.distribution] = _uninstalled(
                        root, applied.distribution, self.environment
                    )
        if not found:
            raise NotInstalledError(
                " or ".join(names) or "any patched distribution",
                self.environment.label,
                "name the environment with --python or --root",
            )
        return list(found.values())

    def state_roots(self) -> list[str]:
        """Roots of the environment that have a state, installed distribution or not."""
        roots = {os.path.realpath(path) for path in self.environment.paths}
        return sorted(root for root in roots if os.path.isfile(os.path.join(root, STATE)))

    def _distributions(self) -> list[str]:
        names = set()
        for name in self.catalog.names():
            try:
                names.add(self.catalog[name].distribution)
            except PatchFolderError:
                continue  # a broken patch elsewhere does not stop this command; `list` and `lint` name it
        return sorted(names)

    def _packages(self, distribution: str) -> list[str]:
        """Top-level names that patches of ``distribution`` touch; only a plain folder needs them."""
        if self.root is None:
            return []
        names = set()
        for name in self.catalog.names():
            try:
                patch = self.catalog[name]
                if patch.distribution == distribution:
                    names |= {
                        pin.path.split("/", 1)[0] for one in patch.variants for pin in one.manifest.files
                    }
            except PatchkitError:
                continue
        return sorted(names)


def _uninstalled(root: str, distribution: str, env: Environment) -> Target:
    """A distribution that was removed while a patch was applied: only our leftovers are there."""
    return Target(distribution, None, root, (), None, env.prefix)
