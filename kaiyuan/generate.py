"""Continue texts with a checkpoint or an exported model, through transformers."""

import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging as transformers_logging

from kaiyuan.checkpoint.describe import CheckpointInfo, describe_checkpoint
from kaiyuan.checkpoint.export import KIND, export
from kaiyuan.checkpoint.hf_config import read_config, register_variant
from kaiyuan.checkpoint.load import INDEX, TorchDistCheckpoint
from kaiyuan.checkpoint.names import EMBEDDING
from kaiyuan.checkpoint.safetensors_io import DTYPES
from kaiyuan.files import MANIFEST, read_manifest, sha256_of_json
from kaiyuan.sampling import Sampling, check_length, check_prompts


def generate(
    hf_folder: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    batch_size: int = 8,
    on_text: Callable[[str], None] | None = None,
) -> list[str]:
    """Continue each prompt.

    Args:
        hf_folder: an exported model; see :func:`exported`.
        prompts: not empty.
        sampling: how to choose the tokens.
        batch_size: so many prompts at once, padded on the left.
        on_text: gets the text piece by piece as it comes, where there is one prompt.

    Returns:
        What follows each prompt, without the prompt.

    Raises:
        UserError: a prompt is empty or too long for the model, or the sampling makes no sense.
    """
    sampling.check()
    check_prompts(prompts)
    transformers_logging.disable_progress_bar()
    register_variant()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(hf_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype="auto").to(device).eval()
    torch.manual_seed(sampling.seed)
    streamer = _Streamer(tokenizer, on_text) if on_text and len(prompts) == 1 else None
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            list(prompts[start : start + batch_size]), return_tensors="pt", padding=True
        )
        ids = batch["input_ids"].to(device)
        check_length(ids.shape[1] + sampling.max_new_tokens, model.config.max_position_embeddings)
        out = model.generate(
            ids,
            attention_mask=batch["attention_mask"].to(device),
            streamer=streamer,
            max_new_tokens=sampling.max_new_tokens,
            **_choice(sampling),
        )
        texts += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


def _choice(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"do_sample": False}
    # top_k would be 50 unless it is switched off.
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def model_folder(
    path: Path,
    model: Path | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
) -> tuple[Path, Path]:
    """Return the folder that transformers loads, and what it was made of.

    Args:
        path: an exported model, or a checkpoint, which is exported beside itself. For it and the
            others see :func:`~kaiyuan.checkpoint.describe.describe_checkpoint`.

    Returns:
        The exported folder, and the checkpoint's own folder (the same one where ``path`` is an
        exported model).

    Raises:
        UserError: there is neither, or an exported model's config.json cannot be read.
    """
    if (path / "config.json").is_file():
        read_config(path)
        return path.resolve(), path.resolve()
    info = describe_checkpoint(path, model, vocab_size, tokenizer)
    return exported(info), info.folder


def exported(info: CheckpointInfo) -> Path:
    """Export a checkpoint beside itself, in its own precision, unless that was done before.

    The folder has a key of the checkpoint's content in its name, so that an old export is never
    taken for a new checkpoint of the same name; exports of replaced checkpoints are removed.

    Returns:
        The folder, ``<checkpoint>-hf-<key>``.
    """
    stem = f"{info.folder.name}-hf-"
    folder = info.folder.parent / f"{stem}{_content_key(info)}"
    for old in info.folder.parent.glob(f"{stem}*"):
        if old != folder and re.fullmatch(r"[0-9a-f]{12}", old.name.removeprefix(stem)):
            shutil.rmtree(old)
    if (folder / MANIFEST).is_file():
        read_manifest(folder, KIND)
        return folder
    dtype = TorchDistCheckpoint(info.folder).tensors[EMBEDDING.megatron].dtype
    names = {value: name for name, value in DTYPES.items()}
    print(f"exporting {info.folder} to {folder}", file=sys.stderr)
    export(info, folder, names.get(dtype, "float32"))
    return folder


def _content_key(info: CheckpointInfo) -> str:
    files = sorted(path for path in info.folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    index = info.folder / INDEX
    description = replace(info, tokenizer=None)
    return sha256_of_json(
        [
            stats,
            hashlib.sha256(index.read_bytes()).hexdigest() if index.is_file() else None,
            [description.model, description.vocab_size, description.history, str(info.tokenizer)],
        ]
    )[:12]
