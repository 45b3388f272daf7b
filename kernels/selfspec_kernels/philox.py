"""Random numbers that depend on what they are for and on nothing else: Philox 4x32-10.

Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405. Number i of a position is word i % 4 of
the counter (i // 4, position, stream, node) under the key `seed`: a pure function of these, so that
neither the other rows of a batch nor padding, splitting or the order of work can change it. Kernels
compute the same bits with `triton.language.philox`.
"""

import torch
from torch import Tensor

# What a number is drawn for. One number must never serve two purposes: a coin that decides on a
# token and the noise that draws the next one would be dependent.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def uniform(seed: Tensor, index: Tensor, position: Tensor, stream: int) -> Tensor:
    """Uniform numbers in (0, 1), neither end included.

    Args:
        seed: int64; all 64 bits are the key.
        index: Integers in 0..2**32 - 1: which number of a position, such as a node or a token.
        position: Integers in 0..2**32 - 1: the position of a token in its sequence.
        stream: `DRAFT`, `ACCEPT` or `RESIDUAL`.

    Returns:
        float32 of the shape that the three tensors broadcast to. Numbers near 0 are resolved to
        2**-32, the largest is 1 - 2**-24.
    """
    words = torch.stack(_philox(seed, index >> 2, position, stream), dim=-1)
    lane = (index & 3).expand(words.shape[:-1])[..., None]
    return _between(words.gather(-1, lane)[..., 0])


def exponential(
    seed: Tensor, count: int, position: Tensor, stream: int, node: int | Tensor = 0
) -> Tensor:
    """Standard exponential numbers, -log(1 - uniform), of the indices 0..count - 1.

    The x of the least e[x] / w[x] has the law w[x] / sum(w): a draw without a sum.

    Args:
        seed: int64 [...].
        count: How many.
        position: Like `seed`.
        stream: See `uniform`.
        node: Tells apart several draws of one position, such as those of a draft; one number, or
            integers like `seed`.

    Returns:
        float32 [..., count]; small numbers, which decide, keep their precision. The three tensors
        are broadcast.
    """
    index = torch.arange(-(-count // 4), device=seed.device)
    if isinstance(node, Tensor):
        node = node[..., None]
    words = torch.stack(_philox(seed[..., None], index, position[..., None], stream, node), dim=-1)
    return torch.log1p(_between(words.flatten(-2)[..., :count]).neg_()).neg_()


def _philox(
    seed: Tensor, index: Tensor, position: Tensor, stream: int, node: int | Tensor = 0
) -> tuple[Tensor, ...]:
    """The four words of one counter, as int64 in 0..2**32 - 1."""
    key = [seed & _WORD, (seed >> 32) & _WORD]
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    counter = [index.long() & _WORD, position.long() & _WORD, zero + stream, zero + node]
    for _ in range(_ROUNDS):
        # Products of 32-bit words wrap in int64, but all of their 64 bits are right.
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            ((second >> 32) & _WORD) ^ counter[1] ^ key[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
    return torch.broadcast_tensors(*counter)


def _between(word: Tensor) -> Tensor:
    """32 bits as a float32 in (0, 1)."""
    return ((word.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
