"""A byte-level tokenizer of 64 tokens, and a model that writes a text known beforehand.

Characters outside ASCII are two to four tokens each, so that they split over tokens, blocks and
stop strings, as in published byte-level vocabularies.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import tiny

PAD, EOS, USER, ASSISTANT = "<pad>", "<end>", "<user>", "<assistant>"
EOS_ID, USER_ID = 1, 2
_MERGES = [("t", "h"), ("th", "e"), ("s", "t"), ("o", "p"), ("st", "op"), ("i", "n"), ("e", "r")]
_PLAIN = "abcdefghijklmnopqrstuvwxyz \n.,!?"
_WIDE = "é€😀中文"
# Every token once: what follows a token in this text is what `writer` writes after it.
_SCRIPT = [
    *("th", "in", "er", " ", "é", "the", "\n", "€", "st", "op", ",", "😀", "stop", ".", "中", "文"),
    *"abcdefghijklmnopqrstuvwxyz",
    *("!", "?"),
]

_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@cache
def tokenizer() -> Any:
    """Id 0 is padding, 1 the end; shared: never change it."""
    to_char = _byte_characters()
    letters = [to_char[b] for b in _PLAIN.encode()]
    wide = list(dict.fromkeys(to_char[b] for b in _WIDE.encode()))
    special = [PAD, EOS, USER, ASSISTANT]
    pieces = [*special, *letters, *wide, *("".join(pair) for pair in _MERGES)]
    pieces += [f"<unused{i}>" for i in range(tiny.VOCAB - len(pieces))]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, _MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        chat_template=_TEMPLATE,
    )


def script() -> list[int]:
    """The cycle of tokens that `writer` follows; all of them but special ones, each once."""
    ids = [i for piece in _SCRIPT for i in tokenizer().encode(piece)]
    assert len(set(ids)) == len(ids)
    return ids


@cache
def writer() -> Any:
    """A llama whose next token depends on the last one alone: it follows `script`, again and again.

    It forgives wrong positions and keys (their say is too small to change a choice, though not to
    be seen by the probes of `wrap`); what matters here is the text. Shared: never change it.
    """
    model: Any = copy.deepcopy(tiny.build("llama"))
    ids = script()
    follows = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(10 * torch.eye(tiny.VOCAB))
        model.lm_head.weight.zero_()
        for token in range(tiny.VOCAB):
            model.lm_head.weight[follows.get(token, ids[0]), token] = 1.0
    return model


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(shifted)}
