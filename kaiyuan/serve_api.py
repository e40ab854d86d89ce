"""The server of transformers, with its requests checked, and with PUT /api of Megatron's server.

transformers' server takes any length, goes on after its client has left, and answers most mistakes
with an error of its own. Its models and its way to generate are kept; what is asked of them comes
through here. Its other routes need a chat template, which a base model lacks, or load other models,
and are left out.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import uuid
from collections.abc import AsyncGenerator, Coroutine
from typing import Annotated, Any, Literal, Self

import torch
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from transformers import StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager

from kaiyuan.errors import UserError
from kaiyuan.sampling import check_length
from kaiyuan.values import is_whole

_KEPT = ("/v1/models", "/health")
# What transformers' server generates where nothing is said.
_DEFAULT_TOKENS = 1024
# Seconds for the answers under way when the server is to end.
_GRACE = 2


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not text: it holds half of a surrogate pair") from None
    return text


String = Annotated[str, AfterValidator(_encodable)]
Text = Annotated[str, Field(min_length=1)]  # pydantic looks at its bytes itself
# torch takes no larger one.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Temperature = Annotated[float, Field(allow_inf_nan=False, le=100)]


class Completion(BaseModel):
    """What POST /v1/completions takes: OpenAI's names, and two of transformers' server.

    What that server would ignore is admitted with the value alone at which it changes nothing.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: Text
    model: String | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[Temperature, Field(ge=0)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, gt=-1, le=2)
    stop: Text | list[Text] | None = None
    suffix: String | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: String | None = None
    seed: Seed | None = None
    generation_config: str | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    logit_bias: None = None
    presence_penalty: Literal[0] | None = None

    @field_validator("generation_config")
    @classmethod
    def _bounded(cls, text: str | None) -> str | None:
        choice = json.loads(text or "{}")
        if not isinstance(choice, dict):
            raise ValueError("it must be a JSON object")
        most = choice.get("max_new_tokens")
        if most is not None and not (is_whole(most) and most >= 1):
            raise ValueError("max_new_tokens must be a whole number from 1 on")
        return text

    def body(self, room: int) -> dict[str, Any]:
        """Return the request for transformers' server, which always says how many tokens.

        Args:
            room: positions that the model has after the prompt.
        """
        body = self.model_dump(exclude_none=True)
        chosen = json.loads(self.generation_config or "{}").get("max_new_tokens")
        return body | {"max_tokens": self.max_tokens or chosen or min(_DEFAULT_TOKENS, room)}


