"""Read a project's name, version, licence and requirements from the files of its tree, and write them."""

from __future__ import annotations

import configparser
import email.parser
import re
import tomllib
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from turnstile.swe.packages import pip


def read_metadata(tree: Path) -> Message:
    """Return the project's PKG-INFO, if possible one with requirements; an empty message if there is none.

    Requirements that it lacks are taken from `requires.txt`.
    """
    found = [tree / "PKG-INFO", *sorted(tree.glob("*.egg-info/PKG-INFO")), *sorted(tree.glob("*/*.egg-info/PKG-INFO"))]
    messages = [
        email.parser.Parser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
        for path in found
        if path.is_file()
    ]
    messages.sort(key=lambda message: "Requires-Dist" not in message)
    metadata = messages[0] if messages else Message()
    if "Requires-Dist" not in metadata:
        for line in _egg_requirements(tree):
            metadata["Requires-Dist"] = line
    return metadata


def _egg_requirements(tree: Path) -> Iterator[str]:
    """Yield the requirements in a `requires.txt` of older setuptools, as values of Requires-Dist."""
    for path in [*sorted(tree.glob("*.egg-info/requires.txt")), *sorted(tree.glob("*/*.egg-info/requires.txt"))]:
        extra, marker = "", ""
        for line in path.read_text(encoding="utf-8").splitlines():
            section = re.fullmatch(r"\[([^:\]]*):?(.*)\]", line.strip())
            if section:
                extra, marker = section[1], section[2]
            elif line.strip():
                clauses = [f"({marker})"] if marker else []
                clauses += [f'extra == "{extra}"'] if extra else []
                yield line.strip() + (f" ; {' and '.join(clauses)}" if clauses else "")
        return


def project_of(folder: Path, default: str) -> tuple[str, str]:
    """Return the name and version of the project in a folder; see `name_and_version`."""
    return name_and_version(_metadata_files(folder), default)


def _metadata_files(tree: Path) -> Mapping[str, str]:
    """Return the texts of pyproject.toml and setup.cfg by file name, without missing files."""
    files = [tree / file for file in ("pyproject.toml", "setup.cfg")]
    return {file.name: file.read_text("utf-8", "replace") for file in files if file.is_file()}


def name_and_version(texts: Mapping[str, str], default: str) -> tuple[str, str]:
    """Return a project's canonical name and cleaned version, or `default` and "0" if they are missing."""
    metadata = static_metadata(texts)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", str(metadata.get("Name") or default)).strip("-._")
    version = re.sub(r"[^A-Za-z0-9.]", "", str(metadata.get("Version") or "")) or "0"
    return canonicalize_name(name or "package"), version


def entry_points(tree: Path) -> str:
    """Return the project's entry points (plugins, commands) in the form of entry_points.txt; "" if it has none."""
    built = [*sorted(tree.glob("*.egg-info/entry_points.txt")), *sorted(tree.glob("*/*.egg-info/entry_points.txt"))]
    if built:
        return built[0].read_text(encoding="utf-8", errors="replace")
    project, config = _read_declarations(_metadata_files(tree))
    groups: dict[str, dict[str, str]] = dict(project.get("entry-points", {}))
    if "scripts" in project:
        groups["console_scripts"] = project["scripts"]
    lines = [f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in found.items())
             for group, found in groups.items()]  # fmt: skip
    if config.has_section("options.entry_points"):
        lines += [f"[{group}]\n{text.strip()}\n" for group, text in config.items("options.entry_points")]
    return "\n".join(lines)


def _read_declarations(texts: Mapping[str, str]) -> tuple[dict[str, Any], configparser.RawConfigParser]:
    """Return the `project` table of pyproject.toml, and setup.cfg; each is empty if missing or invalid."""
    try:
        project: dict[str, Any] = tomllib.loads(texts.get("pyproject.toml", "")).get("project", {})
    except tomllib.TOMLDecodeError:
        project = {}
    config = configparser.RawConfigParser()
    try:
        config.read_string(texts.get("setup.cfg", ""))
    except configparser.Error:
        config = configparser.RawConfigParser()
    return project, config


def static_metadata(texts: Mapping[str, str]) -> Message:
    """Return the metadata that pyproject.toml (PEP 621) or setup.cfg states, without running code.

    It has the field Dynamic if neither states the requirements.
    """
    metadata = Message()
    project, config = _read_declarations(texts)
    options = {name: dict(config[name]) if name in config else {} for name in ("metadata", "options")}
    extras = dict(config["options.extras_require"]) if "options.extras_require" in config else {}
    for key, value in (
        ("Name", project.get("name") or options["metadata"].get("name")),
        ("Version", project.get("version") or options["metadata"].get("version")),
        ("License", project.get("license") or options["metadata"].get("license")),
    ):
        if isinstance(value, dict):
            value = value.get("text")
        if isinstance(value, str) and not value.startswith(("attr:", "file:")):
            metadata[key] = value
    needed = [*project.get("dependencies", ()), *_lines(options["options"].get("install_requires", ""))]
    for line in needed:
        metadata["Requires-Dist"] = line
    optional = {**project.get("optional-dependencies", {}), **{name: _lines(text) for name, text in extras.items()}}
    for extra, lines in optional.items():
        for line in lines:
            bare, _, marker = line.partition(";")
            clauses = [f"({marker.strip()})"] if marker.strip() else []
            metadata["Requires-Dist"] = f"{bare.strip()}; {' and '.join([*clauses, f'extra == {extra!r}'])}"
    dynamic = "dependencies" in project.get("dynamic", ()) or not (project or options["options"])
    if dynamic and not needed:
        metadata["Dynamic"] = "Requires-Dist"
    return metadata


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def write_metadata(tree: Path, name: str, version: str) -> None:
    """Write a PKG-INFO like that of a source distribution, unless there is one.

    If no file states the requirements, they are taken from a build of the project.
    """
    if (tree / "PKG-INFO").is_file():
        return
    metadata = static_metadata(_metadata_files(tree))
    needs = [str(line) for line in metadata.get_all("Requires-Dist") or []]
    builds = any((tree / file).is_file() for file in ("setup.py", "pyproject.toml"))
    if "Dynamic" in metadata and builds:
        needs = pip.required_by(tree, f"{name}=={version}")
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    if "License" in metadata:
        lines.append(f"License: {str(metadata['License']).splitlines()[0]}")
    lines += [f"Requires-Dist: {line}" for line in needs]
    (tree / "PKG-INFO").write_text("\n".join(lines) + "\n", encoding="utf-8")
