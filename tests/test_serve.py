"""A model behind OpenAI's API, asked over the loopback."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kaiyuan.errors import UserError
from kaiyuan.serve import serve

from .conftest import run_kaiyuan

PROMPT = "def load(self, name):\n"


def ask(address: str, body: dict | None = None, method: str | None = None) -> dict:
    data = json.dumps(body).encode() if body is not None else None
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data, kind, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def refusal(address: str, body: dict | str, path: str = "/v1/completions", method: str = "POST"):
    """Return the body of the answer to a request that must be refused."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, data, kind, method=method)
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(request, timeout=20)
    return json.load(caught.value)


@pytest.fixture(scope="module")
def server(demo, tmp_path_factory):
    """The process, its address, and what it writes to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kaiyuan = Path(sys.executable).with_name("kaiyuan")
    log = tmp_path_factory.mktemp("serve") / "stderr"
    command = [kaiyuan, "serve", demo.folder / "model", "--port", str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream)
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def address(server):
    return server[1]


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
        with pytest.raises(urllib.error.HTTPError, match="400"):
            put(**wrong)


def test_only_the_loopback_is_served(address):
    port = int(address.rsplit(":", 1)[1])
    wait_for(address)
    # Of this machine's sockets that listen on the port; 0100007F is 127.0.0.1.
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_mistakes_are_answered_with_a_sentence(address):
    wait_for(address)
    for wrong, sentence in {
        '{"prompt": "a", "max_tokens": 20000}': "20,001 tokens, the model was trained on 256",
        '{"prompt": "a", "max_tokens": 256}': "257 tokens, the model was trained on 256",
        '{"prompt": "a", "generation_config": "{\\"max_new_tokens\\": 256}"}': "257 tokens",
        json.dumps({"prompt": "a " * 300}): "the model was trained on 256",
        "{}": "prompt: Field required",
        '{"prompt": ""}': "prompt: String should have at least 1 character",
        '{"prompt": "\\ud800"}': "prompt: Input should be a valid string",
        '{"prompt": "a", "suffix": "\\ud800"}': "suffix: it is not text",
        '{"prompt": "a", "max_tokens": -4}': "max_tokens: Input should be greater than or equal",
        '{"prompt": "a", "n": 2}': "n: Input should be 1",
        '{"prompt": "a", "temperature": 1e400}': "temperature: Input should be a finite number",
        '{"prompt": "a", "generation_config": "{"}': "generation_config: ",
        '{"prompt": "a", "generation_config": "{\\"num_beams\\": \\"x\\"}"}': "generation_config: ",
    }.items():
        error = refusal(address, wrong)["error"]
        assert error["type"] == "invalid_request_error"
        assert sentence in error["message"]
    for wrong, sentence in {
        '{"prompts": ["a"], "tokens_to_generate": 1000}': "the model was trained on 256",
        '{"prompts": ["a"], "temperature": 1e400}': "temperature: Input should be a finite number",
        '{"prompts": ["a"], "random_seed": 1' + "0" * 30 + "}": "random_seed: ",
        '{"prompts": ["\\ud800"]}': "prompts.0: Input should be a valid string",
    }.items():
        assert sentence in refusal(address, wrong, "/api", "PUT")


def test_as_many_tokens_as_fit_are_the_default(address):
    wait_for(address)
    choice = '{"eos_token_id": null}'
    answer = ask(f"{address}/v1/completions", {"prompt": "a", "generation_config": choice})
    assert answer["usage"]["total_tokens"] == 256


def long_requests(
    address: str, number: int, timeout: float, stream: bool = False
) -> list[threading.Thread]:
    """Send as many requests at once that each take as long as the model can write."""

    def send() -> None:
        choice = '{"eos_token_id": null}'
        body = {"prompt": "a", "max_tokens": 250, "generation_config": choice, "stream": stream}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError, http.client.HTTPException):  # it is not all answered
            urllib.request.urlopen(request, timeout=timeout).read()

    threads = [threading.Thread(target=send) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def test_nothing_is_generated_for_clients_that_have_left(address):
    wait_for(address)
    start = time.monotonic()
    long_requests(address, 1, 60)[0].join()
    one = time.monotonic() - start
    for thread in long_requests(address, 30, one / 3):
        thread.join()
    start = time.monotonic()
    ask(f"{address}/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert time.monotonic() - start < 10 * one


def test_a_port_in_use_is_a_mistake(demo, address):
    wait_for(address)
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(
        UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"
    ):
        serve(demo.folder / "model", "127.0.0.1", port)


def test_ctrl_c_ends_the_server_amid_its_work(server):
    """The last test of the server; without an end of the work it would go on for long."""
    process, address, log = server
    wait_for(address)
    waiting = long_requests(address, 40, 60) + long_requests(address, 20, 60, stream=True)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - start < 12
    for thread in waiting:
        thread.join()
    assert "Traceback" not in log.read_text()
