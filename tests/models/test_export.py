"""Exported drafters: what is in the folder is what was trained, under each engine's conventions.

Numbers in names are those of the defects in other systems that a test guards against.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.models.config import BackboneConfig, DrafterConfig, FuserConfig, TargetConfig
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.export.checks import check_drafter
from paceline.models.export.engine import sglang_tap_layer_ids, vllm_tap_layer_ids
from paceline.models.export.folder import LAYOUTS, read_export, write_export
from paceline.models.export.speculators import Verifier
from paceline.models.export.tensors import renames, to_engine
from paceline.models.records import SamplingParams
from paceline.models.target import Target
from paceline.models.vocab import vocab_from_ids

VERIFIER = Verifier("org/model", ("LlamaForCausalLM",))
TAPS = (0, 1, 3)
DRAFT_VOCAB = 64
Make = Callable[..., Drafter]
Config = dict
HIDDEN, QUERY, KEY, MLP = 32, 32, 16, 64  # widths of builtin:tiny-llama
VOCAB = 260

LAYER_SHAPES = {
    "self_attn.o_proj.weight": (HIDDEN, QUERY),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
EAGLE3_LAYER_SHAPES = LAYER_SHAPES | {
    "self_attn.q_proj.weight": (QUERY, 2 * HIDDEN),
    "self_attn.k_proj.weight": (KEY, 2 * HIDDEN),
    "self_attn.v_proj.weight": (KEY, 2 * HIDDEN),
    "hidden_norm.weight": (HIDDEN,),
}
DFLASH_LAYER_SHAPES = LAYER_SHAPES | {
    "self_attn.q_proj.weight": (QUERY, HIDDEN),
    "self_attn.k_proj.weight": (KEY, HIDDEN),
    "self_attn.v_proj.weight": (KEY, HIDDEN),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
}
COMMON_SHAPES = {
    "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    "d2t": (DRAFT_VOCAB,),
    "t2d": (VOCAB,),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = Target.load(TargetConfig(model="builtin:tiny-llama", device="cpu"))
    target.tap(TAPS)
    return target


@pytest.fixture
def make(target: Target) -> Make:
    """Builds a drafter whose every tensor is random, so that a mix-up cannot go unseen."""

    def build(kind: str, *, fuser: str = "concat_fc", vocab: bool = True, **backbone) -> Drafter:
        generator = torch.Generator().manual_seed(1)
        kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]
        config = DrafterConfig(
            fuser=FuserConfig(kind=fuser),
            backbone=BackboneConfig(kind=kind, **backbone),
            draft_vocab_size=DRAFT_VOCAB if vocab else None,
            train_head=vocab,
        )
        drafter = build_drafter(
            config,
            target.spec,
            tap_layer_ids=TAPS,
            embedding_weight=target.embedding_weight,
            lm_head_weight=target.lm_head_weight,
            vocab=vocab_from_ids(kept, VOCAB) if vocab else None,
        )
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if not name.startswith("lm_head"):
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
        return drafter

    return build


def sglang_block(make: Make, target: Target) -> Drafter:
    """The one kind of DFlash drafter that SGLang serves: all of the target's head and embedding."""
    drafter = make("block", vocab=False, num_layers=2)
    with torch.no_grad():
        row = target.embedding_weight[target.spec.mask_token_id]
        drafter.backbone.mask_embedding.copy_(row)
    return drafter


def export(drafter: Drafter, layout: str, folder: Path) -> tuple[Config, dict[str, torch.Tensor]]:
    write_export(drafter, layout, folder / layout, VERIFIER)
    config = json.loads((folder / layout / "config.json").read_text())
    return config, load_file(folder / layout / "model.safetensors")


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["autoregressive", "block"])
def test_a1_a_drafter_without_layer_ids_is_refused(make: Make, tmp_path: Path, kind: str) -> None:
    drafter = make(kind)
    drafter.tap_layer_ids = ()
    with pytest.raises(ValueError, match=r"names no tap_layer_ids.*set target\.tap_layer_ids"):
        write_export(drafter, "vllm", tmp_path / "out", VERIFIER)
    assert not (tmp_path / "out").exists()


