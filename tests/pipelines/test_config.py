"""Recipes, overrides and the errors a reader of one can mend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from paceline.pipelines.config import WORKFLOWS, RunConfig, load_config, recipe_config
from paceline.pipelines.recipe_files import ConfigError, recipe_names, recipe_sources


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_survives_being_written_out(name: str, tmp_path: Path) -> None:
    config = recipe_config(name)
    assert config.name == name
    assert config.out_dir == Path("runs") / name
    resolved = write(tmp_path / "config.yaml", config.to_yaml())
    assert load_config("train", [f"recipe={resolved}"]) == config


def test_a_recipe_lies_on_top_of_what_it_extends() -> None:
    base, own = recipe_sources("quickstart")
    assert (Path(base.where).stem, Path(own.where).stem) == ("eagle3", "quickstart")
    config, eagle3 = recipe_config("quickstart"), recipe_config("eagle3")
    assert config.objective == eagle3.objective  # inherited
    assert config.drafter.draft_vocab_size == 4096  # overridden
    assert eagle3.drafter.draft_vocab_size == 32000
    assert config.drafter.backbone.kind == "autoregressive"  # merged within a section


def test_a_recipe_of_the_readers_own_extends_by_name_or_by_path(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "extends: debug\ntrainer: {steps: 7}\n")
    own = write(tmp_path / "own.yaml", "extends: ./base.yaml\nseed: 3\n")
    config = load_config("train", [f"recipe={own}"])
    assert (config.name, config.seed, config.trainer.steps) == ("own", 3, 7)
    assert config.target.model == "builtin:tiny-llama"


def test_lists_are_replaced_and_not_merged(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "extends: debug\nobjective: [{loss: {ce: 2.0}}]\n")
    (objective,) = load_config("train", [f"recipe={own}"]).objective
    assert (objective.loss.ce, objective.loss.kl, objective.label) == (2.0, 0.0, "data")


def test_arguments_reach_into_sections_and_lists_and_the_last_one_wins() -> None:
    config = load_config(
        "train",
        [
            "recipe=debug",
            "trainer.lr=6e-4",
            "trainer.steps=5",
            "trainer.steps=9",
            "objective.0.loss.tv=0.25",
            "target.tap_layer_ids=[0, 1]",
            "data.limit=null",
            "data.prompts=a=b.jsonl",
            "name=2024",
        ],
    )
    assert config.trainer.lr == 6e-4
    assert config.trainer.steps == 9
    assert (config.objective[0].loss.kl, config.objective[0].loss.tv) == (1.0, 0.25)
    assert config.target.tap_layer_ids == (0, 1)
    assert config.data.limit is None
    assert config.data.prompts == "a=b.jsonl"
    assert config.name == "2024"


def test_only_keys_that_were_given_count_as_set() -> None:
    config = load_config("evaluate", ["drafter=d", "data.limit=3"])
    assert config.model_fields_set == {"drafter_dir", "data"}
    assert config.data.model_fields_set == {"limit"}


def test_short_spellings_of_evaluate_and_export() -> None:
    config = load_config("evaluate", ["drafter=runs/x/drafter", "target=org/model", "json=o.json"])
    assert config.drafter_dir == "runs/x/drafter"
    assert config.target.model == "org/model"
    assert config.json_path == "o.json"
    config = load_config("export", ["drafter=d", "format=sglang", "out=o"])
    assert (config.drafter_dir, config.format, config.out) == ("d", "sglang", "o")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        # An unknown key: where it is, and the nearest known one.
        (["trainer.stpes=3"], ["trainer.stpes", "the command line", "trainer.steps"]),
        (["batch_tokens=3"], ["batch_tokens", "the command line", "trainer.batch_tokens"]),
        (["objective.0.loss.klx=1"], ["objective.0.loss.klx", "objective.0.loss.kl"]),
        (["qqqq=1"], ["qqqq", "known keys are name, out, seed, target"]),
        (["data.zzzz=1"], ["data.zzzz", "known keys are data.prompts"]),
        # A value of the wrong kind.
        (["trainer.lr=fast"], ["trainer.lr", "valid number", "'fast'", "the command line"]),
        (["trainer.steps=0"], ["trainer.steps", "greater than 0"]),
        (["trainer=5"], ["trainer", "5"]),
        (["drafter.backbone.kind=rnn"], ["drafter.backbone.kind", "'block'", "'rnn'"]),
        (["objective.0.label=data"], ["objective.0", "label=teacher_dist"]),
        (["objective=[]"], ["objective", "at least 1"]),
        (["name=a/b"], ["name", "'a/b'", "letters"]),
        # Not key=value, and not what a value can be.
        (["steps"], ["'steps'", "key=value"]),
        (["--steps=3"], ["'--steps=3'", "key=value"]),
        (["=3"], ["'=3'", "key=value"]),
        (["trainer.steps=[1"], ["trainer.steps=[1", "the command line"]),
        (["out=${nothing}"], ["out=${nothing}", "nothing"]),
        (["objective.7.loss.ce=1"], ["objective.7.loss.ce=1", "range"]),
        # A recipe that is not there.
        (["recipe=quikstart"], ["'quikstart'", "'quickstart'"]),
        (["recipe=nowhere/x.yaml"], ["nowhere/x.yaml", "does not exist"]),
    ],
)
def test_a_mistake_names_the_key_the_place_and_the_remedy(
    argv: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("train", ["recipe=debug", *argv])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_mistake_in_a_recipe_names_its_file(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "extends: debug\nrollout: {batchsize: 4}\n")
    with pytest.raises(ConfigError, match=r"rollout\.batchsize \(from .*own\.yaml\).*batch_size"):
        load_config("train", [f"recipe={own}"])
    with pytest.raises(ConfigError, match=r"rollout\.batchsize \(from the command line\)"):
        load_config("train", ["recipe=debug", "rollout.batchsize=4"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("trainer: {steps: 1\n", "YAML"),
        ("- a\n- b\n", "list"),
        ("just words\n", "just words"),
        ("seed: 1\nseed: 2\n", "duplicate"),
        ("extends: [debug]\n", "extends"),
        ("extends: nowhere\n", "nowhere"),
        ("extends: ./own.yaml\n", "extends itself"),
        ("a: !!python/object/apply:os.system ['true']\n", "YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(text: str, word: str, tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", text)
    with pytest.raises(ConfigError, match=word) as caught:
        load_config("train", [f"recipe={own}"])
    assert "nowhere" in text or "own.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("workflow", "argv", "word"),
    [
        ("evaluate", [], "drafter=DIR"),
        ("export", ["drafter=d"], "out=DIR"),
        ("export", ["out=d"], "drafter=DIR"),
        ("report", [], "run=DIR"),
    ],
)
def test_a_workflow_says_what_it_lacks(workflow: str, argv: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=f"paceline {workflow} needs {word}"):
        load_config(workflow, argv)


def test_a_password_is_kept_out_of_the_record() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI") as caught:
        load_config("train", ["tracker.uri=postgresql://me:secret@host/db"])
    assert "secret" not in str(caught.value)
    assert load_config("train", ["tracker.uri=http://127.0.0.1:5000"]).tracker.uri


def test_resume_takes_the_configuration_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    write(run / "config.yaml", load_config("train", ["recipe=debug", "seed=5"]).to_yaml())
    config = load_config("train", [f"resume={run}", "trainer.steps=20"])
    assert (config.seed, config.trainer.steps, config.name) == (5, 20, "debug")
    assert config.out_dir == run
    assert config.resume == str(run)


def test_resume_finds_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    write(run / "config.yaml", RunConfig(seed=5).to_yaml())
    monkeypatch.chdir(tmp_path)
    assert load_config("train", ["resume=x"]).out_dir == Path("runs/x")
    with pytest.raises(ConfigError, match=r"runs/y/config\.yaml does not exist"):
        load_config("train", ["resume=y"])
    for other in ("recipe=debug", "out=elsewhere"):
        with pytest.raises(ConfigError, match="leave out recipe= and out="):
            load_config("train", ["resume=x", other])


def test_the_environment_is_read_only_where_a_recipe_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PACELINE_TEST_MODEL", "org/model")
    own = write(tmp_path / "own.yaml", "target: {model: '${oc.env:PACELINE_TEST_MODEL}'}\n")
    assert load_config("train", [f"recipe={own}"]).target.model == "org/model"


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_the_written_configuration_holds_every_key(workflow: str) -> None:
    config = load_config(workflow, ["drafter_dir=d", "out=o", "run=r"])
    written = yaml.safe_load(config.to_yaml())
    assert written["drafter_dir"] == "d"
    assert set(written) == {field.alias or name for name, field in RunConfig.model_fields.items()}
