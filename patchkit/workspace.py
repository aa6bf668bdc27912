"""What a command works on: the environment meant, its targets, and the catalog of patches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from patchkit.catalog import Catalog, PatchFolderError
from patchkit.errors import USAGE, PatchkitError
from patchkit.journal import Journal
from patchkit.state import JOURNAL, STATE, State
from patchkit.target import Environment, NotInstalledError, Target, environment, locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.catalog import Patch
    from patchkit.state import Applied


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
        """The installed ``distribution``. Raises NotInstalledError, UninstalledError if patches are left."""
        try:
            found = locate(distribution, self.environment, lambda: self._packages(distribution))
        except NotInstalledError:
            for root in self.state_roots():
                if left := _applied(root, distribution):
                    raise UninstalledError(root, left) from None
            raise
        if self.environment.python is None and _is_only_left(found):
            raise UninstalledError(found.root, _applied(found.root, distribution))
        return found

    def target_of(self, patches: Sequence[Patch]) -> Target:
        """The one target of all ``patches``."""
        names = sorted({patch.distribution for patch in patches})
        if len(names) != 1:
            raise SeveralDistributionsError(names)
        return self.target(names[0])

    def target_in(self, root: str, distribution: str) -> Target:
        """``distribution`` as it is installed in ``root``, or as one that is gone from there."""
        try:
            target = self.target(distribution)
        except NotInstalledError:
            target = None
        return (
            target if target and target.root == root else _uninstalled(root, distribution, self.environment)
        )

    def targets(self) -> list[Target]:
        """Every installed distribution that a patch of the catalog, of a state or of a journal is for.

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
            journal = Journal.load(root)
            patched = [applied.distribution for applied in State.load(root).stack]
            patched += [str(journal.history["distribution"])] if journal is not None else []
            for name in patched:
                if (root, name) not in found:
                    found[root, name] = self.target_in(root, name)
        if not found:
            raise NotInstalledError(
                "' or '".join(names) or "any patched distribution",
                self.environment.label,
                "name the environment with --python or --root, and their patches with --patches",
            )
        return list(found.values())

    def state_roots(self) -> list[str]:
        """Roots of the environment that have a state or an open journal, installed distribution or not."""
        roots = {os.path.realpath(path) for path in self.environment.paths}
        return sorted(
            root
            for root in roots
            if any(os.path.isfile(os.path.join(root, name)) for name in (STATE, JOURNAL))
        )

    def _distributions(self) -> list[str]:
        names = set()
        for name in self.catalog.names():
            try:
                names.add(self.catalog[name].distribution)
            except PatchFolderError:
                continue  # a broken patch elsewhere does not stop this command; `list` and `lint` name it
        return sorted(names)

    def _packages(self, distribution: str) -> list[str]:
        """Top-level names that patches of ``distribution`` touch, where nothing installed says them."""
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


class UninstalledError(NotInstalledError):
    """The distribution was uninstalled while patches were applied to it."""

    code = "uninstalled"

    def __init__(self, root: str, left: Sequence[Applied]) -> None:
        names = ", ".join(f"'{applied.patch}'" for applied in left)
        was = f"{left[0].distribution} {left[0].release or '(release unknown)'}"
        super().__init__(
            left[0].distribution,
            f"{root}: {was} was uninstalled with {names} applied",
            f"install it again, or 'patchkit restore' clears what is left of {names}",
        )


def _applied(root: str, distribution: str) -> list[Applied]:
    return [applied for applied in State.load(root).stack if applied.distribution == distribution]


def _is_only_left(target: Target) -> bool:
    """Whether a folder without metadata holds no more of ``target`` than its patches left after an uninstall:
    nothing says its release any more, and no file of it that they changed is there.
    """
    applied = _applied(target.root, target.distribution) if target.metadata is None else []
    changed = [pin.path for one in applied for pin in one.manifest.files if pin.before and pin.after]
    return (
        bool(changed)
        and target.release is None
        and applied[0].release is not None
        and not any(os.path.lexists(os.path.join(target.root, path)) for path in changed)
    )


def _uninstalled(root: str, distribution: str, env: Environment) -> Target:
    """A distribution that was removed while a patch was applied: only our leftovers are there."""
    return Target(distribution, None, root, (), None, env.prefix)
