"""What a wrapper shows of its model: what pipelines and scripts ask for besides `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    Self = TypeVar("Self", bound="Facade")


class Facade:
    """The model's own answers.

    Attributes:
        model: The very object that was wrapped.
    """

    model: Any
    _decoder_model: Any

    def __getattr__(self, name: str) -> Any:
        """Say where everything else is."""
        raise AttributeError(
            f"the selfspec wrapper has no attribute {name!r}; the model itself is its `model`."
        )

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's default generation config."""
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        """The model's device."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    # What transformers' pipelines want of a model besides `generate`.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    def can_generate(self) -> bool:
        """True."""
        return True

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        # Pipelines of older transformers settle their options by it.
        return self._decoder_model._prepare_generation_config(*args, **kwargs)

    @property
    def hf_device_map(self) -> Any:
        """The model's, if it is spread over devices; else there is no such attribute."""
        return self.model.hf_device_map

    @property
    def input_modalities(self) -> Any:
        """The model's."""
        return self.model.input_modalities

    @property
    def output_modalities(self) -> Any:
        """The model's."""
        return self.model.output_modalities

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model, in place."""
        self.model.to(*args, **kwargs)
        return self

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, of what `generate` returned."""
        return self._decoder_model.compute_transition_scores(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model."""
        return self.model.save_pretrained(*args, **kwargs)
