"""Serve an exported model with the API of OpenAI's completions, through an existing server."""

import importlib.util
import os
import socket
import sys
from pathlib import Path

from kaiyuan.checkpoint.hf_config import read_config
from kaiyuan.errors import UserError


def serve(hf_folder: Path, host: str, port: int) -> None:
    """Serve a model until interrupted.

    Through vLLM where it is installed, for its speed; otherwise through the server of
    transformers, which answers one request at a time and knows POST /v1/completions as well.
    Both call the model by the path of its folder. Neither asks who calls, so anything but
    127.0.0.1 as ``host`` opens the model to the network. The second also answers PUT /api, see
    kaiyuan/serve_api.py.

    Args:
        hf_folder: an exported model.
        host: address to listen on.
        port: TCP port.

    Raises:
        UserError: neither server is installed, the model is one that neither knows, its
            config.json cannot be read, or the address is taken.
    """
    if read_config(hf_folder).get("auto_map"):
        raise UserError(
            f"{hf_folder} is a model with code of its own, which the servers do not know: "
            "use kaiyuan generate"
        )
    _check_free(host, port)
    announcement = f"serving http://{host}:{port}/v1/completions, model {hf_folder}"
    if importlib.util.find_spec("vllm") is not None:
        print(announcement, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(hf_folder)]
        os.execv(sys.executable, [*command, "--host", host, "--port", str(port)])
    missing = [n for n in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(n) is None]
    if missing:
        raise UserError(
            f"serve needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'kaiyuan[serve]'"
        )
    from kaiyuan.serve_api import Server

    print(announcement, file=sys.stderr)
    Server(force_model=str(hf_folder), host=host, port=port, non_blocking=True)


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As the server does: what lingers of connections to one before is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
