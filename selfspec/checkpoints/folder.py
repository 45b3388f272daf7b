"""The own format: a folder with config.json and model.safetensors.

config.json says what the network is, which states of the base model it reads, and which model that
is; loading is strict about all three.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from selfspec.checkpoints.base_model import BaseModel
from selfspec.checkpoints.tensors import (
    fill,
    read_file,
    read_header,
    write_folder,
)
from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.networks.heads import HeadsConfig, HeadsNetwork
from selfspec.networks.vocabulary import DraftHead

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel

Kind = Literal["feature", "heads", "exit"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FORMAT = "selfspec-draft"
VERSION = 1
TAPS = "input of the layer; L: output of the last layer, before the final norm"
CONFIG, WEIGHTS = "config.json", "model.safetensors"

_CLASSES: dict[Kind, tuple[type[Any], type[nn.Module]]] = {
    "feature": (FeatureConfig, FeatureNetwork),
    "heads": (HeadsConfig, HeadsNetwork),
    "exit": (ExitConfig, ExitNetwork),
}
_REQUIRED = {"format", "version", "kind", "network", "taps", "base"}
_OPTIONAL = {"license", "selfspec_version", "training", "evaluation"}


@dataclass(frozen=True)
class Card:
    """What is known of a draft beside its weights.

    Attributes:
        base: The model that it was made for.
        license: SPDX name, or None.
        training: How it was trained, in any form that JSON has.
        evaluation: How good it is, likewise.
        source: Where it was read from.
        strict_base: Whether another base model is to be refused.
    """

    base: BaseModel
    license: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    strict_base: bool = True


def card_of(network: nn.Module) -> Card | None:
    """The card of a network that was loaded, or None."""
    card = getattr(network, "card", None)
    return card if isinstance(card, Card) else None


def with_card(network: nn.Module, card: Card) -> nn.Module:
    """The same network, with a card."""
    object.__setattr__(network, "card", card)  # no module or tensor: past nn.Module's registers
    return network


def kind_of(network: nn.Module) -> Kind:
    """Which kind of draft a network makes.

    Raises:
        TypeError: If it is none that is known.
    """
    for kind, (_, cls) in _CLASSES.items():
        if isinstance(network, cls):
            return kind
    known = ", ".join(cls.__name__ for _, cls in _CLASSES.values())
    raise TypeError(f"network is a {type(network).__name__}, which has no format: pass a {known}.")


def check_kind(network: object, kind: Kind, what: str) -> None:
    """Refuse a network of another kind.

    Args:
        network: As it was passed.
        kind: What it must be.
        what: Who asks, for the message.

    Raises:
        TypeError: If it is another.
    """
    wanted = _CLASSES[kind][1]
    if not isinstance(network, wanted):
        raise TypeError(
            f"{what} takes a {wanted.__name__}, got a {type(network).__name__}; of a drafter, pass "
            "its `network`."
        )


def save(
    network: nn.Module,
    folder: str | PathLike[str],
    *,
    base: PreTrainedModel | BaseModel | None = None,
    license: str | None = None,  # the word that model cards use
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network to a folder.

    Weights of the base model are never written: a network that uses them holds copies of rows that
    are no part of its state. Files appear whole or not at all, config.json last.

    Args:
        network: Of `selfspec.networks`.
        folder: Is made if need be; a draft in it is replaced.
        base: The model that it was made for; None: as the network's card says.
        license: SPDX name; None: as the card says, as for the next two.
        training: How it was trained.
        evaluation: How good it is.

    Returns:
        The folder.

    Raises:
        ValueError: If the base model is not known or has other sizes, if a weight of the network is
            one of the model's, or if a value is nothing that JSON has.
        TypeError: If the network is of an unknown kind.
    """
    kind, folder = kind_of(network), Path(folder)
    card = card_of(network)
    if base is None and card is None:
        raise ValueError("base is missing: pass the model that the draft was made for.")
    if base is not None and not isinstance(base, BaseModel):
        _refuse_aliases(network, base)
        base = BaseModel.of(base)
    card = card or Card(BaseModel())
    card = Card(
        base=base or card.base,
        license=card.license if license is None else license,
        training=dict(card.training if training is None else training),
        evaluation=dict(card.evaluation if evaluation is None else evaluation),
    )
    config: Any = network.config
    _check_sizes(kind, config, card.base, "network")
    from selfspec import __version__

    network_values = asdict(config)
    values = {
        "format": FORMAT,
        "version": VERSION,
        "selfspec_version": __version__,
        "kind": kind,
        "license": card.license,
        "base": asdict(card.base),
        "taps": {"convention": TAPS, "layers": _taps(kind, config, card.base)},
        "network": network_values,
        "training": card.training,
        "evaluation": card.evaluation,
    }
    weights = WEIGHTS, network.state_dict()
    return write_folder(folder, (CONFIG, values), weights, {"network": _digest(network_values)})


