"""Saving and loading drafters, in PEFT's manner."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel
    from typing_extensions import Self

    from selfspec.checkpoints.base_model import BaseModel
    from selfspec.checkpoints.folder import Kind

MODEL_CARD = "README.md"


class Pretrained:
    """A drafter with a trained `network`, made by `cls(network=network, **options)`.

    Attributes:
        network: Of `selfspec.networks`.
        network_kind: Which kind of draft is loaded from a folder that has several.
    """

    network_kind: ClassVar[Kind]
    network: Any

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        base: PreTrainedModel | BaseModel | None = None,
        **card: Any,
    ) -> Path:
        """Write the network to a folder.

        Args:
            folder: Is made if need be.
            base: The model that the draft was made for; may be left out for a draft that was
                loaded.
            card: `license`, `training`, `evaluation`, see `selfspec.checkpoints.save`.

        Returns:
            The folder.

        Raises:
            ValueError: See `selfspec.checkpoints.save`.
        """
        from selfspec.checkpoints.folder import save

        return save(_trained(self.network), folder, base=base, **card)

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        model: PreTrainedModel | None = None,
        strict_base: bool = True,
        **options: Any,
    ) -> Self:
        """Load a drafter.

        Args:
            source: A folder, or a repository on the Hugging Face Hub; the own format, or a
                published layout.
            model: The model that it is to draft for, to be checked at once.
            strict_base: Whether a draft that was made for another model is refused.
            options: Of the drafter.

        Returns:
            A drafter; its network is on the CPU until it meets a model.

        Raises:
            ValueError: See `selfspec.checkpoints.load`.
        """
        from selfspec.checkpoints.find import load

        kind = cls.network_kind
        network = load(source, model=model, kind=kind, strict_base=strict_base)
        return cls(network=network, **options)  # type: ignore[call-arg]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base: PreTrainedModel | BaseModel | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Add a draft by selfspec",
        **card: Any,
    ) -> str:
        """Write the network to a repository on the Hugging Face Hub.

        A repository without a model card is given one.

        Args:
            repo_id: Is made if need be.
            base: As for `save_pretrained`.
            private: Of a repository that is made.
            token: As for huggingface_hub.
            commit_message: First line.
            card: As for `save_pretrained`.

        Returns:
            Address of the commit.

        Raises:
            ValueError: See `selfspec.checkpoints.save`.
        """
        from huggingface_hub import HfApi

        from selfspec.checkpoints.folder import CONFIG
        from selfspec.checkpoints.model_card import model_card
        from selfspec.checkpoints.tensors import read_json

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, base=base, **card)
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            has_network = (Path(folder) / CONFIG).is_file()
            if has_network and not api.file_exists(repo, MODEL_CARD):
                page = model_card(read_json(Path(folder) / CONFIG), repo)
                (Path(folder) / MODEL_CARD).write_text(page, encoding="utf-8")
            commit = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=commit_message
            )
        return str(commit)


def _trained(network: object) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise ValueError("the drafter has no network: there is nothing to save.")
    return network
