"""The target: a frozen or updatable causal LM whose chosen decoder layers are tapped.

Shapes: B sequences, T tokens, A tapped layers, D width, V vocabulary.

Layer numbering: tap id i is the OUTPUT of decoder layer i, counted from 0 (transformers'
`hidden_states[i + 1]`). `last_hidden_states` are taken after the final norm, so lm_head applies
directly (`norm_applied` is always True here); the last layer itself cannot be tapped, because
engines disagree on whether its output is normed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.kernels.linear import few_row_linear
from paceline.models.config import TargetConfig
from paceline.models.embedded import resolve_model
from paceline.models.fingerprint import fingerprint, tokenizer_hash
from paceline.models.grouped_attention import ATTENTION_NAME
from paceline.models.kv_cache import SlotCache
from paceline.models.lean_decoder import FULL, SLIDING, lean_decoder
from paceline.models.target_spec import read_spec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Rows of one forward."""

    last_hidden_states: Tensor  # [B, T, D], after the final norm
    aux_hidden_states: Tensor  # [B, T, A, D]


class FewRowLinear(nn.Linear):
    """A linear layer that takes the fast path for the few rows of decoding and verification."""

    def forward(self, input: Tensor) -> Tensor:
        return few_row_linear(input, self.weight, self.bias)


