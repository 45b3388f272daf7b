"""A trained network as it runs on the models that it drafts for.

The user's network is left as it is. A model of another device or dtype, or one whose LM head the
network borrows rows of, gets a copy, made once and again when model or network have changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from selfspec_kernels.draft_topk import draft_topk
from torch import Tensor, nn

from selfspec.networks.exit import ExitNetwork
from selfspec.networks.feature import FeatureNetwork
from selfspec.networks.vocabulary import DraftHead
from selfspec.readout import is_plain

if TYPE_CHECKING:
    from selfspec.architectures import Architecture

Network = TypeVar("Network", bound=nn.Module)


class FittedNetwork(Generic[Network]):
    """One network, and what it looks like on every model that it drafts for.

    Args:
        network: As the user made or loaded it.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        # By model: what model and network looked like, and the network as it runs there.
        self._known: WeakKeyDictionary[Architecture, tuple[Any, Network]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """How many models it is fitted to."""
        return len(self._known)

    def __getitem__(self, architecture: Architecture) -> Network:
        """The network as it was last made for a model."""
        return self._known[architecture][1]

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be made again from a model."""
        return {"network": self.network}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy that shares nothing."""
        self.network, self._known = state["network"], WeakKeyDictionary()

    def check_sizes(
        self, architecture: Architecture, hidden_size: int, embeds: bool = False
    ) -> None:
        """Refuse a model that the network was not made for.

        Args:
            architecture: Of the model.
            hidden_size: C of the states that the network reads.
            embeds: Whether it reads the model's embeddings, too, of the same size.

        Raises:
            ValueError: If sizes differ, the network drafts a token that the model does not have,
                the LM head has no rows to borrow, or the model's states are no vectors.
        """
        if any(tensor.is_meta for tensor in self.network.parameters()):
            raise ValueError(
                "the draft's network has no weights, they are on the meta device: load them."
            )
        if architecture.states_fault:
            raise ValueError(
                "trained drafts read the states between the model's layers, and "
                f"{architecture.states_fault}; use a drafter that is not trained."
            )
        if architecture.hidden_size not in (0, hidden_size):
            raise ValueError(
                f"the draft was made for hidden_size={hidden_size}, the model has "
                f"{architecture.hidden_size}; use one that was trained on this model."
            )
        embedding: Any = architecture.embeddings()
        if embeds and embedding.weight.shape[1] != hidden_size:
            raise ValueError(
                f"the draft takes embeddings of hidden_size={hidden_size}, those of the model have "
                f"{embedding.weight.shape[1]}; use another kind of draft."
            )
        count = len(architecture.vocabulary)
        for head in _heads(self.network):
            if head.weight is None:
                rows, read = _lent(architecture).shape
                count = min(count, rows)
                if read != hidden_size:
                    raise ValueError(
                        f"own_head=False: the model's LM head reads {read} numbers, the draft has "
                        f"hidden_size={hidden_size}; use a draft with an LM head of its own."
                    )
            highest = head.vocab_size - 1 if head.ids is None else int(head.ids.max())
            if highest >= count:
                raise ValueError(
                    f"the draft can draft token {highest} (of vocab_size={head.vocab_size}), the "
                    f"model has tokens 0..{count - 1}; use one that was trained on this model."
                )

    def for_model(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        check: Callable[[Architecture], None],
    ) -> Network:
        """The network for a model, which may have changed since it was bound.

        Args:
            architecture: Of the model.
            dtype: Of the states that it reads.
            device: Where token ids go in.
            check: Called before the network is made anew; raises if they no longer fit.
        """
        borrows = any(head.weight is None for head in _heads(self.network))
        tensors = [*self.network.parameters(), *self.network.buffers()]
        if borrows:
            tensors.append(_lent(architecture))
        key = dtype, device, len(architecture.vocabulary), [_mark(tensor) for tensor in tensors]
        known = self._known.get(architecture)
        if known is not None and known[0] == key:
            return known[1]
        check(architecture)
        with torch.inference_mode(False), torch.no_grad():
            # Other modules around the same tensors; moving those leaves the user's as they are.
            memo: dict[int, Any] = {id(tensor): tensor for tensor in self.network.buffers()}
            for tensor in self.network.parameters():
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
            network = copy.deepcopy(self.network, memo)
            for head in _heads(network):
                if borrows:
                    head.attach(tensors[-1])
            network = network.to(device=device, dtype=dtype).eval()
            if isinstance(network, FeatureNetwork | ExitNetwork):
                network.pack()
        self._known[architecture] = key, network
        return network


def best_tokens(head: DraftHead, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens after each of `states` [..., C], what the head reads.

    Returns:
        int64 tokens and float32 log-probabilities [..., k], best first; k is `count`, or all of a
        smaller vocabulary.
    """
    count = min(count, head.size)
    if states.is_cuda:
        indices, log_probs = draft_topk(states, head.matrix, count)
    else:  # for other devices the fused operation is defined, not made
        log_probs, indices = head(states).float().log_softmax(-1).topk(count)
    return head.tokens(indices), log_probs


def _heads(network: nn.Module) -> list[DraftHead]:
    return [part for part in network.modules() if isinstance(part, DraftHead)]


def _lent(architecture: Architecture) -> Tensor:
    """The weight [V, C] of the model's LM head.

    Raises:
        ValueError: If it is not what the model computes with.
    """
    head = architecture.head()
    if type(head) is not nn.Linear or not is_plain(head):
        raise ValueError(
            "own_head=False: the draft uses rows of the model's LM head, which is no plain linear "
            "layer (it may be quantised); use a draft with an LM head of its own."
        )
    return head.weight


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from another one, and from itself after it was written to."""
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device
