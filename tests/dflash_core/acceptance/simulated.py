"""Prompts as they are: some easy, some hard, answers of very different length, walks that end with the answer."""

import numpy as np

BLOCK_SIZE = 8
QUALITIES = {"middling": (3.0, 3.0), "weak": (1.2, 8.0), "strong": (5.0, 2.0)}
"""Parameters of the spread of prompts' chance that one draft is right."""
MAX_TOKENS = 300


def prompt_set(generator, quality, num_prompts):
    """Return each prompt's chance that a draft is right, and the tokens of its answer: most short, some long."""
    rate = 0.95 * generator.beta(*QUALITIES[quality], size=num_prompts)
    tokens = np.clip(generator.lognormal(np.log(100), 0.7, size=num_prompts), 20, MAX_TOKENS).astype(int)
    return rate, tokens


def walk(generator, rate, tokens):
    """Return tokens and verification steps per prompt; blocks of one prompt share its chance."""
    longest = int(tokens.max())
    accepted = np.minimum(generator.geometric(1 - rate[:, None], size=(len(rate), longest)) - 1, BLOCK_SIZE - 1)
    steps = 1 + (np.cumsum(accepted + 1, axis=1) < tokens[:, None]).sum(axis=1)
    return tokens, steps


def true_tau(quality, num_prompts=60_000):
    """Return tau of endlessly many prompts of this kind, to about a thousandth."""
    generator = np.random.default_rng(99)
    emitted = steps = 0
    for _ in range(num_prompts // 1000):
        counts = walk(generator, *prompt_set(generator, quality, 1000))
        emitted, steps = emitted + counts[0].sum(), steps + counts[1].sum()
    return emitted / steps
