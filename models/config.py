"""Configuration of what models/ builds. Imports no torch, so the command line answers at once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator


class StrictModel(BaseModel):
    """Frozen, and refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(StrictModel):
    """The model whose output is kept."""

    model: str = "builtin:smollm2-135m-instruct"
    """`builtin:NAME`, a Hugging Face id or a local folder."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """`auto` is CUDA where there is one, else CPU."""
    tap_layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers whose outputs are tapped; None lets the backbone choose."""
    trust_remote_code: bool = False


class DataConfig(StrictModel):
    """Prompts, and where their responses come from."""

    prompts: str = "builtin:workload/train"
    """`builtin:workload/train`, a .jsonl or .parquet file, or a `datasets` id."""
    heldout: str = "builtin:workload/heldout"
    prompt_field: str | None = None
    """Field that holds the prompt; None: `messages`, else `prompt`, whichever a line has."""
    responses: Literal["generate", "given"] = "generate"
    """`generate`: the target answers itself. `given`: the data's own answers are replayed."""
    limit: PositiveInt | None = None
    heldout_limit: PositiveInt | None = None
    max_context_tokens: PositiveInt = 2048
    """A prompt that leaves no room for a response within this is skipped and counted, never cut."""


class FuserConfig(StrictModel):
    kind: Literal["concat_fc", "concat_fc_normed"] = "concat_fc"


class BackboneConfig(StrictModel):
    """Shape of the drafter's own layers. Sizes left None follow the target's."""

    kind: Literal["block", "autoregressive"]
    num_layers: PositiveInt = 1
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    init_from_target_layers: tuple[int, ...] | None = None
    """Target layers whose weights the drafter's layers start from, one per drafter layer."""
    block_size: PositiveInt = 8
    """block: number of inputs of one pass, the anchor included."""
    label_layout: Literal["fill_in", "shift"] = "fill_in"
    """block: slot k predicts token a + k (fill_in) or a + k + 1 (shift)."""
    anchors_per_sequence: PositiveInt = 64
    ttt_steps: PositiveInt = 4
    """autoregressive: steps of training-time test."""
    norm_output: bool = False
    """autoregressive: the final-norm output is what the next step reads (EAGLE-3.1)."""


class RefinerConfig(StrictModel):
    kind: Literal["none"] = "none"


class DrafterConfig(StrictModel):
    """A drafter is fuser x backbone x refiner over a draft vocabulary."""

    method: str = "custom"
    fuser: FuserConfig = FuserConfig()
    backbone: BackboneConfig = BackboneConfig(kind="autoregressive")
    refiner: RefinerConfig = RefinerConfig()
    draft_vocab_size: PositiveInt | None = None
    """None keeps the target's whole vocabulary and lm_head."""
    vocab_sample_tokens: PositiveInt = 32768
    """Response tokens to wait for before the draft vocabulary is chosen and training starts."""
    train_head: bool = True
    """Whether the drafter's own lm_head (a copy of the target's rows) is trained."""


class LossConfig(StrictModel):
    """Weights of the token losses that are added up."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0

    @model_validator(mode="after")
    def _some_loss(self) -> LossConfig:
        if self.ce == self.kl == self.tv == 0.0:
            raise ValueError("objective.loss is empty: give at least one of ce, kl, tv a weight")
        return self


class WeightConfig(StrictModel):
    """Weight of slot k (from 0): uniform 1; exp exp(-k / value); horizon value ** k."""

    kind: Literal["uniform", "exp", "horizon"] = "uniform"
    value: float = Field(default=1.0, gt=0.0)


class ObjectiveConfig(StrictModel):
    """Token loss x position weight x label source."""

    loss: LossConfig = LossConfig(ce=1.0)
    weight: WeightConfig = WeightConfig()
    label: Literal["data", "teacher_argmax", "teacher_dist"] = "data"
    chunk_rows: PositiveInt = 512
    """Rows of logits that exist at once."""

    @model_validator(mode="after")
    def _label_fits(self) -> ObjectiveConfig:
        if self.label != "teacher_dist" and (self.loss.kl or self.loss.tv):
            raise ValueError(
                f"objective.label={self.label} gives one token, but loss kl/tv compares "
                "distributions: set objective.label=teacher_dist or use loss.ce only"
            )
        return self


class SamplingConfig(StrictModel):
    temperature: float = Field(default=0.0, ge=0.0)
    top_k: NonNegativeInt = 0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_new_tokens: PositiveInt = 256
    seed: int = 0


class EvaluateConfig(StrictModel):
    """Held-out measurement, plain and speculative decoding alternating in one run."""

    num_speculative_tokens: PositiveInt = 4
    sampling: SamplingConfig = SamplingConfig()
    warmup_prompts: NonNegativeInt = 1
    untrained_prompts: PositiveInt = 4
    """train: held-out prompts on which the drafter is also measured before training."""
