"""DeepSpeed, as drafter training uses it: start, accumulate sums, update, and open its optimizer.

One engine per process at a time (torch.distributed is global to a process). ZeRO splits the
optimizer over ranks, yet its state is read and written here as whole tensors by parameter name, so
that a checkpoint fits any number of ranks and holds no pickled objects.

DeepSpeed is imported when an engine starts: the import takes seconds and picks its accelerator
from the environment.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed
from torch import Tensor, nn

from paceline.actors.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class TrainingEngine:
    """One rank's DeepSpeed engine around `module`, whose forward returns (loss_sum, ...)."""

    def __init__(
        self,
        module: nn.Module,
        config: TrainerConfig,
        *,
        device: str,
        rank: int,
        world_size: int,
        master: tuple[str, int] | None,
    ) -> None:
        """Joins the process group at `master` (address, port); returns once all ranks have.

        A single rank needs no master and opens no port.

        Raises ValueError if the configuration keeps no float32 master weights.
        """
        if config.dtype == "bfloat16" and config.zero_stage == 0:
            raise ValueError(
                "trainer.zero_stage=0 keeps no float32 master weights for "
                "trainer.dtype=bfloat16: set trainer.zero_stage=1 or trainer.dtype=float32"
            )
        self.config = config
        self.device = device
        self.world_size = world_size
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        deepspeed = _import_deepspeed(device, rank)
        backend = "nccl" if device == "cuda" else "gloo"
        if world_size == 1:
            store, method = torch.distributed.HashStore(), None
        else:
            assert master is not None, "several ranks need an address to meet at"
            store, method = None, f"tcp://{master[0]}:{master[1]}"
        torch.distributed.init_process_group(
            backend, init_method=method, store=store, rank=rank, world_size=world_size
        )
        deepspeed.init_distributed(backend, verbose=False)  # finds the group that is there
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(
                self._parameters.values(),
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=True,
            ),
            config=_deepspeed_config(config),
        )

    def forward_backward(self, *inputs: object) -> tuple:
        """Forward, then accumulate the gradient of loss_sum, unnormalised; returns the outputs."""
        outputs = self._engine(*inputs)
        if self.config.zero_stage:
            self._optimizer.override_loss_scale(1.0)
        # Without ZeRO, DeepSpeed takes an output that is the loss itself for a user's own backward
        # and divides by the accumulation steps; a loss computed from outputs is left alone.
        self._engine.backward(outputs[0] * 1.0, scale_wrt_gas=False)
        return outputs

    def end_micro_step(self) -> None:
        """Call after every micro-step but the last, which `update` ends."""
        self._engine.step()

    def update(self, *, lr: float, weight_sum: float) -> float:
        """One optimizer step on (gradient of all ranks' loss sums) / weight_sum.

        Returns the global gradient norm before clipping; nan or inf means no step was made.
        """
        # DeepSpeed has averaged over ranks. A step without any supervised row has zero gradients.
        divisor = weight_sum / self.world_size if weight_sum > 0.0 else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self.config.zero_stage:
            self._optimizer.override_loss_scale(divisor)
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        torch._foreach_div_(gradients, divisor)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if torch.isfinite(torch.tensor(norm)):
            self._engine.step()
        return norm

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(totals)
        return totals.tolist()

    def barrier(self) -> None:
        torch.distributed.barrier()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Whole float32 tensors "exp_avg.NAME", "exp_avg_sq.NAME" and, in bfloat16, "master.NAME".

        All ranks must call it, after at least one step.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                if self.config.zero_stage:
                    value = safe_get_full_optimizer_state(parameter, moment)
                else:
                    value = self._optimizer.state[parameter][moment]
                state[f"{moment}.{name}"] = value.cpu()
            if self.config.dtype == "bfloat16":
                state[f"{MASTER}.{name}"] = safe_get_full_fp32_param(parameter).cpu()
        return state

    def optimizer_state_shapes(self) -> dict[str, torch.Size]:
        """Names and shapes that `optimizer_state` gives."""
        kinds = (*MOMENTS, MASTER) if self.config.dtype == "bfloat16" else MOMENTS
        return {f"{k}.{name}": p.shape for name, p in self._parameters.items() for k in kinds}

    def load_optimizer_state(self, state: dict[str, Tensor], *, step: int) -> None:
        """Continue after `step` updates from what `optimizer_state` gave. All ranks call it."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._allocate_moments(step)
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                value = state[f"{moment}.{name}"].to(self.device)
                if self.config.zero_stage:
                    safe_set_full_optimizer_state(parameter, value, moment)
                else:
                    self._optimizer.state[parameter][moment].copy_(value)
            if self.config.dtype == "bfloat16":
                master = state[f"{MASTER}.{name}"].to(self.device)
                safe_set_full_fp32_param(parameter, master)

    def _allocate_moments(self, step: int) -> None:
        """AdamW makes its moments in the first step; a resumed engine needs them before it."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self._optimizer
        held = zero.single_partition_of_fp32_groups if self.config.zero_stage else None
        adam = zero.optimizer if self.config.zero_stage else zero
        for tensor in held if held is not None else self._parameters.values():
            adam.state[tensor] = {
                "step": torch.tensor(float(step), device=tensor.device),
                **{m: torch.zeros_like(tensor, dtype=torch.float32) for m in MOMENTS},
            }
        if held is not None:
            for parameters, partition in zip(zero.bit16_groups, held, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, partition, adam.state)

    def close(self) -> None:
        """Leave the process group, so that another engine can start in this process."""
        import deepspeed

        deepspeed.comm.destroy_process_group()


def _import_deepspeed(device: str, rank: int) -> ModuleType:
    # Ray shows each rank its own devices only, so its local rank is 0.
    os.environ.update(DS_ACCELERATOR=device, RANK=str(rank), LOCAL_RANK="0")
    # DeepSpeed calls a collective by its former name in every step.
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`", FutureWarning)
    import deepspeed
    import deepspeed.ops

    # Init would compile a shared-memory collective with ninja, nearly a minute of two cores.
    # Torch's own serve as well; this table is where DeepSpeed looks what may be built.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


def _deepspeed_config(config: TrainerConfig) -> dict[str, object]:
    settings: dict[str, object] = {
        # Batches are packed by tokens; DeepSpeed only multiplies this number into its counters.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return settings
