"""Typed TOML: tables become frozen dataclasses; an unknown key names its nearest neighbour; `a.b=value` overrides."""

import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from gyre.contracts.errors import ConfigError

T = TypeVar("T")
_ENVIRONMENT = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError naming the file and the line."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def apply_overrides(tables: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of `tables` with each `section.key=value` set; the value is TOML, a bare word is a string.

    Raises:
        ConfigError: an override is not `key=value`.
    """
    result = _copy(tables)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"--set {override!r}: write it as section.key=value")
        *parents, last = path.strip().split(".")
        table = result
        for name in parents:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override!r}: {name} is a value, not a section")
        table[last] = _toml_value(text.strip())
    return result


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parse(tables: Mapping[str, Any], type_: type[T], where: str) -> T:
    """Validate `tables` into the dataclass `type_`.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing key or a wrong value, with its path.
    """
    _check_keys(tables, type_, "")
    try:
        return msgspec.convert(tables, type_, strict=True)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {str(error).replace('`$.', '`')}") from None


def _check_keys(tables: Mapping[str, Any], type_: type, prefix: str) -> None:
    hints = typing.get_type_hints(type_)
    known = [f.name for f in dataclasses.fields(type_)]
    for key, value in tables.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"; did you mean {prefix + near[0]!r}?" if near else f"; known here: {', '.join(known)}"
            raise ConfigError(f"unknown key {prefix + key!r}{hint}")
        nested = _dataclass_in(hints[key])
        if nested and isinstance(value, Mapping):
            _check_keys(value, nested, f"{prefix}{key}.")
        elif nested and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    _check_keys(item, nested, f"{prefix}{key}[{index}].")


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass in `X`, `X | None` or `tuple[X, ...]`."""
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple, list):
        return next((t for t in typing.get_args(hint) if dataclasses.is_dataclass(t)), None)
    return None


def expand_environment(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace `${NAME}` by the environment's value. Raises ConfigError for a name that is not set."""
    values = os.environ if environment is None else environment

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(f"{text!r} refers to the environment variable {match[1]}, which is not set")
        return values[match[1]]

    return _ENVIRONMENT.sub(value_of, text)


def to_toml(value: Any) -> str:
    """A dataclass as TOML; None is left out, nested dataclasses become tables."""
    lines: list[str] = []
    _emit(msgspec.to_builtins(value), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _emit(tables: dict[str, Any], prefix: str, lines: list[str]) -> None:
    nested = {k: v for k, v in tables.items() if isinstance(v, dict)}
    for key, value in tables.items():
        if key not in nested and value is not None:
            lines.append(f"{key} = {_literal(value)}")
    for key, table in nested.items():
        lines.extend(["", f"[{prefix}{key}]"])
        _emit(table, f"{prefix}{key}.", lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
