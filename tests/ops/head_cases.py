"""Hidden states and heads for the tests of `draft_topk` and `exit_confidence`, and their logits.

A log-probability may be off by twice what torch's own norm, product and log-softmax in the same
dtype are at their worst over all tokens, and FLOOR, some roundings of numbers around 10.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from selfspec_kernels.draft_topk.head import Head
from torch import Tensor

FLOOR = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-6, torch.bfloat16: 4e-6}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (3,)
    vocab: int = 130
    size: int = 72
    k: int = 5
    dtype: torch.dtype = torch.float32
    norm: bool = True
    bias: bool = False
    reduced: int = 0
    memory: str = "contiguous"
    magnitude: float = 1.0
    options: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = [
            f"{name}{str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if name not in ("shape", "vocab", "options") and value != getattr(Case, name, None)
        ]
        named = [f"{name}{value}" for name, value in self.options.items()]
        return "-".join(["x".join(map(str, self.shape)), f"v{self.vocab}", *changed, *named])


EVERYTHING = {"norm_offset": 1.0, "norm_eps": 0.3, "logit_scale": 1.7, "softcap": 4.0}
CASES = [
    # The smallest there is; channels that do not fill a step; one token more than a block.
    Case((1,), 1, 8, k=1, norm=False),
    Case((), 31, k=3),
    Case((1,), 33, 72, k=33),
    Case((3,), k=8, bias=True, reduced=97, options=EVERYTHING),
    Case((3,), k=8, bias=True, reduced=97, options=EVERYTHING, dtype=torch.float16),
    Case((3,), k=8, bias=True, reduced=97, options=EVERYTHING, dtype=torch.bfloat16),
    # More lists than lanes of a warp; more of a block than it has; the whole vocabulary.
    Case((2,), 1100, 16, k=4, norm=False, dtype=torch.float16),
    Case((2,), 100, 40, k=64),
    Case((2,), 64, 136, k=64, norm=False, bias=True),
    # Blocks of rows, their borders.
    Case((16,), 70, 24, k=2),
    Case((17,), 200, 64, k=3, reduced=150, dtype=torch.bfloat16),
    Case((65,), 150, 40, k=2, norm=False),
    Case((2, 1, 3), k=4, options={"softcap": 3.0}),
    Case((2, 3), k=4, memory="strided", reduced=60, bias=True),
    Case((4, 2), k=4, memory="strided", dtype=torch.bfloat16),
    # Products that float16 holds only under the norm's factor, and a peaked distribution.
    Case((3,), k=4, dtype=torch.float16, magnitude=3e4, options={"norm_offset": 6.0}),
    Case((3,), k=6, options={"logit_scale": 40.0}),
]


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    options: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, self.weight, *(x for x in self.options.values() if torch.is_tensor(x))]


def build(case: Case, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*case.shape, case.size, generator=g) * min(case.magnitude, 1e4)
    if case.magnitude > 1:
        hidden[..., 1] = case.magnitude
    weight = torch.randn(case.vocab, case.size, generator=g) / case.size**0.5 * 2
    options: dict[str, Any] = dict(case.options)
    if case.norm:
        options["norm_weight"] = torch.rand(case.size, generator=g).to(case.dtype) + 0.5
    if case.bias:
        options["head_bias"] = torch.randn(case.vocab, generator=g).to(case.dtype)
    if case.reduced:
        options["token_ids"] = torch.randperm(case.vocab, generator=g)[: case.reduced]
    hidden, weight = hidden.to(case.dtype), weight.to(case.dtype)
    if case.memory == "strided":
        hidden = torch.stack([hidden, hidden + 9], -2).transpose(0, 1)[:, :, 0].transpose(0, 1)
        weight = torch.cat([weight, weight + 9], 1)[:, : case.size]
        assert not hidden.is_contiguous()
        assert not weight.is_contiguous()
    return Inputs(hidden, weight, options)


def oracle_logits(inputs: Inputs) -> Tensor:
    """[R, Vr] in float64, a row at a time."""
    options = {"norm_offset": 0.0, "norm_eps": 1e-6, "logit_scale": 1.0, "softcap": 0.0}
    options |= inputs.options
    ids = options.get("token_ids")
    ids = range(inputs.weight.shape[0]) if ids is None else ids.tolist()
    rows = []
    for h in inputs.hidden.double().reshape(-1, inputs.hidden.shape[-1]):
        if "norm_weight" in options:
            gain = options["norm_weight"].double() + options["norm_offset"]
            h = h / math.sqrt((h @ h).item() / len(h) + options["norm_eps"]) * gain
        logits = torch.stack([inputs.weight[i].double() @ h for i in ids])
        if "head_bias" in options:
            logits += options["head_bias"].double()[ids]
        logits *= options["logit_scale"]
        if options["softcap"]:
            logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
        rows.append(logits)
    return torch.stack(rows)


def allowed_error(inputs: Inputs, exact: Tensor) -> float:
    """What log-probabilities may be off by: twice torch's own error, and FLOOR."""
    dtype, options = inputs.hidden.dtype, inputs.options
    h = inputs.hidden.reshape(-1, inputs.hidden.shape[-1])
    if "norm_weight" in options:
        gain = options["norm_weight"].float() + options.get("norm_offset", 0.0)
        eps = options.get("norm_eps", 1e-6)
        h = (torch.nn.functional.rms_norm(h.float(), h.shape[-1:], gain, eps)).to(dtype)
    logits = torch.nn.functional.linear(h, inputs.weight).float()
    if "head_bias" in options:
        logits = logits + options["head_bias"].float()
    logits = logits * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
    if "token_ids" in options:
        logits = logits[:, options["token_ids"]]
    worst = (logits.log_softmax(-1).double() - exact.log_softmax(-1)).abs().max().item()
    return 2 * worst + FLOOR[dtype]


def in_order(logits: list[float]) -> list[int]:
    """Positions, the largest first and of equal ones the first."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def head_of(inputs: Inputs) -> Head:
    """What the public functions make of the options."""
    options = inputs.options
    return Head(
        inputs.weight,
        options.get("norm_weight"),
        options.get("norm_eps", 1e-6),
        options.get("norm_offset", 0.0),
        options.get("head_bias"),
        options.get("logit_scale", 1.0),
        options.get("softcap", 0.0),
        options.get("token_ids"),
    )
