"""The page of a draft on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.checkpoints.folder import Kind

# What `selfspec.wrap` calls the drafter of a kind.
_DRAFTERS: dict[Kind, str] = {"feature": "feature", "heads": "heads", "exit": "early-exit"}
_WHAT: dict[Kind, str] = {
    "feature": "one layer over hidden states of the model, which drafts trees of tokens",
    "heads": "heads behind the model's last state, one for every token that is drafted",
    "exit": "an exit behind the model's first layers, which draft",
}


def model_card(values: Mapping[str, Any], repo_id: str) -> str:
    """Markdown with the metadata that the Hub reads.

    Args:
        values: config.json of the draft, in the own format.
        repo_id: Where it will lie.
    """
    from huggingface_hub import ModelCardData

    kind: Kind = values["kind"]
    base = values["base"]["name"]
    name = base or "the base model"
    metadata = ModelCardData(
        # A model that was loaded from a folder has no page to point at.
        base_model=base if base.count("/") == 1 else None,
        license=values["license"],
        library_name="selfspec",
        pipeline_tag="text-generation",
        tags=["selfspec", "speculative-decoding", kind],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---\n",
        f"# Draft for {name}\n",
        f"A draft for speculative decoding: {_WHAT[kind]}. With it {name} generates the text that "
        "it generates anyway, sooner.\n",
        "```python\n"
        "import selfspec\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'spec = selfspec.wrap(model, "{_DRAFTERS[kind]}", drafts="{repo_id}")\n'
        "```\n",
        *_held_out(values["evaluation"]),
        *_training(values["training"]),
    ]
    return "\n".join(parts)


def _held_out(evaluation: dict[str, Any]) -> list[str]:
    found = evaluation.get("held_out")
    if not isinstance(found, dict) or not isinstance(found.get("acceptance"), list | tuple):
        return []
    rows = [f"| {at} | {share:.3f} |" for at, share in enumerate(found["acceptance"], 1)]
    return [
        "## Held-out texts\n",
        "Share of draft tokens that are the model's own choice, by depth, the tokens before being "
        f"right ({found.get('positions', 0):,} positions):\n",
        "| depth | acceptance |\n|---|---|",
        *rows,
        "",
    ]


def _training(training: dict[str, Any]) -> list[str]:
    if not training:
        return []
    rows = [f"| {name} | {value} |" for name, value in training.items()]
    return ["## Training\n", "| option | value |\n|---|---|", *rows, ""]
