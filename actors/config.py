"""Configuration of the actors. Imports neither torch nor ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from paceline.models.config import SamplingConfig, StrictModel
from paceline.models.decoding.strategy import chosen_strategies


class RolloutConfig(StrictModel):
    """Target rollouts: continuous batches of `batch_size` sequences on each worker."""

    engine: Literal["torch"] = "torch"
    num_workers: PositiveInt = 1
    batch_size: PositiveInt = 32
    max_cache_bytes: PositiveInt | None = None
    """Keys and values of one worker; fewer sequences run at once where it does not suffice."""
    drafter: str | None = None
    """Folder of a trained drafter of this target: rollouts speculate with it, losslessly."""
    num_speculative_tokens: PositiveInt = 4
    """Drafts of a round, with a drafter; the most of a round where a policy decides."""
    policy: Literal["static", "length", "bandit"] = "static"
    """How a round drafts: always alike, by measured costs and acceptance, or as a bandit."""
    strategies: tuple[str, ...] = ()
    """What the policy may choose besides plain decoding, such as chain_4 or eagle2_5_4_16; empty:
    chains of up to num_speculative_tokens tokens."""
    sampling: SamplingConfig = SamplingConfig()
    shard_tokens: PositiveInt = 8192
    """A worker writes a shard once this many tokens are ready."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    @model_validator(mode="after")
    def _strategies_are_known(self) -> RolloutConfig:
        chosen_strategies(self.policy, self.strategies, self.num_speculative_tokens)
        return self


class CacheConfig(StrictModel):
    """Where hidden states live."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_bytes: PositiveInt = 64 * 2**30
    """Rollouts wait while the cache is fuller than this."""


class TrainerConfig(StrictModel):
    """One DeepSpeed engine per rank."""

    num_ranks: PositiveInt = 1
    steps: PositiveInt = 1000
    batch_tokens: PositiveInt = 4096
    """Packed tokens of one micro-step of one rank."""
    gradient_accumulation_steps: PositiveInt = 1
    lr: float = Field(default=6e-4, gt=0.0)
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    warmup_ratio: float = Field(default=0.04, ge=0.0, lt=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(default=1.0, gt=0.0)
    zero_stage: Literal[0, 1, 2] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; bfloat16 keeps float32 master weights."""
    checkpoint_every: PositiveInt = 200
    log_every: PositiveInt = 10
    seed: int = 0
    num_cpus: float = 1.0
    num_gpus: float = 0.0


class TrackerConfig(StrictModel):
    """MLflow. `uri` None: MLFLOW_TRACKING_URI, else sqlite:///<out>/mlflow.db."""

    uri: str | None = None
    experiment: str = "paceline"
    register_model: bool = True


class ClusterConfig(StrictModel):
    """How a pipeline reaches Ray: None starts a local one, `auto` joins the running cluster."""

    address: str | None = None
    num_cpus: NonNegativeInt | None = None
    auth_mode: Literal["disabled", "token"] = "disabled"
