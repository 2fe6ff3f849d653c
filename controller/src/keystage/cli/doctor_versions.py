"""Whether all parts are of one version. Pure but for `own`, which reads this package's."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

from keystage.cli.doctor_report import Check, judged

HERE = "this command"
_RELEASE = re.compile(r"v?(\d+\.\d+[0-9A-Za-z.+-]*)")


def own() -> str:
    """Version of this package, empty where it is not installed as one."""
    try:
        return importlib.metadata.version("keystage")
    except importlib.metadata.PackageNotFoundError:
        return ""


def of_image(image: str) -> str:
    """Version by an image's tag, empty where that is none (`latest`, a digest)."""
    name = image.rpartition("/")[2].partition("@")[0]
    found = _RELEASE.fullmatch(name.partition(":")[2])
    return found[1] if found else ""


def check(area: str, parts: Mapping[str, str]) -> Check:
    """Whether parts agree; one that does not tell is left out.

    Args:
        area: of the check.
        parts: their versions, empty where they do not tell.
    """
    known = {part: version for part, version in parts.items() if version and not version.startswith("0+")}
    versions = sorted(set(known.values()), reverse=True)  # of as many the newest
    most = max(versions, key=list(known.values()).count, default="")
    others = sorted(part for part, version in known.items() if version != most)
    return judged(
        area,
        "versions",
        "the same of all parts",
        ", ".join(f"{part} {version}" for part, version in known.items()) or "none told",
        "warn",
        f"they may not understand each other; {most} is not that of {', '.join(others)}: restart "
        "`keystage up` after an upgrade, helm upgrade with the chart of this version, or install "
        f"keystage=={most} where the command runs",
        is_met=len(versions) <= 1,
    )
