"""Tasks for ``fab``: ``fab --list`` names them, ``fab --help TASK`` says what a task takes."""

from diagnostics.tasks import load, logs, smoke, status, verify_worker

__all__ = ["load", "logs", "smoke", "status", "verify_worker"]
