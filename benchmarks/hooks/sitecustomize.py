"""What the benchmarks have the processes of their servers do; Python imports this at start from PYTHONPATH.

$DECISION_LOG, a folder: each scheduler process appends a line per decode step to a file of its own, named by its pid:
time in seconds (CLOCK_MONOTONIC, one clock for all processes), step, mode, running requests, KV tokens.

$DIFFERENT_RANK, a rank: its scheduler executes other code for the worker's module than the file on disk has.

$WITHOUT_PROMPT_EXTEND, set: the draft does not run over prompts that arrive while the gate is closed. Only for a gate
that stays closed.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

WORKERS = ("sglang.srt.speculative.eagle_worker", "sglang.srt.speculative.eagle_worker_v2")
PROMPTS_TAKEN_FOR_KNOWN = """
def _taken_for_known(self, batch, *inputs):
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        req.draft_len = length

DraftSync.extend_prompt = _taken_for_known
"""


def log_decisions(folder: str) -> None:
    """Have the gate's policy write down each step that it decides."""
    from spec_gate.policy import Policy

    decide = Policy.decide
    log = None

    def logged(policy, running, kv_tokens=0, *arguments):
        nonlocal log
        decision = decide(policy, running, kv_tokens, *arguments)
        if running:
            if log is None:
                log = open(os.path.join(folder, str(os.getpid())), "a", buffering=1)  # noqa: SIM115 - while it lives
            log.write(f"{time.monotonic():.6f} {policy.steps} {decision.mode} {running} {kv_tokens}\n")
        return decision

    Policy.decide = logged


class Longer(importlib.abc.MetaPathFinder):
    """Finds modules where they are and loads them with `more` statements at their end; of one rank, or of all."""

    def __init__(self, modules: tuple[str, ...], more: str, rank: int | None = None) -> None:
        self._modules, self._more, self._rank = modules, more, rank

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._modules or self._rank not in (None, rank_of_this_process()):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(fullname, spec.origin)
        spec.loader.more = self._more.encode()
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    more = b""

    def get_code(self, fullname):
        return compile(self.get_data(self.path) + b"\n" + self.more, self.path, "exec", dont_inherit=True)


def rank_of_this_process() -> int | None:
    """The tensor-parallel rank in a scheduler's process."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "run_scheduler_process":
        frame = frame.f_back
    return frame.f_locals["tp_rank"] if frame is not None else None


if "DECISION_LOG" in os.environ:
    log_decisions(os.environ["DECISION_LOG"])
if "DIFFERENT_RANK" in os.environ:
    sys.meta_path.insert(0, Longer(WORKERS, "DIFFERENT = True\n", int(os.environ["DIFFERENT_RANK"])))
if "WITHOUT_PROMPT_EXTEND" in os.environ:
    sys.meta_path.insert(0, Longer(("spec_gate.draft_sync",), PROMPTS_TAKEN_FOR_KNOWN))
