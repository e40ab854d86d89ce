"""Weights & Biases, with the real package: an offline run with our figures, and no network."""

import json
import socket
import threading

import pytest

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.preflight import _check_packages

from .engine import records, train


@pytest.fixture
def asked(monkeypatch):
    """Everything that speaks HTTP is led to a port of ours; return the connections to it."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            try:
                while True:
                    connection, _ = server.accept()
                    came.append(connection.recv(200))
                    connection.close()
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, here)
        for name in ("WANDB_MODE", "WANDB_API_KEY", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield came
        server.shutdown(socket.SHUT_RDWR)


def payloads(log):
    """Yield the records of a file in the format of LevelDB's log, after W&B's header."""
    place, parts = 7, []
    while place < len(log):
        left = 32768 - place % 32768
        if left < 7:  # no room for the head of a record: the next block
            place += left
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        parts.append(log[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(folder):
    """Return what an offline run logged: for each step its values by name."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    steps = {}
    for data in payloads(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            steps.setdefault(int(values["_step"]), {}).update(values)
    return steps


@pytest.mark.slow
def test_an_offline_run_has_our_figures(asked, demo, make_params, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    params = make_params(["phase1"])
    short = ("phase1.max_samples=24", "lr_warmup_samples=8", "log_interval=1")
    train(run, demo.folder / "data", params, *short, "wandb_project=toys")
    steps = history(run)
    rows = records(run)
    assert sorted(steps) == [1, 2, 3]
    for row in rows:
        logged = steps[int(row["iteration"])]
        assert logged["kaiyuan/phase1/phase_samples"] == int(row["phase_samples"])
        assert logged["lm loss"] == pytest.approx(float(row["loss"]), rel=1e-6)
        if row["tflops"]:
            assert logged["kaiyuan/phase1/tflops"] == pytest.approx(float(row["tflops"]), rel=1e-3)
            assert logged["kaiyuan/phase1/tokens_per_second"] > 0
    assert not asked


def test_wandb_that_is_missing_is_found_before_training(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name)
    )
    with pytest.raises(UserError, match=r"wandb is not installed: pip install 'kaiyuan\[wandb\]'"):
        _check_packages(load_params("toy", ["wandb_project=toys"]))
    _check_packages(load_params("toy"))
