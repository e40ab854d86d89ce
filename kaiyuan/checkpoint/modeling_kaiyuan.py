"""Qwen3 with sandwich norm and a soft cap on the output logits: the fp16 variant of Kaiyuan-2B.

A layer adds x + N_post(Attention(N_pre(x))), and likewise for the MLP; a logit becomes
cap * tanh(logit / cap). Everything else is transformers' Qwen3. The weights have Qwen3's names; the
two further norms of a layer are named as transformers' GLM-4 names them.

This file travels with an exported model and needs transformers alone:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm


class KaiyuanConfig(Qwen3Config):
    """Qwen3's configuration and two more values.

    Attributes:
        sandwich_norm: normalise the outputs of attention and MLP before they are added.
        final_logit_softcapping: the cap of the logits, None for none; Gemma 2's name for it.
    """

    model_type = "kaiyuan"
    sandwich_norm: bool = False
    final_logit_softcapping: float | None = None

    def __init__(
        self,
        sandwich_norm: bool = False,
        final_logit_softcapping: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sandwich_norm = sandwich_norm
        self.final_logit_softcapping = final_logit_softcapping


class KaiyuanDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's layer, with a norm after attention and after the MLP."""

    def __init__(self, config: KaiyuanConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.post_self_attn_layernorm: nn.Module = nn.Identity()
        self.post_mlp_layernorm: nn.Module = nn.Identity()
        if config.sandwich_norm:
            size, eps = config.hidden_size, config.rms_norm_eps
            self.post_self_attn_layernorm = Qwen3RMSNorm(size, eps=eps)
            self.post_mlp_layernorm = Qwen3RMSNorm(size, eps=eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the residual stream after the layer, [batch, sequence, hidden]."""
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_self_attn_layernorm(branch)
        # The norm before the MLP has this name in Qwen3.
        branch = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_mlp_layernorm(branch)


class KaiyuanModel(Qwen3Model):
    """The layers without the output layer."""

    config_class = KaiyuanConfig
    _no_split_modules = ("KaiyuanDecoderLayer",)

    def __init__(self, config: KaiyuanConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            [KaiyuanDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.post_init()


class CappedLinear(nn.Linear):
    """An output layer whose logits stay between -cap and cap."""

    cap: float | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [..., vocabulary]."""
        logits = super().forward(hidden_states)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class KaiyuanForCausalLM(Qwen3ForCausalLM):
    """The language model."""

    config_class = KaiyuanConfig
    _no_split_modules = ("KaiyuanDecoderLayer",)

    def __init__(self, config: KaiyuanConfig) -> None:
        super().__init__(config)
        self.model = KaiyuanModel(config)
        self.lm_head = CappedLinear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.cap = config.final_logit_softcapping
        self.post_init()
