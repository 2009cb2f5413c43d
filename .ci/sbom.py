"""A wheel's bill of materials, as CycloneDX 1.6: `python .ci/sbom.py WHEEL [FILE]`.

It is made from the wheel itself: its name, version, licence and hash, and what it asks pip for. It
also names the files with machine code in the wheel, and the torch that each adapter in it was
compiled for. FILE is WHEEL with `.cdx.json` behind it unless given.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_ADAPTER = re.compile(r"/_prebuilt/torch([^-/]+)-")
_BINARY = (".so", ".fatbin", ".cubin")


def bill(wheel: Path) -> dict[str, Any]:
    """The document; raises ValueError for a file that is no wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = [name for name in names if name.endswith(".dist-info/METADATA")]
        if len(about) != 1:
            raise ValueError(f"{wheel} is no wheel: it has {len(about)} files METADATA")
        fields = Parser().parsestr(archive.read(about[0]).decode())
        binaries = {name: archive.read(name) for name in names if name.endswith(_BINARY)}
    digest = sha256(wheel.read_bytes())
    own = package(fields["Name"], fields["Version"])
    own["hashes"] = [digest]
    if licence := fields["License-Expression"] or fields["License"]:
        own["licenses"] = [{"expression": licence}]
    needed = [dependency(line) for line in fields.get_all("Requires-Dist", [])]
    needed = [component for component in needed if component]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # The same wheel has the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest['content'])}",
        "version": 1,
        "metadata": {"component": own},
        "components": needed + [binary(name, data) for name, data in sorted(binaries.items())],
        "dependencies": [
            {
                "ref": own["bom-ref"],
                "dependsOn": sorted(component["bom-ref"] for component in needed),
            }
        ],
    }


def sha256(data: bytes) -> dict[str, str]:
    """As CycloneDX writes a hash."""
    return {"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}


def package(name: str, version: str = "") -> dict[str, Any]:
    """A Python package; without a version where any that fits will do."""
    project = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{project}" + (f"@{version}" if version else "")
    made = {"type": "library", "bom-ref": purl, "name": project, "purl": purl}
    return {**made, "version": version} if version else made


def dependency(line: str) -> dict[str, Any] | None:
    """Return the requirement if the wheel always asks for it; None if only an extra does."""
    needed = Requirement(line)
    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
        return None
    asked = [{"name": "deepytorch:requires", "value": str(needed.specifier) or "any"}]
    return {**package(needed.name), "properties": asked}


def binary(name: str, data: bytes) -> dict[str, Any]:
    """A file with machine code inside the wheel."""
    made: dict[str, Any] = {"type": "file", "bom-ref": f"file:{name}", "name": name}
    made["hashes"] = [sha256(data)]
    if found := _ADAPTER.search(name):
        made["properties"] = [{"name": "deepytorch:built-for-torch", "value": found.group(1)}]
    return made


def main(wheel: Path, file: Path) -> None:
    """Write the document of `wheel` to `file`."""
    file.write_text(json.dumps(bill(wheel), indent=1) + "\n")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:3]]
    main(given[0], given[1] if len(given) > 1 else Path(f"{given[0]}.cdx.json"))
