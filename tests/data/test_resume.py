"""A killed run goes on and ends as an undisturbed one; other input or options are noticed."""

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kaiyuan.data import units
from kaiyuan.data.convert import convert
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from tests.data.conftest import sentences, write_parquet

COMMAND = [sys.executable, "-c", "from kaiyuan.cli import main; main()", "convert"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Twelve files, 40 MB: many points to be killed at, and enough for two processes."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(3)
    for part in range(12):
        texts = sentences(3000, seed=part, longest=400)
        ranks = [rng.random() for _ in texts]
        write_parquet(folder / f"part-{part}.parquet", 500, text=texts, rank=ranks)
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus, small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    start = time.monotonic()
    subprocess.run(arguments(corpus, folder, small), check=True, capture_output=True)
    return ConvertedPhase.open(folder).manifest, time.monotonic() - start


def arguments(corpus, output, small, *more):
    return [
        *COMMAND,
        *("--input", str(corpus), "--output", str(output), "--tokenizer", str(small.folder)),
        *("--order", "rank", "--workers", "2", "--single", *more),
    ]


def killed_and_continued(corpus, output, small, delays):
    """Start, kill -9 after each delay, run to the end; return how many were really killed."""
    killed = 0
    for delay in delays:
        process = subprocess.Popen(
            arguments(corpus, output, small), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            if (output / "manifest.json").exists():
                ConvertedPhase.open(output)  # what looks finished is finished
    done = subprocess.run(arguments(corpus, output, small), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return killed


def leftovers(output):
    return [path.name for path in output.rglob(".*") if path.name != ".lock"]


def test_killed_three_times_ends_as_undisturbed(corpus, undisturbed, small, tmp_path):
    manifest, seconds = undisturbed
    delays = [seconds * share for share in (0.45, 0.65, 0.85)]
    assert killed_and_continued(corpus, tmp_path / "out", small, delays) >= 1
    assert ConvertedPhase.open(tmp_path / "out").manifest == manifest
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
def test_killed_at_twenty_random_moments_ends_as_undisturbed(corpus, undisturbed, small, tmp_path):
    manifest, seconds = undisturbed
    rng = random.Random(4)
    killed = 0
    for number in range(20):
        output = tmp_path / str(number)
        delay = seconds * rng.uniform(0.3, 1.0)
        killed += killed_and_continued(corpus, output, small, [delay])
        assert ConvertedPhase.open(output).manifest == manifest
        assert leftovers(output) == []
    print(f"{killed} of 20 runs were killed before they ended")
    assert killed >= 15


def test_finished_units_are_not_done_again(ranked, small, tmp_path):
    manifest = convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/shards/00001.json").unlink()
    os.truncate(tmp_path / "out/shards/00002.bin", 100)
    before = (tmp_path / "out/shards/00000.bin").stat().st_mtime_ns
    again = convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert again == manifest
    assert ConvertedPhase.open(tmp_path / "out").manifest == manifest
    assert (tmp_path / "out/shards/00000.bin").stat().st_mtime_ns == before


@pytest.fixture
def halfway(ranked, small, tmp_path):
    """A conversion that was killed before its last unit and its manifest."""
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/shards/00002.json").unlink()
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"order": "rank-desc"}, "order"),
        ({"order": "rank", "encoder": "hf"}, "encoder"),
        ({"order": "rank", "special_text": "literal"}, "special_text"),
    ],
)
def test_other_options_are_noticed(ranked, small, halfway, options, named):
    with pytest.raises(UserError, match=f"another {named}"):
        convert([ranked], halfway, small.folder, workers=1, **options)
    assert not (halfway / "manifest.json").exists()


def test_another_end_of_documents_is_noticed(ranked, small, halfway):
    plan = json.loads((halfway / "plan.json").read_text())
    plan["identity"]["eod"] -= 1
    (halfway / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match="another eod"):
        convert([ranked], halfway, small.folder, order="rank", workers=1)


def test_another_tokenizer_is_noticed(ranked, halfway, tmp_path):
    from kaiyuan.data.tokenizer import train_tokenizer

    train_tokenizer(iter(sentences(400, seed=77)), tmp_path / "other", 390)
    with pytest.raises(UserError, match=r"another .*tokenizer"):
        convert([ranked], halfway, tmp_path / "other", order="rank", workers=1)


def test_another_file_is_noticed(ranked, small, halfway):
    write_parquet(ranked / "part-00003.parquet", text=["more"], rank=[1])
    with pytest.raises(UserError, match="another input"):
        convert([ranked], halfway, small.folder, order="rank", workers=1)


def test_changed_content_of_the_same_size_is_noticed(ranked, small, halfway):
    path = ranked / "part-00000.parquet"
    raw = bytearray(path.read_bytes())
    # The footer's "created by": the rows are still readable.
    raw[raw.rindex(b"parquet-cpp-arrow")] ^= 0x20
    path.write_bytes(raw)
    with pytest.raises(UserError, match="was changed since"):
        convert([ranked], halfway, small.folder, order="rank", workers=1)


