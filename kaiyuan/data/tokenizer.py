"""Byte-level BPE tokenizers in the four files of the Qwen family: load, extract, train, encode.

``tokenizer.json`` alone decides the ids. The other three are what Megatron and transformers may
read instead, so they must say the same.
"""

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kaiyuan.errors import UserError
from kaiyuan.files import (
    atomic_folder,
    atomic_write,
    read_manifest,
    sha256_of_json,
    write_json,
    write_manifest,
)

FILES = ("merges.txt", "tokenizer.json", "vocab.json", "tokenizer_config.json")
_NEEDED = ("tokenizer.json", "tokenizer_config.json")  # the others can be made of these
ENDOFTEXT = "<|endoftext|>"
KIND = "tokenizer"
SMALLEST = 257  # a token for each byte, and <|endoftext|>
# Qwen's pre-tokenizer: one digit a token, words with one leading mark, runs of marks, spaces.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

EncoderName = Literal["fast", "hf"]
# What becomes of text that spells a special token: "parse" gives the token's id, as Hugging Face
# does by default; "literal" encodes it as ordinary text.
SpecialText = Literal["parse", "literal"]


@dataclass(frozen=True)
class TokenizerInfo:
    """A checked tokenizer folder.

    Attributes:
        folder: where its four files are.
        hash: SHA-256 of all that decides ids; line ends and key order do not matter.
        json_sha256: SHA-256 of the bytes of tokenizer.json.
        vocab_size: highest id + 1, added tokens included.
        tokens: id of every token.
        added: names of the added tokens, which no ordinary text is cut into.
    """

    folder: Path
    hash: str
    json_sha256: str
    vocab_size: int
    tokens: dict[str, int]
    added: frozenset[str]

    def end_id(self, token: str) -> int:
        """Return the id of a token that is to end documents.

        Raises:
            UserError: there is no such token, or it is one of ordinary text, which would seem to
                end a document wherever it stands.
        """
        if token not in self.added:
            fault = "is a token of ordinary text in" if token in self.tokens else "is no token of"
            some = sorted(self.added, key=self.tokens.__getitem__)[:5]
            raise UserError(
                f"{token!r} {fault} the tokenizer {self.folder}: documents end with an added token"
                f", such as {', '.join(some) or 'none that it has'}"
            )
        return self.tokens[token]


def load_tokenizer(folder: Path) -> TokenizerInfo:
    """Read the four files of a tokenizer and check that they agree with each other.

    Raises:
        UserError: one is missing, unreadable, or says other than tokenizer.json.
    """
    folder = Path(folder)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is not a whole tokenizer: {', '.join(missing)} missing")
    return _check_agreement(folder)


def _check_agreement(folder: Path) -> TokenizerInfo:
    """Check a tokenizer as far as it is there: vocab.json and merges.txt can be made."""
    raw = (folder / "tokenizer.json").read_bytes()
    spec = _read_spec(folder / "tokenizer.json")
    vocab, merges = spec["model"]["vocab"], _merges_of(spec)
    path = folder / "vocab.json"
    if path.is_file() and _read_json(path) != vocab:
        raise UserError(f"{folder}: vocab.json and tokenizer.json hold different vocabularies")
    path = folder / "merges.txt"
    if path.is_file() and _read_merges(path) != merges:
        raise UserError(f"{folder}: merges.txt and tokenizer.json hold different merges")
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    for token, number in _read_decoder(folder / "tokenizer_config.json").items():
        if added.get(token) != number:
            raise UserError(
                f"{folder}: tokenizer_config.json gives {token!r} the id {number}, "
                f"tokenizer.json {added.get(token)}"
            )
    tokens = vocab | added
    return TokenizerInfo(
        folder=folder,
        hash=_hash_of(spec, merges),
        json_sha256=hashlib.sha256(raw).hexdigest(),
        vocab_size=max(tokens.values()) + 1,
        tokens=tokens,
        added=frozenset(added),
    )


def extract_tokenizer(source: str, output: Path) -> TokenizerInfo:
    """Copy the tokenizer of a model folder, or of a Hugging Face repository, to ``output``.

    merges.txt and vocab.json are written from tokenizer.json where the source lacks them; line
    ends of merges.txt become ``\\n``.

    Args:
        source: a folder or a repository id.
        output: a new or empty folder, or what the same call made.

    Raises:
        UserError: tokenizer.json or tokenizer_config.json is missing, the files disagree, or
            ``output`` holds something else.
    """
    with tempfile.TemporaryDirectory() as fetched, tempfile.TemporaryDirectory() as scratch:
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(fetched)
            _from_hub(source, folder)
        write_files(folder, Path(scratch))
        return _install(Path(scratch), Path(output), source)


