"""The configuration of a run: recipe, command line and defaults become one checked RunConfig.

    paceline train recipe=quickstart trainer.steps=200 data.prompts=prompts.jsonl

A recipe is a YAML file, of this package (a name) or the reader's own (a path); `extends: NAME` puts
it on top of another. `key=value` arguments go on top of that, `objective.0.loss.kl=0.5` reaches
into a list. Unknown keys are refused. Nothing here imports torch or ray.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.actors.config import (
    CacheConfig,
    ClusterConfig,
    RolloutConfig,
    TrackerConfig,
    TrainerConfig,
)
from paceline.models.config import (
    DataConfig,
    DrafterConfig,
    EvaluateConfig,
    ObjectiveConfig,
    StrictModel,
    TargetConfig,
)
from paceline.pipelines.recipe_files import (
    ConfigError,
    Source,
    one_line,
    read_yaml,
    recipe_sources,
)

RESOLVED_CONFIG = "config.yaml"
"""File of a run's folder that holds its resolved configuration."""

WORKFLOWS = ("collect", "train", "evaluate", "export", "report", "bench")

REQUIRED_KEYS = {
    "evaluate": ("drafter_dir",),
    "export": ("drafter_dir", "out"),
    "report": ("run",),
}

# Spellings of the command line that are shorter than the key they stand for.
SHORT_KEYS = {
    "train": {"target": "target.model"},
    "collect": {"target": "target.model"},
    "evaluate": {"target": "target.model", "drafter": "drafter_dir"},
    "export": {"target": "target.model", "drafter": "drafter_dir"},
    "report": {},
    "bench": {"target": "target.model", "drafter": "drafter_dir"},
}


class RunConfig(StrictModel):
    """Everything one run depends on. Keys that a workflow has no use for are left alone."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str = "run"
    out: str | None = None
    """Folder of everything the run leaves; None is runs/NAME."""
    seed: int = 0
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    cache: CacheConfig = CacheConfig()
    drafter: DrafterConfig = DrafterConfig()
    objective: tuple[ObjectiveConfig, ...] = Field(default=(ObjectiveConfig(),), min_length=1)
    trainer: TrainerConfig = TrainerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracker: TrackerConfig = TrackerConfig()
    cluster: ClusterConfig = ClusterConfig()
    resume: str | None = None
    """train: the run folder (or the name of a run under runs/) to continue."""
    drafter_dir: str | None = None
    """evaluate, export, bench: folder of a trained drafter, `drafter=DIR` on the command line."""
    run: str | None = None
    """report: folder of a run."""
    format: Literal["vllm", "sglang", "speculators"] = "vllm"
    """export: the engine that will load the drafter."""
    json_path: str | None = Field(default=None, alias="json")
    """evaluate, bench: file that gets the figures."""
    small: bool = False
    """bench: the same on less, to see that it runs."""

    @property
    def out_dir(self) -> Path:
        return Path(self.out) if self.out is not None else Path("runs") / self.name

    @property
    def drafter_folder(self) -> Path:
        assert self.drafter_dir is not None, "load_config asks for it where it is needed"
        return Path(self.drafter_dir)

    @property
    def run_folder(self) -> Path:
        assert self.run is not None, "load_config asks for it where it is needed"
        return Path(self.run)

    @field_validator("name")
    @classmethod
    def _name_is_one_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{name!r} is not a folder name: use letters, digits, '.', '_', '-'")
        return name

    @field_validator("tracker")
    @classmethod
    def _no_password_on_record(cls, tracker: TrackerConfig) -> TrackerConfig:
        if tracker.uri and re.search(r"://[^/\s]*:[^/\s]*@", tracker.uri):
            raise ValueError(
                "tracker.uri holds a password, and the configuration is written into every run: "
                "set MLFLOW_TRACKING_URI in the environment instead"
            )
        return tracker

    def to_yaml(self) -> str:
        """All keys, defaults included, in a form that load_config reads back."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False)


def recipe_config(recipe: str) -> RunConfig:
    """A recipe as it stands, nothing overridden."""
    return load_config("train", [f"recipe={recipe}"])