def test_a_fresh_copy_of_the_same_content_goes_on(ranked, small, halfway):
    for path in ranked.iterdir():
        os.utime(path, (1, 1))
    manifest = convert([ranked], halfway, small.folder, order="rank", workers=1)
    assert manifest["counts"]["rows"] == 1500


def test_a_copy_that_no_hash_is_known_of_is_read_again(ranked, small, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_SMALLEST", 10_000)  # several units a file
    manifest = convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    shards = [shard["input"] for shard in manifest["shards"]]
    assert shards.count(0) > 2
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/shards/00000.json").unlink()  # the hash of the first file
    written = {
        path: path.stat().st_mtime_ns for path in sorted((tmp_path / "out/shards").glob("*.bin"))
    }
    path = ranked / "part-00000.parquet"
    os.utime(path, (1, 1))
    assert convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1) == manifest
    again = [path.stat().st_mtime_ns != before for path, before in written.items()]
    assert again == [number == 0 for number in shards]
    # The copy's time is what a third run goes by.
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["times"][path.name] == 1_000_000_000


def test_input_that_changes_during_the_run_is_noticed(ranked, small, tmp_path, monkeypatch):
    from kaiyuan.data import convert as module

    finish = module._run_missing

    def run_and_touch(*arguments):
        records = finish(*arguments)
        os.utime(ranked / "part-00001.parquet", (1, 1))
        return records

    monkeypatch.setattr(module, "_run_missing", run_and_touch)
    with pytest.raises(UserError, match="while it was converted"):
        convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert not (tmp_path / "out/manifest.json").exists()


def test_full_disk_is_one_sentence_and_the_next_run_goes_on(ranked, small, tmp_path):
    # A limit on the size of files gives the same kind of error at the same place.
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    command = [sys.executable, "-c", code + COMMAND[2], "convert", "--input", str(ranked)]
    command += ["--output", str(tmp_path / "out"), "--tokenizer", str(small.folder)]
    done = subprocess.run([*command, "--order", "rank"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert leftovers(tmp_path / "out") == []
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)


@pytest.mark.parametrize("limit", [0, 100])
def test_a_disk_that_is_full_before_the_plan(ranked, small, tmp_path, limit):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*plan\.json"):
            convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)


def test_a_run_that_was_killed_before_its_plan_goes_on(ranked, small, tmp_path):
    for name in (".lock", ".plan.json.k1ll3d"):
        tmp_path.joinpath("out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("")
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert leftovers(tmp_path / "out") == []


def test_a_folder_of_other_things_stays_as_it_is(ranked, small, tmp_path):
    (tmp_path / "out/shards").mkdir(parents=True)
    with pytest.raises(UserError, match="holds other things"):
        convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["shards"]


def test_a_second_run_is_kept_out_from_the_first_moment(ranked, small, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another conversion is writing"):
            convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_workers_end_when_their_parent_is_killed(corpus, small, tmp_path):
    process = subprocess.Popen(
        arguments(corpus, tmp_path / "out", small),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    workers = []
    while len(workers) < 2 and time.monotonic() < deadline and process.poll() is None:
        workers = children(process.pid)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert workers, "it ended before it could be killed"
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_worker_is_said_and_the_next_run_goes_on(corpus, undisturbed, small, tmp_path):
    process = subprocess.Popen(
        arguments(corpus, tmp_path / "out", small), stderr=subprocess.PIPE, text=True
    )
    workers = []
    while not workers and process.poll() is None:
        # The first child is the resource tracker; the workers run `spawn_main`.
        workers = [pid for pid in children(process.pid) if "spawn_main" in command_line(pid)]
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    error = process.communicate()[1]
    assert process.returncode == 2
    assert "worker process was killed" in error
    assert not (tmp_path / "out/manifest.json").exists()
    subprocess.run(arguments(corpus, tmp_path / "out", small), check=True, capture_output=True)
    assert ConvertedPhase.open(tmp_path / "out").manifest == undisturbed[0]


@pytest.mark.parametrize("under_way", [False, True])
def test_ctrl_c_is_one_line_and_ends_the_workers(corpus, small, tmp_path, under_way):
    """While the workers import what they need, and while they are at a unit."""
    process = subprocess.Popen(
        arguments(corpus, tmp_path / "out", small),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends Ctrl-C to all processes of the group
    )
    workers = []
    while len(workers) < 2 and process.poll() is None:
        workers = [pid for pid in children(process.pid) if "spawn_main" in command_line(pid)]
        time.sleep(0.02)
    while under_way and not list(tmp_path.glob("out/shards/*.json")) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0 if under_way else 0.2)
    os.killpg(process.pid, signal.SIGINT)
    said, error = process.communicate()
    assert (process.returncode, said) == (130, "")
    assert error.strip() == "convert: stopped; the same command goes on from here"
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def children(pid):
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in found.split()]
    except OSError:
        return []
