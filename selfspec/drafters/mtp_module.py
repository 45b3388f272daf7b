"""Transformers' MTP module, driven over ragged rows with keys and values of its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from selfspec.cache import TreeCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.architectures import Architecture

_PROBED = 8  # tokens
_SPARE = 64  # slots for what is written after the prompt, before the cache grows


class Drafts(Protocol):
    """What takes the drafts as they come."""

    ended: bool

    def add(self, logits: Tensor) -> Tensor:
        """Take the next token of every row from logits [B, V]; int64 [B]."""
        ...


def load_mtp(model: PreTrainedModel, path: str | None = None) -> Any:
    """The MTP module of a model's checkpoint, or of the one at `path`."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise ValueError(
            "MtpDrafter needs a transformers with MtpModel, as 5.24 has it; this is "
            f"{transformers.__version__}. Upgrade it, or draft with something else, such as "
            "NGramDrafter()."
        ) from None
    name = type(model).__name__
    if not getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None):
        raise ValueError(
            f"{name} has no MTP module: its config has no num_mtp_layers. Draft with something "
            "else, such as NGramDrafter()."
        )
    if not model._keys_to_ignore_on_load_unexpected:
        raise ValueError(
            f"transformers knows no keys of MTP weights in checkpoints of {name}; make the "
            "MtpModel yourself and pass it as mtp_model."
        )
    source = copy.copy(model)  # the user's keeps its config
    source.__dict__["config"] = copy.deepcopy(model.config)
    source.config.dtype = model.dtype  # not the name of it, which saving leaves there
    if path is not None:
        source.config._name_or_path = path
    device = next(_decoder_of(model).layers[-1].parameters()).device
    try:
        module = MtpModel.from_pretrained(source, device_map={"": device})
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the MTP weights of {name} could not be loaded from "
            f"{source.config.name_or_path!r}: {error}. Pass MtpDrafter.from_model(model, path) a "
            "checkpoint that has them."
        ) from error
    module.config._attn_implementation = "sdpa"  # the one that takes any mask and adds nothing
    return module.eval()


def _decoder_of(model: Any) -> Any:
    return model.get_decoder()


