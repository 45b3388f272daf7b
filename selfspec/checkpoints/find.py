"""Where drafts are looked for, and which layout they have."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from selfspec.checkpoints.base_model import BaseModel, check_base
from selfspec.checkpoints.eagle import read_eagle
from selfspec.checkpoints.folder import (
    CONFIG,
    FORMAT,
    KINDS,
    Kind,
    card_of,
    kind_of,
    read_own,
    with_card,
)
from selfspec.checkpoints.medusa import STEM, read_medusa
from selfspec.checkpoints.skip_sets import FoundSkipSet, skip_set_in
from selfspec.checkpoints.speculators import read_speculators
from selfspec.checkpoints.tensors import read_json, read_tensors

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel

logger = logging.getLogger("selfspec")

BESIDE = "drafts"
BEST = "best"  # in the folder of a training run
_STEMS = ("model", "pytorch_model")
_EAGLE_MARKS = ("fc.", "midlayer.", "d2t")
_MEDUSA_KEYS = {"medusa_num_heads", "medusa_num_layers"}


def load(
    source: str | PathLike[str],
    *,
    model: PreTrainedModel | None = None,
    kind: Kind | None = None,
    strict_base: bool = True,
) -> nn.Module:
    """Load one draft, in the own format or a published layout.

    Args:
        source: A folder, or a repository on the Hugging Face Hub.
        model: The model that it is to draft for; then the base is checked here, else when a wrapper
            meets it. Some published layouts cannot be read without.
        kind: Which one, if there are several.
        strict_base: See `check_base`.

    Returns:
        A network of `selfspec.networks`, on the CPU, in the dtypes that it was saved with.

    Raises:
        ValueError: If there is none or several, or something in it is missing, unknown or wrong.
    """
    found = load_all(source, model=model, strict_base=strict_base)
    if kind is None and len(found) > 1:
        raise ValueError(f"{source} holds several drafts: choose kind= from {', '.join(found)}.")
    if kind is not None and kind not in found:
        raise ValueError(f"{source} holds no draft of kind={kind!r}, only {', '.join(found)}.")
    return found[kind] if kind is not None else next(iter(found.values()))


def load_all(
    source: str | PathLike[str],
    *,
    model: PreTrainedModel | None = None,
    strict_base: bool = True,
) -> dict[Kind, nn.Module]:
    """Load all drafts of a folder: its own, or those in its subfolders feature, heads and exit.

    The folder of a training run holds the draft that is in its subfolder `best`.

    Args and errors are those of `load`.

    Returns:
        Networks by kind.
    """
    folder = local(source)
    found: dict[Kind, nn.Module] = {}
    for place in _places(folder):
        network = _one(place, model, strict_base)
        kind = kind_of(network)
        if place not in (folder, folder / BEST) and kind not in (place.name, place.parent.name):
            raise ValueError(f"{place} holds a draft of kind {kind!r}: rename the folder.")
        found[kind] = network
    if not found:
        looked = ", ".join(str(Path(p.name, CONFIG)) for p in (folder / k for k in KINDS))
        raise ValueError(f"{folder} holds no drafts: looked for {CONFIG}, {looked}.")
    return found


def find_drafts(
    model: PreTrainedModel,
    drafts: str | PathLike[str] | None = None,
    strict_base: bool = True,
) -> dict[str, Any]:
    """The drafts of a model: those that are named, or those that lie beside it.

    Args:
        model: What is drafted for.
        drafts: A folder, or a repository on the Hugging Face Hub. None: the folder `drafts` in the
            one that the model was loaded from, if it was a folder and has one.
        strict_base: See `check_base`.

    Returns:
        Networks by kind, and as "skip_set" what a search found; empty if none are named and none
        lie there. What lies beside the model and
        does not load is left out with a warning, since nobody asked for it.

    Raises:
        ValueError: As `load`, for drafts that are named.
    """
    if drafts is not None:
        folder = local(drafts)
        skip_set = skip_set_in(folder, model, strict_base)
        if skip_set is not None and not _places(folder):
            return {"skip_set": skip_set}
        named = load_all(folder, model=model, strict_base=strict_base)
        return {str(kind): network for kind, network in named.items()} | (
            {} if skip_set is None else {"skip_set": skip_set}
        )
    home = getattr(model.config, "_name_or_path", "") or getattr(model, "name_or_path", "") or ""
    beside = Path(home) / BESIDE
    if not home or not beside.is_dir():
        return {}
    found: dict[str, Any] = {}
    # One by one: what is wrong with one draft says nothing of the others.
    for place in _places(beside):
        try:
            for kind, network in load_all(place, model=model, strict_base=strict_base).items():
                found[kind] = network
        except ValueError as error:
            logger.warning("a draft beside the model is not used: %s", error)
    try:
        if (skip_set := skip_set_in(beside, model, strict_base)) is not None:
            found["skip_set"] = skip_set
    except ValueError as error:
        logger.warning("a skip set beside the model is not used: %s", error)
    return found


def has_network(folder: Path) -> bool:
    """Whether a folder holds a trained draft."""
    return bool(_places(folder))


def check_made_for(made: nn.Module | FoundSkipSet | BaseModel, model: PreTrainedModel) -> None:
    """Refuse a network, or what a search or calibration found, that is another model's.

    Raises:
        ValueError: If it is.
    """
    if isinstance(made, nn.Module):
        check_network(made, model)
    else:
        check_base(made.base if isinstance(made, FoundSkipSet) else made, model)


def check_network(network: nn.Module, model: PreTrainedModel) -> None:
    """Refuse a network that was loaded for another model, or reads layers that are not there.

    Raises:
        ValueError: If its card names another base model (a network that was made here has none), or
            it reads a layer behind the last.
    """
    card = card_of(network)
    if card is not None:
        check_base(card.base, model, card.strict_base)
    config: Any = network.config
    last = max(getattr(config, "taps", ()), default=getattr(config, "exit_layer", 0))
    if last > (layers := _layers(model)):
        raise ValueError(
            f"the draft reads layer {last}, and the model has {layers}: load one that was made for "
            "this model."
        )


def _places(folder: Path) -> list[Path]:
    """Where a draft lies: the folder itself, or those of its subfolders that are named by kind.

    In each of them, or where training leaves the best one of a run.
    """
    if own := _draft_in(folder):
        return [own]
    return [place for kind in KINDS if (place := _draft_in(folder / kind)) is not None]


def _draft_in(folder: Path) -> Path | None:
    return next((p for p in (folder, folder / BEST) if (p / CONFIG).is_file()), None)


def _one(folder: Path, model: PreTrainedModel | None, strict_base: bool) -> nn.Module:
    try:
        network = _read(folder, model)
    except (TypeError, AttributeError, KeyError, IndexError, OSError) as error:
        # A field of another type, at any depth; or a file that is none.
        raise ValueError(
            f"{folder} cannot be read as a draft ({type(error).__name__}: {error}): fetch or save "
            "it again."
        ) from error
    card = card_of(network)
    if card is not None:
        with_card(network, replace(card, strict_base=strict_base))
    if model is not None:
        check_network(network, model)
    return network


def _layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _read(folder: Path, model: PreTrainedModel | None) -> nn.Module:
    """The draft in a folder with a config.json."""
    config = read_json(folder / CONFIG)
    if config.get("format") == FORMAT:
        return read_own(folder, config)
    if "format" in config and "version" in config:
        raise ValueError(
            f"{folder / CONFIG}: format {config['format']!r} is not known, only {FORMAT!r} and the "
            "layouts of Medusa, EAGLE and speculators."
        )
    layers = None if model is None else _layers(model)
    if "speculators_model_type" in config:
        return read_speculators(config, read_tensors(folder, _STEMS), folder, layers)
    if _is_medusa(folder, config):
        return read_medusa(config, read_tensors(folder, (STEM, *_STEMS)), folder)
    tensors = read_tensors(folder, _STEMS)
    if not any(name.removeprefix("model.").startswith(_EAGLE_MARKS) for name in tensors):
        raise ValueError(
            f"{folder} holds no draft in a layout that is known: selfspec's own, or those of "
            "Medusa, EAGLE and speculators."
        )
    return read_eagle(config, tensors, folder, layers)


def _is_medusa(folder: Path, config: dict[str, Any]) -> bool:
    named = config.get("model_type") == "medusa" or _MEDUSA_KEYS & set(config)
    return bool(named) or any(folder.glob(f"{STEM}.*"))


def local(source: str | PathLike[str]) -> Path:
    """The folder itself, or a copy of the repository."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    name = str(source)
    if not isinstance(source, str) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(
            f"{name!r} is no folder, and no name of a repository (owner/name) either: pass the "
            "folder that holds the draft's config.json."
        )
    import huggingface_hub

    def fetched(*endings: str) -> Path:
        patterns = [f"{depth}*{ending}" for depth in ("", "*/") for ending in endings]
        try:
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ValueError(f"{name!r} is no folder, and cannot be fetched: {error}") from error

    copy = fetched(".json", ".safetensors")
    return copy if any(copy.rglob("*.safetensors")) else fetched(".json", ".bin", ".pt")