def read_own(folder: Path, values: Mapping[str, Any]) -> nn.Module:
    """Read a draft of the own format.

    Args:
        folder: Where it lies.
        values: Its config.json.

    Raises:
        ValueError: If anything in it is missing, unknown or does not fit.
    """
    where = folder / CONFIG
    version = values.get("version")
    if version != VERSION:
        raise ValueError(
            f"{where}: version {version!r} of the format is not known, this selfspec reads "
            f"{VERSION}. Upgrade selfspec, or save the draft with this one."
        )
    _check_keys(values, _REQUIRED, _OPTIONAL, where)
    kind, taps = values["kind"], values["taps"]
    if kind not in KINDS:
        raise ValueError(f"{where}: kind {kind!r} is not known, only {', '.join(KINDS)}.")
    if not isinstance(taps, dict) or taps.get("convention") != TAPS:
        raise ValueError(
            f"{where}: taps.convention must be {TAPS!r}, got {taps!r}. A network that was trained "
            "on other states would draft at random; save it again with those it was trained on."
        )
    base = BaseModel.from_dict(values["base"], where)
    config_class, network_class = _CLASSES[kind]
    config = _config(config_class, values["network"], where)
    _check_sizes(kind, config, base, where)
    if "layers" in taps and list(taps["layers"]) != _taps(kind, config, base):
        raise ValueError(
            f"{where}: taps.layers is {taps['layers']}, and the network reads "
            f"{_taps(kind, config, base)}. One of them was changed by hand."
        )
    for name in ("training", "evaluation"):
        if not isinstance(values.get(name), dict | None):
            raise ValueError(f"{where}: {name} must be an object, got {values[name]!r}.")
    weights = folder / WEIGHTS
    digest = read_header(weights).get("network")
    if digest not in (None, _digest(values["network"])):
        raise ValueError(
            f"{folder}: {CONFIG} and {WEIGHTS} are not of one save (it was interrupted, or the "
            "network's config was edited). Save the draft again."
        )
    network = network_class(config)
    fill(network, read_file(weights), weights)
    check_vocabulary(network, weights)
    card = Card(
        base=base,
        license=values.get("license"),
        training=dict(values.get("training") or {}),
        evaluation=dict(values.get("evaluation") or {}),
        source=str(folder),
    )
    return with_card(network, card)


def check_vocabulary(network: nn.Module, where: object) -> None:
    """Hold the draft vocabularies of a network to be ascending ids of the vocabulary.

    Raises:
        ValueError: If one is not.
    """
    for name, head in network.named_modules():
        if isinstance(head, DraftHead) and head.ids is not None:
            try:
                head.choose(head.ids.clone())
            except ValueError as error:
                raise ValueError(f"{where}: {name}.ids: {error}") from error


def _config(cls: type[Any], values: Mapping[str, Any], where: object) -> Any:
    """A network's config from JSON; fields with a default may be missing."""
    known = {f.name for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if not isinstance(values, dict):
        raise ValueError(f"{where}: network must be an object.")
    _check_keys(values, needed, known - needed, f"{where}: network")
    try:
        return cls(**{name: _frozen(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: network: {error}") from error


def _check_keys(
    values: Mapping[str, Any], needed: set[str], optional: set[str], where: object
) -> None:
    missing, unknown = sorted(needed - set(values)), sorted(set(values) - needed - optional)
    if missing or unknown:
        faults = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown]
        raise ValueError(
            f"{where}: {'; '.join(faults)}. It was edited, or written by another version of "
            "selfspec: save the draft again."
        )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _taps(kind: Kind, config: Any, base: BaseModel) -> list[int | None]:
    """Layers of the base model whose states the network reads."""
    if kind == "feature":
        return list(config.taps)
    return [config.exit_layer if kind == "exit" else base.shape.get("num_hidden_layers")]


def _check_sizes(kind: Kind, config: Any, base: BaseModel, where: object) -> None:
    """Hold a network's config to the model that it names."""
    size = config.target_hidden_size if kind == "feature" else config.hidden_size
    layers = base.shape.get("num_hidden_layers")
    faults = [
        f"its {name} is {value}, the base model's {base.shape[name]}"
        for name, value in (("hidden_size", size), ("vocab_size", config.vocab_size))
        if base.shape.get(name, value) != value
    ]
    faults += [
        f"it reads layer {tap}, and the base model has {layers}"
        for tap in _taps(kind, config, base)
        if tap is not None and layers is not None and not 0 <= tap <= layers
    ]
    if faults:
        raise ValueError(f"{where} does not fit the base model: {'; '.join(faults)}.")


def _refuse_aliases(network: nn.Module, model: PreTrainedModel) -> None:
    theirs = {
        p.untyped_storage().data_ptr(): name
        for name, p in model.named_parameters()
        if type(p.data) is Tensor and not p.is_meta and p.numel()
    }
    for name, tensor in network.state_dict().items():
        other = theirs.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if other is not None:
            raise ValueError(
                f"network's {name} is the base model's {other}, which is not saved with a draft: "
                "give the network a copy, or use own_head=False."
            )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