class Prompts(BaseModel):
    """What PUT /api takes; names, bounds and defaults are those of text_generation_server.py.

    Attributes:
        prompts: the texts to continue.
        tokens_to_generate: at most so many tokens each.
        temperature: divides the logits.
        top_k: sample among so many of the likeliest tokens; 1 is greedy, 0 admits all.
        top_p: sample among the likeliest tokens that together have this probability; 0 admits all.
        random_seed: of the sampling; the prompts draw their numbers one after another.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    prompts: list[Text] = Field(min_length=1, max_length=128)
    tokens_to_generate: int = Field(64, ge=1)
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    top_k: int = Field(0, ge=0, le=1000)
    top_p: float = Field(0.0, ge=0, le=1)
    random_seed: Seed | None = None

    @model_validator(mode="after")
    def _one_filter(self) -> Self:
        if self.top_k and self.top_p:
            raise ValueError("top_k and top_p exclude each other")
        return self


class Server(Serve):
    """The server of transformers with routes of our own; to be made with ``non_blocking``."""

    def start_server(self) -> None:
        """Put the routes in place and serve until interrupted.

        The parent calls this last; its own version would serve in a thread.
        """
        model_id, self._model, processor = self._completion_handler._resolve_model({})
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._generation = _Generation()
        self._generation_state._generate_managers[model_id] = self._generation
        app = self.server.config.app
        app.router.routes[:] = [r for r in app.router.routes if r.path in _KEPT]
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        app.add_api_route("/api", self._continue, methods=["PUT"])
        for error in (UserError, RequestValidationError, HTTPException):
            app.add_exception_handler(error, _refusal)
        self.server.config.timeout_graceful_shutdown = _GRACE
        self.serve()

    def serve(self) -> None:
        """Serve until Ctrl-C, after which no text is being generated."""
        with contextlib.suppress(KeyboardInterrupt):
            self.server.run()
        self._generation.wait()

    async def _answer(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer that work gives, unless the client leaves or the server ends."""
        answer = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(request.receive())  # of what it sends, nothing else is left
        tasks = {answer, leaving}
        try:
            while not answer.done():
                await asyncio.wait(tasks, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() and (leaving.done() or self.server.should_exit):
                    raise HTTPException(503, "the server is ending")
            return answer.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _pieces(self, stream: Any) -> AsyncGenerator[Any]:
        """Yield the pieces of a streamed answer, until the server ends."""
        piece = asyncio.ensure_future(anext(stream, None))
        try:
            while not self.server.should_exit:
                if (await asyncio.wait([piece], timeout=0.2))[0]:
                    if piece.result() is None:
                        break
                    yield piece.result()
                    piece = asyncio.ensure_future(anext(stream, None))
        finally:
            piece.cancel()  # which ends the work, too
            await asyncio.wait([piece])

    async def _complete(self, request: Request, wanted: Completion) -> Any:
        room = self._room(wanted.prompt)
        body = wanted.body(room)
        self._check(room, body["max_tokens"])
        work = self._completion_handler.handle_request(body, request.state.request_id)
        try:
            answer = await self._answer(request, work)
            if isinstance(answer, StreamingResponse):
                answer.body_iterator = self._pieces(answer.body_iterator)
            return answer
        except HTTPException:
            raise
        except Exception as error:
            # Of what stands in it transformers judges, in errors of many kinds.
            if wanted.generation_config is None:
                raise
            raise UserError(f"generation_config: {' '.join(str(error).split())}") from error

    async def _continue(self, request: Request, wanted: Prompts) -> dict[str, list[str]]:
        for prompt in wanted.prompts:
            self._check(self._room(prompt), wanted.tokens_to_generate)
        return {"text": await self._answer(request, self._texts(wanted))}

    async def _texts(self, wanted: Prompts) -> list[str]:
        seed, texts = wanted.random_seed, []
        for prompt in wanted.prompts:
            body = {"prompt": prompt, "seed": seed, "generation_config": self._choice(wanted)}
            done = await self._completion_handler.handle_request(body, str(uuid.uuid4()))
            texts.append(prompt + json.loads(done.body)["choices"][0]["text"])
            seed = None
        return texts

    def _choice(self, wanted: Prompts) -> str:
        choice: dict[str, Any] = {
            "do_sample": wanted.top_k != 1,
            "max_new_tokens": wanted.tokens_to_generate,
            "eos_token_id": self._model.generation_config.eos_token_id,
            "pad_token_id": self._model.generation_config.pad_token_id,
        }
        if choice["do_sample"]:
            choice |= {"temperature": wanted.temperature, "top_k": wanted.top_k}
            choice["top_p"] = wanted.top_p or 1.0
        return json.dumps(choice)

    def _room(self, prompt: str) -> int:
        positions: int = self._model.config.max_position_embeddings
        return positions - len(self._tokenizer(prompt)["input_ids"])

    def _check(self, room: int, new_tokens: int) -> None:
        positions = self._model.config.max_position_embeddings
        check_length(positions - room + max(new_tokens, 1), positions)


class _Generation(GenerateManager):
    """transformers' thread that generates, but what nobody waits for any more ends at a token."""

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Generate; cancelled, it ends when the thread has ended this work, at its next token."""
        gone = threading.Event()

        def left(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), gone.is_set(), device=ids.device)

        watched = {**inputs, "stopping_criteria": StoppingCriteriaList([left])}
        work = asyncio.ensure_future(
            super().generate_non_streaming(model, processor, watched, gen_config, request_id)
        )
        try:
            # The thread hands its result to the work, which must still be there then.
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            await work
            raise

    def wait(self) -> None:
        """Return when the thread is idle: the process must not end amid its computing."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.submit(lambda: None).result(timeout=10)


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    """Answer a mistake with one sentence: as OpenAI does, or plainly, as Megatron does."""
    status, sentence = 400, str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        said = first["msg"].removeprefix("Value error, ")
        sentence = f"{place}: {said}" if place else said
    elif isinstance(error, HTTPException):
        status, sentence = error.status_code, error.detail
    if request.url.path == "/api":
        return JSONResponse(sentence, status)
    fault = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": fault}, status)
