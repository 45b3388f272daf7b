"""Tensors and JSON in files: written whole or not at all, and never a pickle.

Published drafts come as .bin and .pt as well. Those are read by torch's restricted unpickler, which
makes tensors and containers of them and nothing else.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SAFE = ".safetensors"


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a .safetensors file, atomically.

    Args:
        tensors: On any device. Those that share memory are written as copies of their own.
        path: Where; its folder exists.
        metadata: Strings for the file's header.
    """
    seen: set[int] = set()
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        place = plain.untyped_storage().data_ptr()
        whole[name] = plain.clone() if place in seen else plain
        seen.add(place)
    header = {"format": "pt", **metadata}
    _replace(path, lambda temporary: save_file(whole, temporary, header))


def write_text(text: str, path: Path) -> None:
    """Write a text file, atomically."""
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def json_text(value: Mapping[str, Any], name: str) -> str:
    """JSON for people to read.

    Args:
        value: What to write.
        name: Of the file, for the message.

    Raises:
        ValueError: If a value is nothing that JSON has.
    """
    try:
        return json.dumps(value, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written: {error}. Pass numbers and text.") from error


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file, atomically; errors as for `json_text`."""
    write_text(json_text(value, path.name), path)


def write_folder(
    folder: Path,
    config: tuple[str, Mapping[str, Any]],
    weights: tuple[str, Mapping[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a config and the weights that belong to it, the config last.

    Args:
        folder: Is made if need be.
        config: Name of the file, and what is in it.
        weights: Name of the file, and the tensors.
        metadata: Of the weights' file.

    Returns:
        The folder.

    Raises:
        ValueError: If a value of the config is nothing that JSON has; nothing is written then.
    """
    text = json_text(config[1], config[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(weights[1], folder / weights[0], metadata or {})
    write_text(text, folder / config[0])
    return folder


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: If there is no such file, or no object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: {path.parent} holds no draft.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}): fetch the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}.")
    return value


def read_header(path: Path) -> dict[str, str]:
    """The strings in the header of a .safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch or save it again.") from error


def read_tensors(folder: Path, stems: Iterable[str]) -> dict[str, Tensor]:
    """Read the weights of a folder on the CPU, whatever file format they are in.

    Args:
        folder: Where they lie.
        stems: Names of the file without its ending, the preferred one first. Of each, .safetensors
            is preferred, then a .safetensors index with its shards, then .bin and .pt.

    Raises:
        ValueError: If there is no such file, or one that cannot be read.
    """
    tried = []
    for stem in stems:
        for ending in (SAFE, f"{SAFE}.index.json", ".bin", ".pt"):
            path = folder / f"{stem}{ending}"
            tried.append(path.name)
            if path.is_file():
                return _shards(path) if ending.endswith("json") else read_file(path)
    raise ValueError(f"{folder} holds no weights: looked for {', '.join(tried)}.")


def _shards(index: Path) -> dict[str, Tensor]:
    names = read_json(index).get("weight_map")
    files = sorted(set(names.values())) if isinstance(names, dict) else []
    if not files or any(Path(file).name != file or not file.endswith(SAFE) for file in files):
        raise ValueError(f"{index}: weight_map must name {SAFE} files of this folder.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_file(index.with_name(file))
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """Read one file of named tensors on the CPU.

    Raises:
        ValueError: If it cannot be read, or holds anything else.
    """
    try:
        if path.suffix == SAFE:
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and was not loaded, since a pickle can run code. "
            f"Convert it to {SAFE} where you trust it."
        ) from error
    except (FileNotFoundError, SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch or save it again.") from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{path} must hold a dict of tensors, the state dict of a draft.")
    return dict(found)


def fill(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    where: object,
    names: Mapping[str, str] | None = None,
) -> None:
    """Give `network` its weights, all of them and no others.

    The parameters take the dtypes of the tensors. A network may name keys in `optional_keys`: those
    keep what they are made with where a file has none of them.

    Args:
        network: Whose state dict it is.
        tensors: Under the names of the file.
        where: The file or folder, for messages.
        names: From names of the state dict to those of the file, where they differ.

    Raises:
        ValueError: If a key is missing or unknown, or a shape or dtype is another; all are named.
    """
    own = network.state_dict()
    names = {name: name for name in own} if names is None else names
    optional = getattr(network, "optional_keys", ())
    missing = [names[n] for n in own if names[n] not in tensors and n not in optional]
    unknown = sorted(set(tensors) - {names[name] for name in own})
    faults = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown]
    taken: dict[str, Tensor] = {}
    for name, value in own.items():
        tensor = tensors.get(names[name])
        if tensor is None:
            continue
        if tensor.shape != value.shape:
            shapes = f"{list(tensor.shape)}, expected {list(value.shape)}"
            faults.append(f"{names[name]} has shape {shapes}")
        elif tensor.is_floating_point() != value.is_floating_point():
            faults.append(f"{names[name]} is {tensor.dtype}, expected {value.dtype}")
        taken[name] = tensor if tensor.is_floating_point() else tensor.to(value.dtype)
    if faults:
        raise ValueError(
            f"{where} does not fit its config: {'; '.join(faults)}. Weights and config must be of "
            "one draft, in a layout that this version knows; nothing was loaded."
        )
    network.load_state_dict(taken, strict=not optional, assign=True)