def write_files(source: Path, target: Path) -> None:
    """Copy the four files of a tokenizer, or make those that tokenizer.json alone decides.

    Args:
        source: folder of a tokenizer or a model.
        target: a folder, whose other files stay.

    Raises:
        UserError: see :func:`extract_tokenizer`.
    """
    for name in _NEEDED:
        if not (source / name).is_file():
            raise UserError(f"{source} has no {name}: give the folder of a model of this kind")
    _check_agreement(source)
    spec = _read_spec(source / "tokenizer.json")
    for name in _NEEDED:
        shutil.copyfile(source / name, target / name)
    if (source / "vocab.json").is_file():
        shutil.copyfile(source / "vocab.json", target / "vocab.json")
    else:
        write_json(target / "vocab.json", spec["model"]["vocab"])
    _write_merges(target / "merges.txt", _merges_of(spec))


def train_tokenizer(texts: Iterable[str], output: Path, vocab_size: int) -> TokenizerInfo:
    """Train a byte-level BPE of Qwen's kind and write its four files.

    The same texts give the same files. As in Qwen, ``<|endoftext|>`` has the highest id.

    Args:
        texts: read once.
        output: a new or empty folder, or what the same call made.
        vocab_size: tokens in all, ``<|endoftext|>`` included; at least 257.

    Raises:
        UserError: the texts are too few for so many tokens, or ``output`` holds something else.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    if vocab_size < SMALLEST:
        raise UserError(f"a vocabulary has at least {SMALLEST} entries, not {vocab_size}")
    _manifest_in(output)  # before the training, which takes its time
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    options = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.decoder = decoders.ByteLevel(**options)
    tokenizer.post_processor = processors.ByteLevel(**options)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size - 1:
        raise UserError(
            f"the texts give {tokenizer.get_vocab_size() + 1} tokens where {vocab_size} were "
            "asked for: give more text or another size"
        )
    tokenizer.add_special_tokens([AddedToken(ENDOFTEXT, normalized=False, special=True)])
    spec = json.loads(tokenizer.to_str())
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        write_json(made / "tokenizer.json", spec)
        write_json(made / "vocab.json", spec["model"]["vocab"])
        _write_merges(made / "merges.txt", _merges_of(spec))
        write_json(made / "tokenizer_config.json", _config(spec["added_tokens"]))
        return _install(made, Path(output), "trained")


class Encoder(Protocol):
    """Turns texts into ids."""

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of all texts one after another, and how many each has."""
        ...


class FastEncoder:
    """fastokens: the ids of Hugging Face's tokenizers, some fifty times as fast."""

    def __init__(self, spec: str, special_text: SpecialText) -> None:
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_json_str(spec)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._split_special = special_text == "literal"

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """See `Encoder`."""
        ids, offsets = self._tokenizer.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=self._split_special
        )
        bounds = np.frombuffer(offsets, "<i8")
        return np.frombuffer(ids, "<u4"), bounds[1:] - bounds[:-1]


class HuggingFaceEncoder:
    """Hugging Face's tokenizers, the reference."""

    def __init__(self, spec: str, special_text: SpecialText) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(spec)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer.json is not one of Hugging Face's: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = special_text == "literal"

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """See `Encoder`."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.array(encoding.ids, np.uint32) for encoding in found]
        lengths = np.array([len(row) for row in rows], np.int64)
        return np.concatenate([np.empty(0, np.uint32), *rows]), lengths


@functools.lru_cache(maxsize=2)
def load_encoder(
    folder: Path, json_sha256: str, name: EncoderName, special_text: SpecialText
) -> Encoder:
    """Load an encoder, once a process.

    Raises:
        UserError: tokenizer.json is no longer (or, on another machine, is not) the one that was
            checked.
    """
    raw = (folder / "tokenizer.json").read_bytes()
    if hashlib.sha256(raw).hexdigest() != json_sha256:
        raise UserError(f"{folder}/tokenizer.json was changed while it was in use")
    kind = FastEncoder if name == "fast" else HuggingFaceEncoder
    return kind(raw.decode(), special_text)


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder to use.

    Attributes:
        name: of the encoder.
        note: why it is not the wanted one; empty if it is.
        sample_tokens: ids that the sample gave.
    """

    name: EncoderName
    note: str
    sample_tokens: int


def choose_encoder(
    info: TokenizerInfo,
    wanted: EncoderName,
    special_text: SpecialText,
    sample: Sequence[str],
    pool: Executor | None = None,
) -> EncoderChoice:
    """Take ``fast`` if it is wanted and gives the ids of ``hf`` on every text of the sample.

    Args:
        info: the tokenizer.
        wanted: name of the encoder.
        special_text: see `SpecialText`.
        sample: texts.
        pool: runs the fast encoder meanwhile, which takes a second to load Qwen's vocabulary; a
            thread where there is none.
    """
    task = (info.folder.absolute(), info.json_sha256)
    promise = None
    with ThreadPoolExecutor(1) as thread:
        if wanted == "fast":
            promise = (pool or thread).submit(_encode, *task, "fast", special_text, sample)
        ids, lengths = _encode(*task, "hf", special_text, sample)
        if promise is None:
            return EncoderChoice("hf", "", len(ids))
        try:
            fast_ids, fast_lengths = promise.result()
        except BrokenExecutor:
            raise
        except Exception as error:  # whatever fastokens raises for a tokenizer that it cannot do
            return EncoderChoice("hf", f"fastokens cannot use this tokenizer: {error}", len(ids))
    if not (np.array_equal(ids, fast_ids) and np.array_equal(lengths, fast_lengths)):
        return EncoderChoice("hf", "fastokens gives other ids on this input", len(ids))
    return EncoderChoice("fast", "", len(ids))


