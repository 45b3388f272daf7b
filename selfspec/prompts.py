"""Prompts that users pass to what learns from them: checked, one tensor each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def prompt_rows(
    prompts: Iterable[Tensor | Sequence[int]], vocabulary: Sequence[int] | range
) -> list[Tensor]:
    """Every prompt as int64 [1, T].

    Args:
        prompts: Token ids: tensors [T] or [1, T], or lists.
        vocabulary: Ids that the model can embed.

    Raises:
        TypeError: If it is something else, such as text, or one prompt alone.
        ValueError: If a prompt is empty, several in one, or has an id out of range.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r} must be a list of prompts, each a list of token ids.")
    return [_row(at, prompt, vocabulary) for at, prompt in enumerate(prompts)]


def _row(at: int, prompt: Tensor | Sequence[int], vocabulary: Sequence[int] | range) -> Tensor:
    what = f"prompts[{at}]"
    if isinstance(prompt, str):
        raise TypeError(f'{what} is text: pass tokenizer(text)["input_ids"].')
    if not isinstance(prompt, Tensor):
        try:
            prompt = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{what} must be a list of token ids: {error}.") from None
    if prompt.numel() and (prompt.is_floating_point() or prompt.dtype == torch.bool):
        raise TypeError(f"{what} is of {prompt.dtype}; token ids are ints.")
    if prompt.ndim == 0:
        raise TypeError(f"{what} is one number: prompts is a list of prompts, not of token ids.")
    if prompt.ndim > 2 or (prompt.ndim == 2 and prompt.shape[0] != 1):
        raise ValueError(
            f"{what} is of shape {list(prompt.shape)}: pass prompts one by one, unpadded."
        )
    row = prompt.reshape(1, -1).long()
    if not row.numel():
        raise ValueError(f"{what} is empty.")
    low, high = int(row.min()), int(row.max())
    if low not in vocabulary or high not in vocabulary:
        wrong = low if low not in vocabulary else high
        raise ValueError(f"{what} has the id {wrong}; the model embeds 0..{len(vocabulary) - 1}.")
    return row