def test_a2_eagle3_layer_ids_of_each_engine_mean_the_same_taps(make: Make, tmp_path: Path) -> None:
    drafter = make("autoregressive")
    native, _ = export(drafter, "vllm", tmp_path)
    assert native["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert native["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert vllm_tap_layer_ids(native) == sglang_tap_layer_ids(native) == TAPS
    speculators, _ = export(drafter, "speculators", tmp_path)
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert LAYOUTS["speculators"].tap_layer_ids(speculators) == TAPS


def test_a3_dflash_layer_ids_are_not_shifted_where_the_engine_shifts_them(
    make: Make, target: Target, tmp_path: Path
) -> None:
    for layout, drafter in (("vllm", make("block")), ("sglang", sglang_block(make, target))):
        config, _ = export(drafter, layout, tmp_path)
        assert config["dflash_config"]["target_layer_ids"] == [0, 1, 3]
        assert "eagle_aux_hidden_state_layer_ids" not in config
    speculators, _ = export(make("block"), "speculators", tmp_path)
    assert speculators["aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert LAYOUTS["speculators"].tap_layer_ids(speculators) == TAPS


@pytest.mark.parametrize("taps", [(0, 1, 4), (3, 1, 0), (1, 1, 3), (-1, 1, 3)])
def test_a7_taps_that_engines_would_read_otherwise_are_refused(
    make: Make, taps: tuple[int, ...]
) -> None:
    drafter = make("autoregressive")
    drafter.tap_layer_ids = taps
    with pytest.raises(ValueError, match="increasing ids from 0 to 3"):
        check_drafter(drafter)


@pytest.mark.parametrize("kind", ["autoregressive", "block"])
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_b15_the_vocabulary_map_is_in_the_safetensors(
    make: Make, tmp_path: Path, kind: str, layout: str
) -> None:
    config, tensors = export(make(kind), layout, tmp_path)
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    target_ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(target_ids, tensors["t2d"].nonzero()[:, 0])


def test_b15_a_whole_vocabulary_has_no_map(make: Make, tmp_path: Path) -> None:
    config, tensors = export(make("autoregressive", vocab=False), "vllm", tmp_path)
    assert config["draft_vocab_size"] == config["vocab_size"] == VOCAB
    assert not {"d2t", "t2d"} & set(tensors)


def test_b17_dflash_keeps_its_own_head_or_is_refused(make: Make, tmp_path: Path) -> None:
    for layout in ("vllm", "speculators"):
        _, tensors = export(make("block"), layout, tmp_path)
        assert tensors["lm_head.weight"].shape == (DRAFT_VOCAB, HIDDEN)
    with pytest.raises(ValueError, match=r"own lm_head.*format=vllm.*train_head=false"):
        write_export(make("block"), "sglang", tmp_path / "sglang", VERIFIER)
    with pytest.raises(ValueError, match=r"mask embedding of its own.*format=vllm"):
        write_export(make("block", vocab=False), "sglang", tmp_path / "sglang", VERIFIER)


def test_b19_head_rows_are_those_of_the_mapped_tokens(
    make: Make, target: Target, tmp_path: Path
) -> None:
    _, tensors = export(make("autoregressive"), "vllm", tmp_path)
    target_ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head_weight[target_ids])


def test_b19_target_ids_in_place_of_offsets_are_refused(make: Make) -> None:
    state = make("autoregressive").state_dict()
    state["d2t"] = state["t2d"].nonzero()[:, 0]
    with pytest.raises(ValueError, match="vocabulary is broken"):
        to_engine(state, renames("autoregressive", "midlayer."))


def test_f49_the_layer_class_has_the_norms_of_the_tensors(make: Make, tmp_path: Path) -> None:
    eagle3, _ = export(make("autoregressive"), "vllm", tmp_path / "a")
    assert (eagle3["architectures"], eagle3["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    dflash, tensors = export(make("block"), "vllm", tmp_path / "b")
    assert (dflash["architectures"], dflash["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert "layers.0.self_attn.k_norm.weight" in tensors


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_f50_norm_options_reach_the_config(make: Make, tmp_path: Path, layout: str) -> None:
    plain, _ = export(make("autoregressive"), layout, tmp_path / "plain")
    normed = make("autoregressive", fuser="concat_fc_normed", norm_output=True)
    config, tensors = export(normed, layout, tmp_path / "normed")
    assert (plain["fc_norm"], plain["norm_output"]) == (False, False)
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    assert config["norm_before_residual"] is False
    assert {f"fc_norm.{i}.weight" for i in range(3)} <= set(tensors)


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_f50_norms_that_no_dflash_class_has_are_refused(
    make: Make, tmp_path: Path, layout: str
) -> None:
    with pytest.raises(ValueError, match=r"fuser\.kind=concat_fc_normed.*train with"):
        write_export(make("block", fuser="concat_fc_normed"), layout, tmp_path / "out", VERIFIER)


@pytest.mark.parametrize("kind", ["autoregressive", "block"])
def test_f52_embeddings_and_widths_are_the_targets(make: Make, tmp_path: Path, kind: str) -> None:
    config, tensors = export(make(kind), "vllm", tmp_path)
    assert config["hidden_size"] == config["target_hidden_size"] == HIDDEN
    assert config["vocab_size"] == VOCAB
    assert "embed_tokens.weight" not in tensors


def test_f54_an_export_proposes_what_the_drafter_proposes(
    make: Make, target: Target, tmp_path: Path
) -> None:
    aux = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(2))
    proposals = []
    for drafter in (make("block"), make("autoregressive")):
        for layout in ("vllm", "speculators"):
            folder = tmp_path / drafter.config.backbone.kind
            export(drafter, layout, folder)
            for one in (drafter, read_export(folder / layout, layout, target)):
                cache, slot = one.start(1, 16), slice(0, 1)
                one.extend(cache, slot, aux[None], torch.arange(40, 45)[None], [5])
                (proposal,) = one.propose(
                    cache, slot, torch.tensor([44]), 4, [SamplingParams()], [None]
                )
                proposals.append(proposal.tokens)
    for own, exported in zip(proposals[::2], proposals[1::2], strict=True):
        assert torch.equal(own, exported)
    assert not torch.equal(proposals[0], proposals[-1])


def test_f55_speculative_tokens_leave_out_the_anchor(make: Make, tmp_path: Path) -> None:
    config, _ = export(make("block", block_size=8), "speculators", tmp_path)
    assert config["block_size"] == 8
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


def test_f55_a_block_that_samples_from_the_anchor_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"label_layout=shift.*train with label_layout=fill_in"):
        check_drafter(make("block", label_layout="shift"))


@pytest.mark.parametrize(
    ("layout", "prefix"),
    [("vllm", "midlayer."), ("sglang", "midlayer."), ("speculators", "layers.0.")],
)
def test_eagle3_tensors_are_complete_and_no_more(
    make: Make, tmp_path: Path, layout: str, prefix: str
) -> None:
    _, tensors = export(make("autoregressive"), layout, tmp_path)
    layer = {prefix + name: shape for name, shape in EAGLE3_LAYER_SHAPES.items()}
    assert shapes(tensors) == COMMON_SHAPES | layer


def test_dflash_tensors_are_complete_and_no_more(
    make: Make, target: Target, tmp_path: Path
) -> None:
    layers = {
        f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in DFLASH_LAYER_SHAPES.items()
    }
    expected = COMMON_SHAPES | layers | {"hidden_norm.weight": (HIDDEN,)}
    _, vllm = export(make("block", num_layers=2), "vllm", tmp_path)
    assert shapes(vllm) == expected
    _, speculators = export(make("block", num_layers=2), "speculators", tmp_path)
    assert shapes(speculators) == expected | {"embed_tokens.weight": (VOCAB, HIDDEN)}
    _, sglang = export(sglang_block(make, target), "sglang", tmp_path)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del expected[name]
    assert shapes(sglang) == expected


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["autoregressive", "block", "autoregressive-normed"])
def test_loading_an_export_back_gives_the_same_drafter(
    make: Make, target: Target, tmp_path: Path, kind: str, layout: str
) -> None:
    if kind == "autoregressive-normed":
        drafter = make("autoregressive", fuser="concat_fc_normed", norm_output=True)
    elif kind == "block" and layout == "sglang":
        drafter = sglang_block(make, target)
    else:
        drafter = make(kind, num_layers=2 if kind == "block" else 1)
    export(drafter, layout, tmp_path)
    loaded = read_export(tmp_path / layout, layout, target)
    assert loaded.tap_layer_ids == drafter.tap_layer_ids
    assert loaded.config.fuser == drafter.config.fuser
    assert loaded.config.backbone.norm_output == drafter.config.backbone.norm_output
    assert loaded.config.backbone.block_size == drafter.config.backbone.block_size
    own, read = drafter.state_dict(), loaded.state_dict()
    assert own.keys() == read.keys()
    for name in own:
        assert torch.equal(own[name], read[name]), name


def test_the_mask_embedding_is_shipped_as_each_engine_reads_it(
    make: Make, target: Target, tmp_path: Path
) -> None:
    drafter = make("block")
    token = target.spec.mask_token_id
    config, _ = export(drafter, "vllm", tmp_path)
    shipped = torch.load(tmp_path / "vllm" / "mask_embedding.pt", weights_only=True)
    assert shipped["mask_token_id"] == config["dflash_config"]["mask_token_id"] == token
    assert torch.equal(shipped["embedding"], drafter.backbone.mask_embedding)
    config, tensors = export(drafter, "speculators", tmp_path)
    rows = tensors["embed_tokens.weight"]
    assert torch.equal(rows[config["mask_token_id"]], drafter.backbone.mask_embedding)
    others = torch.arange(VOCAB) != token
    assert torch.equal(rows[others], target.embedding_weight[others])


def test_dflash_attention_is_declared_bidirectional(make: Make, tmp_path: Path) -> None:
    native, _ = export(make("block"), "vllm", tmp_path)
    assert native["dflash_config"]["causal"] is False
    assert native["layer_types"] == ["full_attention"]
    speculators, _ = export(make("block"), "speculators", tmp_path)
    assert speculators["sliding_window_non_causal"] is True


@pytest.mark.parametrize("number", [1, 2])
def test_fc_is_sized_for_the_number_of_taps(make: Make, tmp_path: Path, number: int) -> None:
    drafter = make("autoregressive")
    drafter.tap_layer_ids = TAPS[:number]
    native, _ = export(drafter, "vllm", tmp_path)
    assert native["num_aux_hidden_states"] == number
    speculators, _ = export(drafter, "speculators", tmp_path)
    assert speculators["transformer_layer_config"]["num_aux_hidden_states"] == number


def test_sglang_refuses_a_single_tap_since_it_would_skip_fc(make: Make, tmp_path: Path) -> None:
    drafter = make("autoregressive")
    drafter.tap_layer_ids = (1,)
    with pytest.raises(ValueError, match="SGLang skips fc"):
        write_export(drafter, "sglang", tmp_path / "out", VERIFIER)


def test_a_tensor_without_a_counterpart_is_refused(make: Make) -> None:
    state = make("block").state_dict() | {"refiner.gate.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"tensor refiner\.gate\.weight has no counterpart"):
        to_engine(state, renames("block", "layers.0."))


def test_a_diverged_drafter_is_refused(make: Make, tmp_path: Path) -> None:
    drafter = make("autoregressive")
    with torch.no_grad():
        drafter.fuser.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fuser\.fc\.weight holds values that are not finite"):
        write_export(drafter, "vllm", tmp_path / "out", VERIFIER)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_is_left_alone(make: Make, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        write_export(make("block"), "vllm", tmp_path, VERIFIER)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_that_lacks_a_tensor_is_not_loaded(
    make: Make, target: Target, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    _, tensors = export(make("autoregressive"), "vllm", tmp_path)
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "vllm" / "model.safetensors")
    with pytest.raises(ValueError, match=r"backbone\.norm\.weight"):
        read_export(tmp_path / "vllm", "vllm", target)
