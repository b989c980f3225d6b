"""Recipes as files: where they are, and what one becomes together with those it extends."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

RECIPES_FOLDER = Path(__file__).resolve().parent / "recipes"


class ConfigError(ValueError):
    """The reader can mend it: the message names the key, where it is given and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Keys given in one place."""

    where: str  # "recipes/eagle3.yaml" or "the command line"
    values: dict[str, Any]


def recipe_names() -> list[str]:
    """Names of the recipes of this package."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def recipe_sources(recipe: str) -> list[Source]:
    """The files behind a recipe, base first: what it extends, then itself.

    Raises ConfigError when a file is not there, is not YAML, or extends itself.
    """
    sources: list[Source] = []
    seen: list[Path] = []
    folder = Path()
    name: Any = recipe
    while name is not None:
        path = _recipe_path(name, folder)
        if path in seen:
            raise ConfigError(f"{path}: extends itself by way of {seen[-1]}; remove one `extends`")
        seen.append(path)
        values = read_yaml(path)
        folder = path.parent
        name = values.pop("extends", None)
        if not isinstance(name, str | None):
            raise ConfigError(f"{path}: extends: {name!r} is not a name; give one recipe or file")
        sources.insert(0, Source(str(path), values))
    return sources


def _recipe_path(name: str, folder: Path) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = (folder / name).resolve()
        if not path.is_file():
            raise ConfigError(f"recipe file {path} does not exist; `paceline recipes` lists names")
        return path
    path = RECIPES_FOLDER / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        raise ConfigError(
            f"there is no recipe {name!r}" + (f", did you mean {near[0]!r}" if near else "") + "? "
            f"Recipes are {', '.join(recipe_names())}, or a file whose name ends in .yaml"
        )
    return path


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises ConfigError naming the file when there is none."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a YAML file of keys: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a YAML file of keys: it holds a list")
    return {str(key): value for key, value in values.items()}


def one_line(error: Exception) -> str:
    """The message of a library's error, without its line breaks."""
    return " ".join(str(error).split())