def _encode(
    folder: Path,
    json_sha256: str,
    name: EncoderName,
    special_text: SpecialText,
    texts: Sequence[str],
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return load_encoder(folder, json_sha256, name, special_text).encode(texts)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable as JSON: {error}") from None


def _read_spec(path: Path) -> dict[str, Any]:
    spec = _read_json(path)
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UserError(f"{path} does not hold a BPE tokenizer")
    spec["added_tokens"] = spec.get("added_tokens") or []
    try:
        _merges_of(spec)
        ids = [*model["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]
        names = [token["content"] for token in spec["added_tokens"]]
    except (AttributeError, KeyError, TypeError):
        ids, names = [], []
    whole = ids and all(type(each) is int and each >= 0 for each in ids)
    if not whole or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} is damaged: its vocabulary, merges or added tokens cannot be read")
    return spec


def _read_decoder(path: Path) -> dict[str, int]:
    """Return the ids that tokenizer_config.json gives to added tokens."""
    config = _read_json(path)
    try:
        decoder = config.get("added_tokens_decoder") or {}
        return {str(token["content"]): int(number) for number, token in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is damaged: its added_tokens_decoder is not a table of ids and tokens"
        ) from None


def _merges_of(spec: dict[str, Any]) -> list[str]:
    """Merges are ``"a b"`` in older files and in merges.txt, ``["a", "b"]`` in newer ones."""
    return [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]


def _read_merges(path: Path) -> list[str]:
    # split("\n"), not splitlines: nothing but a line end may be taken for one.
    text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    lines = text.removesuffix("\n").split("\n")
    return lines[1:] if lines[0].startswith("#version") else lines


def _write_merges(path: Path, merges: list[str]) -> None:
    with atomic_write(path) as stream:
        stream.write("\n".join(["#version: 0.2", *merges, ""]).encode())


def _hash_of(spec: dict[str, Any], merges: list[str]) -> str:
    # Truncation and padding are switched off when encoding, so they do not decide ids.
    model = spec["model"] | {"merges": hashlib.sha256("\n".join(merges).encode()).hexdigest()}
    used = {k: v for k, v in spec.items() if k not in ("truncation", "padding")}
    return sha256_of_json(used | {"model": model})


def _config(added_tokens: list[dict[str, Any]]) -> dict[str, Any]:
    decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added_tokens}
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": ENDOFTEXT,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": ENDOFTEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _install(made: Path, output: Path, source: str) -> TokenizerInfo:
    """Make ``output`` of four files; what the same call made before is left as it is."""
    info = load_tokenizer(made)
    body = {"source": source, "hash": info.hash, "vocab_size": info.vocab_size}
    earlier = _manifest_in(output)
    if earlier is None:
        with atomic_folder(output) as folder:
            for name in FILES:
                with atomic_write(folder / name) as stream:
                    stream.write((made / name).read_bytes())
            write_manifest(folder, KIND, body)
        return replace(info, folder=output)
    if {key: earlier.get(key) for key in body} != body or load_tokenizer(output).hash != info.hash:
        raise UserError(f"{output} holds another tokenizer: remove it, or name another output")
    return load_tokenizer(output)


def _manifest_in(output: Path) -> dict[str, Any] | None:
    """Return the manifest of the tokenizer in a folder, None where the folder is new or empty."""
    if output.is_dir() and any(output.iterdir()):
        try:
            return read_manifest(output, KIND)
        except UserError:
            raise UserError(f"{output} holds other things: give a new or empty folder") from None
    return None


def _from_hub(repository: str, folder: Path) -> None:
    """Fetch those of the four files that a repository has."""
    from kaiyuan.data.connection import hugging_face
    from kaiyuan.data.fetch import FileFault, fetch
    from kaiyuan.data.hub import HuggingFaceHub

    connection = hugging_face()
    hub = HuggingFaceHub(connection, repository, "model")
    try:
        revision = hub.resolve(None)
        files = [remote for remote in hub.list_files(revision) if remote.path in FILES]
    except UserError as error:
        raise UserError(
            f"{repository} is neither a folder nor a repository that can be reached: {error}"
        ) from error
    for name in set(_NEEDED) - {remote.path for remote in files}:
        raise UserError(f"{repository} has no {name}: name a model of this kind")
    for remote in files:
        address = hub.request(remote.path, revision)
        try:
            fetch(connection, remote, address, folder / remote.path, lambda size: None)
        except FileFault as fault:
            raise UserError(f"{remote.path} {fault}") from None
