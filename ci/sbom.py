# SPDX-License-Identifier: Apache-2.0
"""What a wheel is made of, as CycloneDX 1.6: upstream's wheel, patches, modules, and
what its metadata requires."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from patchtool.config import Layout, Pin, overlay_files
from patchtool.index import sha256_file

if TYPE_CHECKING:
    from ci.release import Wheel

SUFFIX = ".cdx.json"
LINE = "vllm-kv-tier:requirement"
"""The property with a requirement as the metadata has it."""


def _sha256(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def _file(name: str, digest: str) -> Component:
    return Component(
        name=name,
        bom_ref=name,
        type=ComponentType.FILE,
        hashes=_sha256(digest),
    )


def _base(pin: Pin) -> Component:
    version = pin.file.split("-")[1]
    return Component(
        name=pin.project,
        version=version,
        bom_ref=pin.file,
        hashes=_sha256(pin.sha256),
        purl=PackageURL("pypi", None, pin.project, version, {"file_name": pin.file}),
    )


def _required(line: str) -> Component:
    """A requirement; it has a version only where it allows a single one."""
    spec, _, marker = (part.strip() for part in line.partition(";"))
    name = re.split(r"[^A-Za-z0-9._-]", spec, maxsplit=1)[0]
    project = re.sub(r"[-_.]+", "-", name).lower()
    exact = re.search(r"==\s*([^,*\s]+)$", spec)
    version = exact[1] if exact else None
    return Component(
        name=project,
        version=version,
        bom_ref=line,
        scope=ComponentScope.OPTIONAL if "extra ==" in marker else None,
        purl=PackageURL("pypi", None, project, version),
        properties=[Property(name=LINE, value=line)],
    )


def sbom(layout: Layout, wheel: Wheel) -> str:
    """The document; the same wheel gives the same text."""
    digest = sha256_file(wheel.path)
    root = Component(
        name="vllm",
        version=wheel.version,
        bom_ref=wheel.path.name,
        type=ComponentType.LIBRARY,
        hashes=_sha256(digest),
        purl=PackageURL("pypi", None, "vllm", wheel.version),
    )
    patches: list[dict[str, str]] = wheel.info["patches"]  # type: ignore[assignment]
    required = dict.fromkeys(wheel.metadata.get_all("Requires-Dist", []))
    parts = [
        _base(wheel.base(layout)),
        *(_file(f"patches/{wheel.tag}/{p['name']}", p["sha256"]) for p in patches),
        *(_file(name, wheel.files[name]) for name in overlay_files(layout)),
        *map(_required, required),
    ]
    bom = Bom(components=parts, serial_number=uuid5(NAMESPACE_URL, f"sha256:{digest}"))
    bom.metadata.component = root
    bom.register_dependency(root, parts)
    output = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    data = json.loads(output.output_as_string())
    # The time at which this ran says nothing of the wheel.
    del data["metadata"]["timestamp"]
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_sbom(layout: Layout, wheel: Wheel) -> None:
    """Write it next to the wheel, as WHEEL.cdx.json."""
    path = wheel.path.with_name(wheel.path.name + SUFFIX)
    path.write_text(sbom(layout, wheel))
