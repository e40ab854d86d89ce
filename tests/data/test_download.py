"""Downloads from a real HTTP server on this machine that misbehaves as real hubs do."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.utils import hf_raise_for_status

from kaiyuan.cli import main
from kaiyuan.data.connection import Connection, Endpoint, Patience, asked_to_wait
from kaiyuan.data.download import Job, Plan, check_disk, download, preview
from kaiyuan.data.fetch import digest_of, part_name
from kaiyuan.data.hub import RemoteFile
from kaiyuan.data.phases import LocalFile, files_of_phases, parse_phases
from kaiyuan.errors import UserError
from tests.data.hub_server import COMMIT, REPO, HubServer, parquet_bytes

CLI = [sys.executable, "-c", "from kaiyuan.cli import main; main()"]
ONE, TWO, OTHER = (
    "phase1/part-00000.parquet",
    "phase1/part-00001.parquet",
    "phase2/part-00000.parquet",
)
FILES = {
    ONE: parquet_bytes(3000, seed=1),
    TWO: parquet_bytes(2000, seed=2),
    OTHER: parquet_bytes(1000, seed=3),
    "README.md": b"about",
}


@pytest.fixture
def server():
    server = HubServer(FILES)
    yield server
    server.close()


def job(server, dest, **changes):
    settings = {"phases": [1], "dest": dest, "endpoint": server.url, "repo": REPO, "pause": 0.02}
    return Job(**{**settings, **changes})


def contents(dest: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(dest)): path.read_bytes() for path in sorted(dest.rglob("*.parquet"))
    }


def test_files_arrive_whole_and_a_second_run_does_nothing(server, tmp_path):
    first = download(job(server, tmp_path, phases=[1, 2]))
    assert first.fetched == 3
    assert contents(tmp_path) == {name: FILES[name] for name in (ONE, TWO, OTHER)}
    manifest = json.loads((tmp_path / "phase1/manifest.json").read_text())
    assert (manifest["rows"], manifest["revision"]) == (5000, COMMIT)
    assert manifest["files"][0]["sha256"] == hashlib.sha256(FILES[ONE]).hexdigest()

    server.requests.clear()
    begin = time.monotonic()
    assert download(job(server, tmp_path, phases=[1, 2])).fetched == 0
    assert time.monotonic() - begin < 1
    assert all(path.startswith("/api/") for _, path, _ in server.requests)


@pytest.mark.parametrize(
    "faults",
    [
        ["429"],
        ["503", "503"],
        ["page"],
        ["page-chunked"],
        ["cut"],
        ["cut", "whole"],
        ["cut", "shifted"],
        ["cut", "page", "reset", "503"],
        ["flip"],
        ["longer"],
        ["reset", "reset", "reset"],
    ],
)
def test_faults_of_a_server_are_outlived(server, tmp_path, faults):
    server.behaviour.retry_after = "0"
    server.behaviour.faults = {ONE: list(faults)}
    download(job(server, tmp_path))
    assert contents(tmp_path) == {ONE: FILES[ONE], TWO: FILES[TWO]}
    assert server.behaviour.faults[ONE] == []  # all of them took place


@pytest.mark.parametrize("faults", [["503", "page"], ["429", "429"], ["page", "503", "429"]])
def test_faults_of_a_listing_are_outlived(server, tmp_path, faults):
    server.behaviour.retry_after = "0"
    server.behaviour.listing_faults = faults
    assert download(job(server, tmp_path)).fetched == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["content", "listing"])
def test_a_server_that_falls_silent_is_asked_again(server, tmp_path, where):
    if where == "content":
        server.behaviour.faults = {ONE: ["stall"]}
    else:
        server.behaviour.listing_faults = ["stall"]
    assert download(job(server, tmp_path)).fetched == 2


def test_a_cut_answer_is_gone_on_from_where_it_ended(server, tmp_path):
    server.behaviour.faults = {ONE: ["cut"]}
    download(job(server, tmp_path))
    assert [headers.get("range") for headers in server.gets(ONE)] == [
        None,
        f"bytes={len(FILES[ONE]) // 2}-",
    ]


def test_a_server_that_never_honours_ranges(server, tmp_path):
    server.behaviour.ignore_ranges = True
    server.behaviour.faults = {ONE: ["cut", "reset"], TWO: ["cut"]}
    download(job(server, tmp_path))
    assert contents(tmp_path) == {ONE: FILES[ONE], TWO: FILES[TWO]}


@pytest.mark.parametrize("where", ["content", "listing"])
def test_the_wait_asked_for_by_429_is_kept(server, tmp_path, where):
    if where == "content":
        server.behaviour.faults = {ONE: ["429"]}
    else:
        server.behaviour.listing_faults = ["429"]
    download(job(server, tmp_path, workers=1))
    name = ONE if where == "content" else f"/api/datasets/{REPO}"
    refused, again = [
        when
        for (_, path, _), when in zip(server.requests, server.times, strict=True)
        if path.endswith(name)
    ]
    assert again - refused >= 0.95  # the pause without a wish is 0.02 s


def test_retry_after_as_seconds_as_date_and_as_the_hub_writes_it():
    def wait(status, **headers):
        return asked_to_wait(httpx2.Response(status, headers=headers))

    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert wait(429, **{"Retry-After": "7"}) == 7
    assert wait(503, **{"Retry-After": soon}) == pytest.approx(100, abs=2)
    assert wait(429, ratelimit='"api";r=0;t=55') == 55
    assert wait(429) is None
    assert wait(429, **{"Retry-After": "soon"}) is None


def test_a_429_inside_another_error_is_waited_for():
    request = httpx2.Request("GET", "http://127.0.0.1/api/datasets/a/b")
    answer = httpx2.Response(429, headers={"Retry-After": "1"}, request=request)
    try:
        try:
            hf_raise_for_status(answer)
        except Exception as inner:
            raise RuntimeError("cannot find the file on the hub") from inner
    except RuntimeError as error:
        wrapped = error
    connection = Connection(Endpoint("http://127.0.0.1"), pause=0.01)
    Patience(connection).wait(wrapped)
    begin = time.monotonic()
    with pytest.raises(httpx2.ConnectError):
        connection.client().get("http://127.0.0.1:1/")
    assert 0.8 < time.monotonic() - begin < 2


def test_content_that_stays_wrong_is_refused_and_the_others_come(server, tmp_path):
    server.behaviour.faults = {ONE: ["flip"] * 99}
    with pytest.raises(UserError, match=r"part-00000.parquet came 3 times with a checksum other"):
        download(job(server, tmp_path))
    assert contents(tmp_path) == {TWO: FILES[TWO]}
    assert not (tmp_path / "phase1/manifest.json").exists()


def test_a_server_that_stays_down_is_given_up(server, tmp_path):
    server.behaviour.faults = {ONE: ["503"] * 99}
    with pytest.raises(UserError, match=r"answers 503 \(tried 8 times"):
        download(job(server, tmp_path))
    assert len(server.gets(ONE)) == 8


def test_a_file_that_is_not_parquet_is_no_download(server, tmp_path):
    server.behaviour.files[TWO] = FILES[TWO][:-4]
    with pytest.raises(UserError, match=r"part-00001.parquet .* not a readable parquet file"):
        download(job(server, tmp_path))
    assert contents(tmp_path) == {ONE: FILES[ONE]}
    assert not (tmp_path / "phase1/manifest.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "phase1/../../evil.parquet",
        "phase1/./evil.parquet",
        "/phase1/evil.parquet",
        "phase1//tmp/evil.parquet",
        "../phase1/evil.parquet",
        "phase1/..\\..\\evil.parquet",
        "phase1/evil\0.parquet",
        "phase1/evil\n.parquet",
        f"phase1/{'x' * 300}.parquet",
    ],
)
def test_a_name_never_leaves_the_destination(server, tmp_path, name):
    server.behaviour.files[name] = FILES[ONE]
    with pytest.raises(UserError, match="unsafe name"):
        download(job(server, tmp_path / "dest"))
    assert list(tmp_path.rglob("*")) == []


def test_a_link_out_of_the_destination_is_not_followed(server, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest/phase1").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="a link that leads out"):
        download(job(server, tmp_path / "dest"))
    assert list((tmp_path / "outside").iterdir()) == []


def test_another_host_is_refused_unless_allowed_and_never_sees_the_token(
    server, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.behaviour.redirect_to = f"localhost:{server.port}"
    with pytest.raises(UserError, match=r"sends us on to localhost.*--allow-host localhost"):
        download(job(server, tmp_path))
    assert {host for host, _, _ in server.requests} == {f"127.0.0.1:{server.port}"}

    summary = download(job(server, tmp_path, more_hosts=("localhost",)))
    assert summary.hosts == ["127.0.0.1", "localhost"]
    seen = {
        (host.split(":")[0], "authorization" in headers) for host, _, headers in server.requests
    }
    assert seen == {("127.0.0.1", True), ("localhost", False)}


@pytest.mark.parametrize(
    ("endpoint", "host", "permitted"),
    [
        ("https://huggingface.co", "huggingface.co", True),
        ("https://huggingface.co", "cas-bridge.xethub.hf.co", True),
        ("https://huggingface.co/", "cdn-lfs-us-1.huggingface.co", True),
        ("https://huggingface.co", "evilhf.co", False),
        ("https://huggingface.co", "huggingface.co.evil.com", False),
        ("https://hf-mirror.com", "hf-mirror.com", True),
        ("https://hf-mirror.com", "huggingface.co", False),
        ("https://hf-mirror.com", "cas-bridge.xethub.hf.co", False),
        ("https://www.modelscope.cn", "cdn-lfs-cn-1.modelscope.cn", True),
    ],
)
def test_hosts_that_belong_to_an_endpoint(endpoint, host, permitted):
    assert Endpoint(endpoint).permits(host) is permitted


def command(server, dest, phases):
    where = ["--dest", str(dest), "--repo", REPO, "--endpoint", server.url]
    return [*CLI, "download", "--phase", phases, *where]


def run_cli(server, dest, *options, **environment):
    """Run the command in a process that writes down every address that it connects to."""
    watch = dest.parent / "watch"
    watch.mkdir(exist_ok=True)
    (watch / "sitecustomize.py").write_text(
        "import sys\n"
        "def note(event, args):\n"
        "    if event == 'socket.connect':\n"
        f"        open({str(watch / 'seen')!r}, 'a').write(f'{{args[1]}}\\n')\n"
        "    if event == 'socket.getaddrinfo':\n"
        f"        open({str(watch / 'seen')!r}, 'a').write(f'{{args[:2]}}\\n')\n"
        "sys.addaudithook(note)\n"
    )
    path = os.pathsep.join([str(watch), *sys.path])
    return subprocess.run(
        [*command(server, dest, "1"), *options],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_nothing_but_the_endpoint_is_contacted_and_the_token_stays_secret(server, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("hf_from_home")
    dest = tmp_path / "dest"
    done = run_cli(server, dest, HF_TOKEN="hf_secret", HF_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "2 files fetched and proved" in done.stdout
    addresses = set((tmp_path / "watch/seen").read_text().splitlines())
    assert addresses == {f"('127.0.0.1', {server.port})"}
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer hf_secret"}
    written = [path.read_bytes() for path in dest.rglob("*") if path.is_file()]
    assert not any(b"hf_secret" in data for data in [*written, done.stdout.encode()])
    assert "hf_secret" not in done.stderr

    server.requests.clear()
    again = run_cli(server, dest, HF_TOKEN="", HF_HOME=str(home))
    assert "nothing to do" in again.stdout
    assert not any("authorization" in headers for _, _, headers in server.requests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "ftp://host"], "the endpoint must be like"),
        (["--endpoint", "https://me:password@host"], "must not carry a name, password"),
        (["--endpoint", "https://[::1"], "the endpoint must be like"),
        (["--endpoint", "https://me:password@host:99999"], "the endpoint must be like"),
        (["--repo", "foo"], "a repository is called like owner/name, not 'foo'"),
        (["--allow-host", "http://x"], "--allow-host takes a host such as cdn.example.com, not"),
        (["--allow-host", "x:443"], "--allow-host takes a host such as cdn.example.com, not"),
        (["--phase", "6"], "--phase takes numbers from 1 to 5"),
        (["--phase", "5"], "no folder for phase 5"),
        (["--repo", "a/b/c"], "a repository is called like owner/name"),
        (["--repo", "no/such"], "answers 404"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    server, tmp_path, options, message, monkeypatch, capsys
):
    monkeypatch.setattr(
        sys, "argv", ["kaiyuan", *command(server, tmp_path / "dest", "1")[3:], *options]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert "password" not in told.replace("name, password", "")
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("verb", [download, preview])
def test_a_destination_that_cannot_be_is_named_before_the_hub_is_asked(server, tmp_path, verb):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is no folder"):
        verb(job(server, tmp_path / "file"))
    with pytest.raises(UserError, match="file is no folder"):
        verb(job(server, tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="cannot write to /proc/nowhere"):
        verb(job(server, Path("/proc/nowhere")))
    assert server.requests == []


def interrupted(server, dest, seconds):
    """Kill a download some time after its first request for content; True if it had ended."""
    server.requests.clear()
    process = subprocess.Popen(
        command(server, dest, "1,2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while process.poll() is None and not server.gets(".parquet"):
        time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds) == 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    return False


def kill_at_random(server, dest, seed):
    """Kill runs at random moments until one gets through; return how many were killed."""
    chance = random.Random(seed)
    server.behaviour.bytes_per_second = 150_000
    server.behaviour.ignore_ranges = seed % 4 == 3
    server.behaviour.faults = {ONE: chance.choices(["", "cut", "reset", "page", "503"], k=3)}
    killed = 0
    while not interrupted(server, dest, chance.uniform(0, 0.8) if killed < 4 else 60):
        killed += 1
        for name, data in contents(dest).items():
            assert data == FILES[name], "a file under its final name must be whole"
    return killed


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 22), marks=pytest.mark.slow)])
def test_runs_killed_at_random_moments_end_as_the_undisturbed_one(server, tmp_path, seeds):
    download(job(server, tmp_path / "calm", phases=[1, 2]))
    calm = {
        path: (tmp_path / "calm" / path).read_bytes()
        for path in [ONE, TWO, OTHER, "phase1/manifest.json", "phase2/manifest.json"]
    }
    killed = 0
    for seed in seeds:
        dest = tmp_path / str(seed)
        killed += kill_at_random(server, dest, seed)
        assert {path: (dest / path).read_bytes() for path in calm} == calm
    assert killed >= len(seeds)


def test_ctrl_c_stops_soon_and_the_next_run_goes_on(server, tmp_path):
    server.behaviour.bytes_per_second = 20_000
    process = subprocess.Popen(
        command(server, tmp_path, "1"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not server.gets(TWO):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode != 0
    assert "Traceback" not in told
    assert contents(tmp_path) == {}
    server.behaviour.bytes_per_second = None
    download(job(server, tmp_path))
    assert contents(tmp_path) == {ONE: FILES[ONE], TWO: FILES[TWO]}


def test_what_is_here_is_known_by_its_content(server, tmp_path):
    download(job(server, tmp_path))
    file = tmp_path / ONE
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert download(job(server, tmp_path)).fetched == 0  # as quick as the disk is honest
    assert download(job(server, tmp_path, recheck=True)).fetched == 1
    assert file.read_bytes() == FILES[ONE]

    file.write_bytes(data)  # with a new time it is looked at in any case
    assert download(job(server, tmp_path)).fetched == 1
    assert file.read_bytes() == FILES[ONE]

    (tmp_path / ".kaiyuan-download/proved.jsonl").write_bytes(b'{"path": "torn')
    server.requests.clear()
    assert download(job(server, tmp_path)).fetched == 0
    assert server.gets(ONE) == []


def test_files_of_another_revision_are_not_left_among_the_data(server, tmp_path):
    download(job(server, tmp_path))
    (tmp_path / "phase1/old.parquet").write_bytes(FILES[OTHER])
    with pytest.raises(UserError, match=r"1 parquet file in .* such as old.parquet"):
        download(job(server, tmp_path))


def test_too_little_disk_is_said_before_the_first_byte(server, tmp_path):
    server.behaviour.claimed = {TWO: 10**17}
    for act in (preview, download):
        with pytest.raises(UserError, match=r"100000.00 TB are to come"):
            act(job(server, tmp_path / "dest"))
    assert list(tmp_path.iterdir()) == []
    assert server.gets(".parquet") == []


def test_bytes_that_lie_in_part_files_are_not_needed_again(tmp_path):
    remote = RemoteFile(ONE, 5_000_000_000, "sha256", "0" * 64)
    file = LocalFile(remote, 1, Path(ONE))
    check_disk(Plan("main", [file], [file], [], 4_000_000_000, 2_100_000_000), tmp_path)
    with pytest.raises(UserError, match=r"1.0 GB are to come and .* has 2.0 GB free"):
        check_disk(Plan("main", [file], [file], [], 4_000_000_000, 2_000_000_000), tmp_path)


def test_a_disk_that_fills_up_is_named(server, tmp_path):
    sha = hashlib.sha256(FILES[ONE]).hexdigest()
    work = tmp_path / ".kaiyuan-download"
    work.mkdir()
    part = work / part_name(RemoteFile(ONE, len(FILES[ONE]), "sha256", sha))
    part.symlink_to("/dev/full")
    with pytest.raises(UserError, match="the disk is full"):
        download(job(server, tmp_path))


def test_a_dry_run_tells_sizes_and_writes_nothing(server, tmp_path):
    lines = preview(job(server, tmp_path / "dest", phases=[1, 2]))
    one, two = (len(FILES[ONE]) + len(FILES[TWO])) / 1000, len(FILES[OTHER]) / 1000
    assert lines[:3] == [
        f"{REPO} at {COMMIT}",
        f"phase 1: 2 files, {one:.1f} kB, of which to come: 2 files, {one:.1f} kB",
        f"phase 2: 1 file, {two:.1f} kB, of which to come: 1 file, {two:.1f} kB",
    ]
    assert list(tmp_path.iterdir()) == []
    assert server.gets(".parquet") == []


def test_two_downloads_into_one_folder_do_not_mix(server, tmp_path):
    server.behaviour.bytes_per_second = 100_000
    first = subprocess.Popen(
        command(server, tmp_path, "1"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    while not server.gets(ONE):
        time.sleep(0.02)
    with pytest.raises(UserError, match="another download into"):
        download(job(server, tmp_path))
    assert first.wait(60) == 0
    assert contents(tmp_path) == {ONE: FILES[ONE], TWO: FILES[TWO]}


def test_small_files_are_checked_by_gits_own_hash(server, tmp_path):
    (tmp_path / "hello").write_bytes(b"hello world\n")
    # What `git hash-object` prints for this line.
    assert digest_of(tmp_path / "hello", "git-sha1") == "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"
    server.behaviour.small = {ONE}
    server.behaviour.faults = {ONE: ["flip"]}
    download(job(server, tmp_path / "dest"))
    assert contents(tmp_path / "dest")[ONE] == FILES[ONE]


def test_modelscope(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms_secret")
    server.behaviour.faults = {ONE: ["cut", "page"]}
    server.behaviour.listing_faults = ["page"]
    download(job(server, tmp_path, source="modelscope"))
    assert contents(tmp_path) == {ONE: FILES[ONE], TWO: FILES[TWO]}
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer ms_secret"}


@pytest.mark.parametrize("source", ["hf", "modelscope"])
def test_long_listings_come_in_pages(tmp_path, source):
    small = parquet_bytes(1)
    server = HubServer({f"phase1/part-{number:05d}.parquet": small for number in range(450)})
    server.behaviour.page_size = 200
    lines = preview(job(server, tmp_path, source=source))
    server.close()
    assert lines[1].startswith("phase 1: 450 files")


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("1", [1]),
        ("2,1", [1, 2]),
        ("3-5", [3, 4, 5]),
        (" 1, 4-5 ", [1, 4, 5]),
        ("all", [1, 2, 3, 4, 5]),
    ],
)
def test_phases_as_people_write_them(text, phases):
    assert parse_phases(text) == phases


@pytest.mark.parametrize("text", ["", "0", "6", "1-9", "3-1", "one", "1,,2"])
def test_phases_that_do_not_exist(text):
    with pytest.raises(UserError, match="1 to 5"):
        parse_phases(text)


def listing(*paths):
    return [RemoteFile(path, 1, "sha256", "0" * 64) for path in paths]


@pytest.mark.parametrize(
    "folder", ["phase3", "phase_3", "Phase-03", "data/phase3", "v1/data/PHASE 3"]
)
def test_a_phase_is_found_under_the_names_that_people_give_it(folder):
    files = files_of_phases(
        listing(f"{folder}/sub/a.parquet", "phase4/b.parquet", f"{folder}/_SUCCESS"), [3]
    )
    assert [str(file.path) for file in files] == ["phase3/sub/a.parquet"]


def test_what_was_found_is_said_when_no_folder_fits():
    with pytest.raises(
        UserError, match=r"phase 2 on the hub; .* 'data/stage2' \(2\), 'phase1' \(1\)"
    ):
        files_of_phases(
            listing("phase1/a.parquet", "data/stage2/a.parquet", "data/stage2/b.parquet"), [1, 2]
        )
    with pytest.raises(UserError, match="phase 1 is there twice: data/phase1, phase_1"):
        files_of_phases(listing("data/phase1/a.parquet", "phase_1/a.parquet"), [1])
