"""The verbs of the data road as a person types them."""

import json
import subprocess
import sys

import pytest


def run(*arguments):
    command = [sys.executable, "-c", "from kaiyuan.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_convert_and_verify(ranked, small, tmp_path):
    out = tmp_path / "out"
    options = ["--input", ranked, "--output", out, "--tokenizer", small.folder, "--order", "rank"]
    plan = run("convert", *options, "--dry-run", "--json")
    assert json.loads(plan.stdout)["rows"] == 1500
    assert not out.exists()
    done = run("convert", *options)
    assert done.returncode == 0
    assert "1,500" in done.stdout
    assert "0 s left" in done.stderr  # plain lines where there is no terminal
    again = run("convert", *options, "--json")
    assert json.loads(again.stdout)["counts"]["rows"] == 1500
    checked = run("verify", out, "--against", ranked, "--tokenizer", small.folder)
    assert checked.returncode == 0
    assert "is whole" in checked.stdout
    with (out / "shards/00001.bin").open("r+b") as stream:
        stream.seek(50)
        stream.write(b"\xff")
    broken = run("verify", out)
    assert broken.returncode == 2
    assert broken.stderr.count("\n") == 1
    assert "00001.bin was altered" in broken.stderr


def test_mistakes_end_with_two_and_one_line(ranked, small, tmp_path):
    for arguments, message in [
        (["convert", "--input", tmp_path / "no", "--output", tmp_path / "o"], "does not exist"),
        (["convert", "--input", ranked, "--output", tmp_path / "o"], "say --order rank"),
    ]:
        done = run(*arguments, "--tokenizer", small.folder)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert message in done.stderr


def test_tokenizer_is_extracted(small, tmp_path):
    done = run("tokenizer", small.folder, "--output", tmp_path / "tok")
    assert done.returncode == 0
    assert small.hash[:16] in done.stdout
    done = run("tokenizer", tmp_path, "--output", tmp_path / "tok2")
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr


@pytest.mark.parametrize("verb", ["convert", "verify", "tokenizer"])
def test_help_has_an_example(verb):
    assert f"kaiyuan {verb} " in run(verb, "--help").stdout


def test_the_references_script_is_convert(ranked, small, tmp_path):
    script = "scripts/convert_phase_to_megatron.py"
    options = ["--input", ranked, "--output", tmp_path / "out", "--tokenizer", small.folder]
    command = [sys.executable, script, *options, "--order", "file"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0
    assert (tmp_path / "out/manifest.json").exists()


def test_library_needs_no_torch():
    modules = ["convert", "verify", "phase", "tokenizer", "single", "executors"]
    code = "".join(f"import kaiyuan.data.{module}\n" for module in modules)
    code += "import sys; print('torch' in sys.modules or 'megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