class Target:
    """A causal LM with taps. Build it with `Target.load`."""

    def __init__(self, model: Any, tokenizer: Any, config: TargetConfig) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.target_config = config
        self.version = 0
        self.decoder = model.get_decoder()
        self.layers = self.decoder.layers
        self.tap_layer_ids: tuple[int, ...] = ()
        self._taps: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.spec = read_spec(model, tokenizer, config.model)
        self.tokenizer_hash = tokenizer_hash(tokenizer)
        self.lineage = [fingerprint(model, self.tokenizer_hash)]
        """Fingerprints of all versions so far, the present one last."""
        # Read once: transformers copies its whole configuration whenever it is asked for a value.
        decoder_config = self.decoder.config.to_dict()
        self._softcap = decoder_config.get("final_logit_softcapping")
        self._window, self._kinds_differ = sliding_window(decoder_config)
        self._lean = lean_decoder(self.decoder)
        _use_few_row_linears(model)

    @staticmethod
    def load(config: TargetConfig) -> Target:
        """Load a builtin, hub or local model.

        Raises ValueError if the model cannot be found, naming `target.model` and the remedy.
        """
        from transformers import AutoModelForCausalLM

        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(config)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                resolve_model(config.model),
                dtype=DTYPES[config.dtype],
                attn_implementation=ATTENTION_NAME,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
            )
        except OSError as error:
            raise _cannot_load(config, error) from error
        return Target(model.to(device), tokenizer, config)

    @property
    def fingerprint(self) -> str:
        return self.lineage[-1]

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:  # [V, D]
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:  # [V, D]
        return self.model.get_output_embeddings().weight

    def tap(self, layer_ids: tuple[int, ...]) -> None:
        """Choose the tapped layers.

        Raises ValueError if an id lies outside 0..num_layers - 2 or ids are not increasing.
        """
        last = self.spec.num_layers - 2
        for layer_id in layer_ids:
            if not 0 <= layer_id <= last:
                raise ValueError(
                    f"target.tap_layer_ids={list(layer_ids)}: layer {layer_id} is outside the "
                    f"model; {self.spec.model} has {self.spec.num_layers} layers, give ids from "
                    f"0 to {last} (the last layer is not tapped: engines norm it differently)"
                )
        if list(layer_ids) != sorted(set(layer_ids)):
            raise ValueError(f"target.tap_layer_ids={list(layer_ids)} must increase")
        for hook in self._hooks:
            hook.remove()
        self.tap_layer_ids = tuple(layer_ids)
        self._hooks = [
            self.layers[i].register_forward_hook(self._keep_output(i)) for i in layer_ids
        ]

    def _keep_output(self, layer_id: int) -> Callable[[nn.Module, tuple, Tensor | tuple], None]:
        def keep(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> None:
            self._taps[layer_id] = output if isinstance(output, Tensor) else output[0]

        return keep

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: SlotCache,
        slots: slice,
        tree_BTT: Tensor | None = None,
        length: int | None = None,
    ) -> TargetOutput:
        """Run new tokens [B, T] at their positions [B, T] in `slots` of the cache.

        With `tree`, column 0 is the anchor, the others are nodes, and row [b, t] marks which of
        them token t sees besides all earlier rows. `length` as in SlotCache.place.
        """
        if tree_BTT is None:
            cache.place(position_ids, slots, length=length)
        else:
            start_B = position_ids[:, 0]
            rows_BT = start_B[:, None] + torch.arange(input_ids.shape[1], device=self.device)
            cache.place(rows_BT, slots, length=length, tree_start_B=start_B, tree_BTX=tree_BTT)
        if self._lean is not None:
            hidden_BTD, taps = self._lean.forward(
                input_ids,
                position_ids,
                lambda: self._masks(cache, position_ids),
                cache,
                self.tap_layer_ids,
                causal=self._window is None and cache.is_causal,
            )
            return _output(hidden_BTD, taps)
        hidden_BTD = self.decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._mask(cache.visible(), position_ids),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return _output(hidden_BTD, [self._taps.pop(i) for i in self.tap_layer_ids])

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        """lm_head of normed hidden states [..., D] in float32 [..., V]."""
        logits = few_row_linear(last_hidden_states, self.lm_head_weight, None).float()
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _mask(self, visible: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
        if self._window is None:
            return visible
        keys_L = torch.arange(visible.shape[-1], device=visible.device)
        near = visible & (keys_L > position_ids[:, None, :, None] - self._window)
        return {FULL: visible, SLIDING: near} if self._kinds_differ else near

    def _masks(self, cache: SlotCache, position_ids: Tensor) -> dict[str, Tensor | None]:
        """Masks by kind of layer; None where the newest token sees all there is."""
        if position_ids.numel() == 1 and self._window is None and cache.newest_last:
            return {FULL: None}
        mask = self._mask(cache.visible(), position_ids)
        return dict(mask) if isinstance(mask, dict) else {FULL: mask}

    @torch.no_grad()
    def update_weights(self, state: dict[str, Tensor], version: int) -> None:
        """Take new weights (the names of the model's state dict) as target version `version`.

        Raises ValueError as `check_update`, changing nothing.
        """
        self.check_update(state, version)
        self.model.load_state_dict(state, strict=False)
        self.version = version
        self.lineage.append(fingerprint(self.model, self.tokenizer_hash))

    def move_to(self, device: torch.device | str) -> None:
        """Move all weights; taps stay as they are."""
        self.model.to(device)
        if self._lean is not None:
            self._lean.join_weights()

    def check_update(self, state: dict[str, Tensor], version: int) -> None:
        """Raise ValueError if weights cannot become the target's version `version`.

        Some of the weights may be given, at least one. A name or a shape that the model does not
        have is refused, because such an update would silently do nothing, and so is an old version.
        """
        if version <= self.version:
            raise ValueError(
                f"target version {version} was offered and {self.version} is in use: "
                "number updates upwards"
            )
        own = self.model.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        wrong = [n for n, shape in shapes.items() if n not in own or tuple(own[n].shape) != shape]
        if wrong or not state:
            found = f"{wrong[0]} {shapes[wrong[0]]}" if wrong else "no weights"
            raise ValueError(
                f"the update to target version {version} holds {found}, which "
                f"{self.spec.model} does not have: send its own state dict's names and shapes"
            )


def sliding_window(config: dict[str, Any]) -> tuple[int | None, bool]:
    """Width of the window that layers slide over, None without, and whether only some do."""
    window, kinds = config.get("sliding_window"), set(config.get("layer_types") or ())
    # Qwen2 states a window but uses it only on request.
    if not window or kinds == {FULL} or not (kinds or config.get("use_sliding_window", True)):
        return None, False
    return window, bool(kinds)


def _output(hidden_BTD: Tensor, taps: list[Tensor]) -> TargetOutput:
    aux_BTAD = torch.stack(taps, dim=2) if taps else hidden_BTD[:, :, None][:, :, :0]
    return TargetOutput(hidden_BTD, aux_BTAD)


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer alone. Raises ValueError as `Target.load`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            resolve_model(config.model),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    except OSError as error:
        raise _cannot_load(config, error) from error


def _cannot_load(config: TargetConfig, error: OSError) -> ValueError:
    return ValueError(
        f"target.model={config.model} cannot be loaded ({error}); give a folder that holds "
        "config.json and weights, a reachable Hugging Face id, or builtin:NAME"
    )


def _use_few_row_linears(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                fast = FewRowLinear(child.in_features, child.out_features, device="meta")
                fast.weight, fast.bias = child.weight, child.bias
                setattr(module, name, fast)
