"""What Megatron's inference engine gives, all in one process, because it takes seconds to start."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.sampling import Sampling

Prompts = list[list[int]]
NEW_TOKENS = 64


def ask_engine(info: CheckpointInfo, prompts: Prompts) -> dict[str, Prompts]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_ask, info, prompts).result()


def _ask(info: CheckpointInfo, prompts: Prompts) -> dict[str, Prompts]:
    import torch

    from kaiyuan.megatron.engine import Engine
    from kaiyuan.megatron.logits import logits

    engine = Engine(info, None)
    greedy = Sampling(NEW_TOKENS)

    def sample(seed: int, top_p: float = 0.95) -> Prompts:
        # So hot that the likeliest tokens do not come by chance.
        return engine.continue_tokens(prompts, Sampling(16, 1.5, top_p, seed), 2)

    answers = {
        "greedy": engine.continue_tokens(prompts, greedy, 2),
        "alone": [engine.continue_tokens([prompt], greedy, 1)[0] for prompt in prompts],
        "seed 0": sample(0),
        "seed 0 again": sample(0),
        "seed 1": sample(1),
        "likeliest only": sample(1, top_p=1e-6),
    }
    answers["without a cache"] = [
        logits(info, [prompt + new])[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
        for prompt, new in zip(prompts, answers["greedy"], strict=True)
    ]
    end = answers["greedy"][1][5]
    answers["stopped"] = Engine(info, end).continue_tokens(prompts, greedy, 3)
    # The logits of the padding become twice those of what was the likeliest.
    weight = engine._model.output_layer.weight
    padding = weight[info.vocab_size :]
    assert len(padding)
    with torch.no_grad():
        padding.copy_(2 * weight[answers["greedy"][0][: len(padding)]])
    answers["large padding"] = engine.continue_tokens(prompts[:1], greedy, 1)
    return answers
