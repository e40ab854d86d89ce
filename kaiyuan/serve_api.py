"""PUT /api, the request of Megatron's text-generation server, on the server of transformers."""

import json
import uuid
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers.cli.serve import Serve


class Request(BaseModel):
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

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=128)
    tokens_to_generate: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0, le=100)
    top_k: int = Field(0, ge=0, le=1000)
    top_p: float = Field(0.0, ge=0, le=1)
    random_seed: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_filter(self) -> Self:
        if self.top_k and self.top_p:
            raise ValueError("top_k and top_p exclude each other")
        return self


class Server(Serve):
    """The server of transformers with one route more; to be made with ``non_blocking``."""

    def start_server(self) -> None:
        """Add the route and serve until interrupted.

        The parent calls this last; its own version would serve in a thread.
        """
        self.server.config.app.add_api_route("/api", self._answer, methods=["PUT"])
        self.server.run()

    async def _answer(self, request: Request) -> dict[str, list[str]]:
        seed, texts = request.random_seed, []
        for prompt in request.prompts:
            body = {"prompt": prompt, "seed": seed, "generation_config": self._choice(request)}
            done = await self._completion_handler.handle_request(body, str(uuid.uuid4()))
            texts.append(prompt + json.loads(done.body)["choices"][0]["text"])
            seed = None
        return {"text": texts}

    def _choice(self, request: Request) -> str:
        model = self._completion_handler._resolve_model({})[1]
        choice: dict[str, Any] = {
            "do_sample": request.top_k != 1,
            "max_new_tokens": request.tokens_to_generate,
            "eos_token_id": model.generation_config.eos_token_id,
            "pad_token_id": model.generation_config.pad_token_id,
        }
        if choice["do_sample"]:
            choice |= {"temperature": request.temperature, "top_k": request.top_k}
            choice["top_p"] = request.top_p or 1.0
        return json.dumps(choice)
