"""What tensor_parallel.py has the ranks of its servers do; Python imports this at start from PYTHONPATH.

$DECISION_LOG, a folder: each scheduler process appends a line per decode step to a file of its own, named by its pid:
time in seconds (CLOCK_MONOTONIC, one clock for all processes), step, mode, running requests, KV tokens.

$DIFFERENT_RANK, a rank: its scheduler executes other code for the worker's module than the file on disk has.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time


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
                log = open(os.path.join(folder, str(os.getpid())), "a", buffering=1)  # noqa: SIM115 - for the process's life
            log.write(f"{time.monotonic():.6f} {policy.steps} {decision.mode} {running} {kv_tokens}\n")
        return decision

    Policy.decide = logged


class OtherCode(importlib.abc.MetaPathFinder):
    """Finds the worker's module where it is, and loads it with one more statement, in the process of one rank."""

    MODULES = ("sglang.srt.speculative.eagle_worker", "sglang.srt.speculative.eagle_worker_v2")

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname):
            return compile(self.get_data(self.path) + b"\nDIFFERENT = True\n", self.path, "exec", dont_inherit=True)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def find_spec(self, fullname, path, target=None):
        if fullname not in self.MODULES:
            return None
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "run_scheduler_process":
            frame = frame.f_back
        if frame is None or frame.f_locals["tp_rank"] != self._rank:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = self.Loader(fullname, spec.origin)
        return spec


if "DECISION_LOG" in os.environ:
    log_decisions(os.environ["DECISION_LOG"])
if "DIFFERENT_RANK" in os.environ:
    sys.meta_path.insert(0, OtherCode(int(os.environ["DIFFERENT_RANK"])))
