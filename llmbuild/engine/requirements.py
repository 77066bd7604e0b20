"""Whether the packages installed here can run an engine, from the version ranges its manifest states."""

from __future__ import annotations

from llmbuild.engine.manifest import TargetSection
from llmbuild.errors import EngineError


def unmet_requirements(target: TargetSection) -> list[tuple[str, str, str | None]]:
    """Return (package, range, installed version or None) for each requirement that does not hold here.

    Raises:
        EngineError: A range is not a version specifier.
    """
    from importlib.metadata import PackageNotFoundError, version

    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    unmet: list[tuple[str, str, str | None]] = []
    for package, text in sorted(target.requires.items()):
        try:
            accepted = SpecifierSet(text)
        except InvalidSpecifier as error:
            raise EngineError(
                f"the engine's version range {text!r} of {package} cannot be read",
                where="engine.json: target.requires",
                hint="convert the model again",
            ) from error
        try:
            installed: str | None = version(package)
        except PackageNotFoundError:
            installed = None
        if installed is None or not accepted.contains(installed, prereleases=True):
            unmet.append((package, text, installed))
    return unmet


def check_requirements(target: TargetSection) -> None:
    """Raise EngineError when a package is missing or outside the range the engine was built for."""
    unmet = unmet_requirements(target)
    if not unmet:
        return
    facts = [f"{package}{text} ({installed or 'not'} installed)" for package, text, installed in unmet]
    install = " ".join(f'"{package}{text}"' for package, text, _ in unmet)
    raise EngineError(
        f"this engine needs {', '.join(facts)}",
        where="engine.json: target.requires",
        hint=f"pip install {install}, or convert the model again with the packages installed here",
    )
