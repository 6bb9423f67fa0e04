"""Facts about a host in, checks out: no input, no output. docs/gpu-host.md says what each check means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diagnostics.doctor import cards, check, machine, models
from diagnostics.doctor.check import Check
from diagnostics.doctor.expected import Expected

Facts = Mapping[str, Any]
"""A document `specgate.host_facts/1` of the collector."""

NAMES = (*machine.NAMES, *cards.NAMES, *models.NAMES)
"""All checks, in the order in which they are shown; `preflight_accepted` takes these names."""


def judge(
    facts: Facts, expected: Expected, read_source: Callable[[str], Facts | None] = lambda path: None
) -> list[Check]:
    """Judge a host. `read_source` reads the model that a deploy would bring to a path (see `models.judge`).

    For a router the machine alone is judged.
    """
    found = [*machine.judge(facts, expected)]
    if expected.router:
        return check.accept(found, expected.accepted)
    arguments = facts["deployed_arguments"] or expected.arguments
    memory = None
    if expected.gpus is None:
        there = f"; the host has {len(facts['nvidia']['pci_gpus'])}" if facts["nvidia"]["pci_gpus"] else ""
        why = f"the server runs without a GPU (device: cpu){there}"
        found += [check.not_applicable(name, why) for name in cards.NAMES]
    else:
        found += cards.judge(facts, expected, expected.gpus)
        memory = cards.smallest_memory(facts) or expected.gpus.memory_mb
    found += models.judge(facts["models"], arguments, read_source, memory)
    return check.accept(found, expected.accepted)
