"""A model behind OpenAI's API, asked over the loopback."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from .conftest import run_kaiyuan

PROMPT = "def load(self, name):\n"


def ask(address: str, body: dict | None = None, method: str | None = None) -> dict:
    data = json.dumps(body).encode() if body is not None else None
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data, kind, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def address(demo):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kaiyuan = Path(sys.executable).with_name("kaiyuan")
    server = subprocess.Popen([kaiyuan, "serve", demo.folder / "model", "--port", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def wait_for(server: str) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            assert ask(f"{server}/health") is not None
            return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.3)


def test_the_text_is_that_of_generate(demo, address):
    model = demo.folder / "model"
    done = run_kaiyuan("generate", model, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
    wait_for(address)
    body = {"model": str(model.resolve()), "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    answer = ask(f"{address}/v1/completions", body)
    assert answer["choices"][0]["text"] == json.loads(done.stdout)[0]["text"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    # The docs' way to sample; so hot that the likeliest text does not come by chance.
    choice = {"do_sample": True, "temperature": 5.0, "max_new_tokens": 16, "eos_token_id": 8191}
    sampled = ask(
        f"{address}/v1/completions",
        {"prompt": PROMPT, "generation_config": json.dumps(choice), "seed": 1},
    )
    assert sampled["choices"][0]["text"] not in ("", answer["choices"][0]["text"])
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(f"{address}/v1/completions", body | {"model": "another"})


def test_a_request_of_megatrons_server(demo, address):
    prompts = [PROMPT, "import"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    model = demo.folder / "model"
    done = run_kaiyuan("generate", model, *words, "--max-new-tokens", 16, "--json")
    expected = [answer["prompt"] + answer["text"] for answer in json.loads(done.stdout)]
    wait_for(address)

    def put(**body: object) -> list[str]:
        body = {"prompts": prompts, "tokens_to_generate": 16} | body
        return ask(f"{address}/api", body, "PUT")["text"]

    assert put(top_k=1) == expected

    def sample(seed: int) -> list[str]:
        return put(temperature=5, top_p=0.9, random_seed=seed)

    assert sample(1) == sample(1)
    assert expected != sample(1) != sample(2)
    for wrong in (
        {"prompts": []},
        {"prompts": [""]},
        {"tokens_to_generate": "16"},
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.5},
        {"beam_width": 2},
    ):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            put(**wrong)


def test_only_the_loopback_is_served(address):
    port = int(address.rsplit(":", 1)[1])
    wait_for(address)
    # Of this machine's sockets that listen on the port; 0100007F is 127.0.0.1.
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