def load_config(workflow: str, argv: Sequence[str]) -> RunConfig:
    """The configuration of `paceline WORKFLOW argv...`.

    Raises ConfigError for an argument that is not key=value, a recipe that is not there or not
    YAML, an unknown key, a value of the wrong kind, and a key that the workflow needs and lacks.
    """
    assert workflow in WORKFLOWS, workflow
    given = _split_arguments(workflow, argv)
    recipe = given.pop("recipe", None)
    sources = [] if recipe is None else recipe_sources(recipe)
    if workflow == "train" and "resume" in given:
        if recipe is not None or "out" in given:
            raise ConfigError(
                "resume= continues a run in its own folder with its own configuration: "
                "leave out recipe= and out="
            )
        sources = [_resumed_source(given)]
    merged = _merge_sources(sources)
    if recipe is not None:
        merged.setdefault("name", Path(recipe).stem)
    sources.append(Source("the command line", _nested(given)))
    values = _override(merged, given)
    config = _validate(values, sources)
    for key in REQUIRED_KEYS.get(workflow, ()):
        if values.get(key) is None:
            raise ConfigError(f"paceline {workflow} needs {key.removesuffix('_dir')}=DIR")
    return config


def _split_arguments(workflow: str, argv: Sequence[str]) -> dict[str, str]:
    """key -> text of value, in order, short spellings replaced."""
    given: dict[str, str] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(
                f"argument {argument!r} is not key=value, for example trainer.steps=200"
            )
        given[SHORT_KEYS[workflow].get(key, key)] = value
    return given


def _resumed_source(given: dict[str, str]) -> Source:
    """The configuration the run was started with; given["resume"] becomes the run's folder."""
    run = Path(given["resume"])
    folder = run if run.is_dir() else Path("runs") / run
    path = folder / RESOLVED_CONFIG
    if not path.is_file():
        raise ConfigError(
            f"resume={run}: {path} does not exist; give the folder of a run that was started"
        )
    values = read_yaml(path)
    values["out"] = given["resume"] = str(folder)
    return Source(str(path), values)


def _merge_sources(sources: Sequence[Source]) -> dict[str, Any]:
    """Later sources win; mappings are merged, lists replaced."""
    merged = OmegaConf.to_container(OmegaConf.merge({}, *(source.values for source in sources)))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _override(merged: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    config = OmegaConf.create(merged)
    for key, text in given.items():
        try:
            # OmegaConf's reading of a scalar, not PyYAML's, so that 6e-4 is a number.
            value = OmegaConf.from_dotlist([f"value={text}"])["value"]
            OmegaConf.update(config, key, value, force_add=True)
            OmegaConf.resolve(config)
        except (yaml.YAMLError, OmegaConfBaseException, IndexError, TypeError) as error:
            raise ConfigError(f"{key}={text} on the command line: {one_line(error)}") from error
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _nested(given: dict[str, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key in given:
        node = nested
        for part in key.split("."):
            node = node.setdefault(part, {})
    return nested


def _validate(values: dict[str, Any], sources: Sequence[Source]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        loc = first["loc"]
        where = f" ({_origin(loc, sources)})"
        key = ".".join(str(part) for part in loc)
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {key}{where}; {_remedy(loc)}") from error
        message = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict | BaseModel) else f", got {first['input']!r}"
        raise ConfigError(f"{key}: {message}{got}{where}") from error


def _origin(loc: Sequence[int | str], sources: Sequence[Source]) -> str:
    """The last place that gave the key, or the nearest part above it."""
    for length in range(len(loc), 0, -1):
        for source in reversed(sources):
            node: Any = source.values
            for part in loc[:length]:
                if isinstance(node, list) and isinstance(part, int) and part < len(node):
                    node = node[part]
                elif isinstance(node, dict) and str(part) in node:
                    node = node[str(part)]
                else:
                    break
            else:
                return f"from {source.where}"
    return "from the defaults"


def _remedy(loc: Sequence[int | str]) -> str:
    """Which known key an unknown one was meant to be: of the same section, else of any."""
    model: type[BaseModel] = RunConfig
    prefix = ""
    for part in loc[:-1]:
        model = model if isinstance(part, int) else _sections(model)[part]
        prefix += f"{part}."
    unknown = str(loc[-1])
    here = difflib.get_close_matches(unknown, _key_names(model), n=1)
    if here:
        return f"the nearest known key is {prefix}{here[0]}"
    anywhere = _all_keys(RunConfig)
    for key in difflib.get_close_matches(unknown, [k.split(".")[-1] for k in anywhere], n=1):
        return f"the nearest known key is {next(k for k in anywhere if k.split('.')[-1] == key)}"
    return f"known keys are {', '.join(prefix + key for key in _key_names(model))}"


def _key_names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Fields that are models themselves, or tuples of models."""
    sections = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                sections[name] = kind
    return sections


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    sections = _sections(model)
    keys = [prefix + name for name in _key_names(model) if name not in sections]
    for name, section in sections.items():
        item = ".0" if name == "objective" else ""  # the one section that is a list
        keys += _all_keys(section, f"{prefix}{name}{item}.")
    return keys
