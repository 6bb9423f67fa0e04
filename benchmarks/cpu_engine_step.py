"""How long a step of a running server takes: python benchmarks/cpu_engine_step.py URL [REQUESTS]."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

TOKENS = 128


def main(url: str, requests: int = 10) -> None:
    client = httpx.Client(base_url=url, timeout=300)

    def generate(number: int) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        text = f"<|user|>Tell me {number} things about bread.<|end|><|assistant|>"
        request = {"text": text, "sampling_params": sampling}
        return client.post("/generate", json=request).raise_for_status().json()["meta_info"]

    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(generate, range(requests)))  # now the prompts are in the radix cache
        start = time.perf_counter()
        answers = list(pool.map(generate, range(requests)))
        seconds = time.perf_counter() - start
    # All requests are in every step until the first is finished, and the slowest is in all steps.
    steps = max(answer.get("spec_verify_ct") or TOKENS for answer in answers)
    print(f"{requests} requests: {seconds / steps * 1000:.1f} ms a step, {requests * TOKENS / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