class MtpModule:
    """Transformers' module, driven over ragged rows.

    Its own `forward` takes one row, whose drafts all fit the layers; and masks that say where a row
    starts and ends are ours to make, since it makes its own from nothing but the cache.

    Args:
        mtp_model: Transformers' `MtpModel`.
        norm: The final norm of the model.
    """

    def __init__(self, mtp_model: Any, norm: nn.Module) -> None:
        self.mtp = mtp_model
        self.norm = norm
        self.depth = len(mtp_model.layers)
        config = mtp_model.config
        self.types = getattr(config, "layer_types", None) or ["full_attention"] * self.depth
        window = getattr(config, "sliding_window", None) or 0
        self.windows = [window if kind == "sliding_attention" else 0 for kind in self.types]
        weight = mtp_model.layers[0].eh_proj.weight
        self.device, self.dtype = weight.device, weight.dtype

    def check(self, architecture: Architecture, given: bool) -> None:
        """Refuse a module that does not fit the model, or runs otherwise than we think.

        Raises:
            ValueError: With the reason.
        """
        embeddings: Any = architecture.embeddings()
        theirs, own = tuple(self.mtp.embed_tokens.weight.shape), tuple(embeddings.weight.shape)
        if theirs != own:
            raise ValueError(
                f"mtp_model was made for embeddings {theirs}; those of the model are {own}. Make "
                "it from the model that is wrapped."
            )
        attention = self.mtp.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise ValueError(
                f"mtp_model uses attention {attention!r}, which takes no mask of ours; call "
                "mtp_model.set_attn_implementation('sdpa') first."
            )
        reason = f"its layers are of types {self.types}"
        if set(self.types) <= {"full_attention", "sliding_attention"}:
            try:
                reason = "" if self._agrees() else "its layers compute something else by our masks"
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
                reason = f"its layers do not run: {error!r}"
        if reason:
            what = "mtp_model" if given else "the MTP module of this checkpoint"
            raise ValueError(
                f"{what} cannot be driven: {reason}. Draft with something else, such as "
                "NGramDrafter()."
            )

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether a layer gives here what it gives by transformers' own call."""
        from transformers.cache_utils import MtpCache

        generator = torch.Generator().manual_seed(0)
        size = self.mtp.config.hidden_size
        hidden = torch.randn(1, _PROBED, size, generator=generator).to(self.device, self.dtype)
        tokens = torch.arange(_PROBED)[None] % self.mtp.embed_tokens.weight.shape[0]
        tokens = tokens.to(self.mtp.embed_tokens.weight.device)
        positions = torch.arange(1, _PROBED + 1, device=self.device)[None]
        cache = MtpCache(config=self.mtp.config)
        theirs = self.mtp.forward_layer(0, hidden, positions, cache, input_ids=tokens).float()
        found = self._layer(
            0, MtpRows.blank(self, [1], _PROBED, _PROBED), tokens, hidden, 0
        ).float()
        errors = (found - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        # The median: where experts are tied, a rounding may choose another one for some token.
        return bool(errors.median() < 0.02)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the module reads of the last layer's output [B, M, C]."""
        weight: Any = self.norm.weight
        normed: Tensor = self.norm(hidden.to(weight.device))
        return normed.to(self.device, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """After outputs [B, C], by the model's LM head."""
        weight = self.mtp.shared_head.weight
        logits: Tensor = self.mtp._project_to_logits(hidden.to(weight.device, weight.dtype))
        return logits

    def run(
        self,
        rows: MtpRows,
        tokens: Tensor,
        hidden: Tensor,
        counts: list[int],
        chain: Drafts | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Go on by final tokens, and draft what comes after them.

        Args:
            rows: What is kept.
            tokens: int64 [B, M], rows beginning with their `counts`; the rest is padding.
            hidden: [B, M, C], states of the target at the tokens before those.
            counts: How many of them are final in each row, perhaps 0.
            chain: Takes the drafts.
            num_tokens: Drafts wanted; deeper layers go on by final tokens alone.
        """
        width = tokens.shape[1]
        tokens = nn.functional.pad(tokens, (0, num_tokens))
        at = torch.tensor(counts, device=self.device)
        row = torch.arange(at.shape[0], device=self.device)
        source = hidden
        for k in range(self.depth):
            count = width + (k if k < num_tokens else 0)
            out = self._layer(k, rows, tokens[:, :count], source[:, :count], 0)
            # From here on the first one is of the last final token before these.
            source = torch.cat([rows.last[k][:, None], out], dim=1)
            rows.last[k] = source[row, at]
            if chain is not None and k < num_tokens:
                tip = source[row, at + k]
                token = chain.add(self.logits(tip)).to(tokens.device)
                tokens[row.to(tokens.device), at.to(tokens.device) + k] = token
                if chain.ended:
                    num_tokens = k + 1
        rows.advance(counts)
        for drafted in range(self.depth, num_tokens):
            assert chain is not None
            if chain.ended:
                break
            tip = self._layer(self.depth - 1, rows, token[:, None], tip[:, None], drafted - 1)[:, 0]
            token = chain.add(self.logits(tip)).to(tokens.device)

    def _layer(self, k: int, rows: MtpRows, tokens: Tensor, hidden: Tensor, offset: int) -> Tensor:
        """Layer k over `tokens` [B, M] and the states before them, behind `offset` drafts.

        Where layer k has no predecessor, at the first k tokens of a text, it has nothing to say.
        """
        if not tokens.shape[1]:
            return hidden
        cache, mtp = rows.cache, self.mtp
        cache.open(offset, tokens.shape[1])
        assert cache.window is not None
        slots = rows.lengths[:, None] + torch.arange(
            offset, offset + tokens.shape[1], device=self.device
        )
        keys, queries = torch.arange(cache.window[1], device=self.device), slots[:, :, None]
        seen = (keys >= k) & (keys <= queries)
        if self.windows[k]:
            seen &= keys > queries - self.windows[k]
        mask = (seen | (keys == queries))[:, None]
        if mtp.config._attn_implementation == "eager":  # it adds its mask
            lowest = torch.finfo(self.dtype).min
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, lowest)
        positions = rows.begin[:, None] + slots
        embedded = mtp.embed_tokens(tokens).to(self.device, self.dtype)
        angles = None
        if mtp.rotary_emb is not None:
            kind = {"layer_type": self.types[k]} if mtp.has_per_layer_rope else {}
            angles = mtp.rotary_emb(embedded, position_ids=positions, **kind)
        out: Tensor = mtp.layers[k](
            embedded,
            hidden,
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
        )
        return mtp.shared_post_norm(out) if mtp.use_shared_post_norm else out


@dataclass(eq=False)
class MtpRows:
    """What is kept of the sequences of a request.

    Attributes:
        cache: Keys and values of the module. Slot n of a row is its n-th token here, the same in
            all layers; layer k has nothing of the first k.
        begin: int64 [B], position of the first of them.
        lengths: int64 [B], `cache.lengths`: tokens that have run. (Drafts do not count.)
        last: [B, C] for every layer, what it made of the last token that has run.
    """

    cache: TreeCache
    begin: Tensor
    lengths: Tensor
    last: list[Tensor]

    @classmethod
    def blank(cls, module: MtpModule, begin: list[int], reserve: int, longest: int) -> MtpRows:
        """Rows of which nothing has run.

        Args:
            module: Whose rows they are.
            begin: Positions of their first tokens.
            reserve: Tokens to have room for at first.
            longest: The most tokens that a row can come to.
        """
        batch, device = len(begin), module.device
        cache = TreeCache(module.depth, batch, reserve=reserve + _SPARE, longest=longest)
        cache.settle([0] * batch)
        size = module.mtp.config.hidden_size
        return cls(
            cache,
            torch.tensor(begin, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            [torch.zeros(batch, size, dtype=module.dtype, device=device)] * module.depth,
        )

    def advance(self, counts: list[int]) -> None:
        """Keep what has been written for so many tokens of every row."""
        self.cache.lengths = [n + m for n, m in zip(self.cache.lengths, counts, strict=True)]
        self.lengths = torch.tensor(self.cache.lengths, device=self.lengths.device)
