"""Trains the rehearsal model: python -m rehearsal_model [--output DIR]."""

import argparse
import os
import sys
import time
from importlib import metadata
from pathlib import Path

from . import output
from .identity import cache_directory, library_versions, source_sha256


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal_model",
        description="Train a tiny chat model and its EAGLE-3 draft from a fixed seed, for rehearsals without a GPU.",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write it (default: the cache directory)")
    parser.add_argument("--print-cache-directory", action="store_true", help="print the cache directory, train nothing")
    arguments = parser.parse_args()
    try:
        default = cache_directory()
    except metadata.PackageNotFoundError as error:
        parser.error(f"the Python package {error} is not installed here: run this with the engine environment's python")
    if arguments.print_cache_directory:
        print(default)
        return 0
    directory = (arguments.output or default).absolute()
    try:
        with output.locked(directory, show):
            build(directory)
    except (output.OutputError, OSError) as error:
        show(f"error: {error}")
        return 1
    return 0


def build(directory: Path) -> None:
    """Trains into `directory`, unless what it holds was trained by the same sources and libraries."""
    made_by = {"source_sha256": source_sha256(), **library_versions()}
    manifest = output.read_manifest(directory)
    if manifest and made_by.items() <= manifest.items() and output.is_complete(directory, manifest):
        show(f"{directory}: already there")
        return
    # libgomp's threads spin while they wait for one another, which on a busy machine takes the cores from those they
    # wait for: four times slower, measured. It reads this variable when torch is imported, hence the late imports.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from .export import export
    from .model import Shape
    from .train import Plan, train

    start = time.monotonic()
    shape, plan = Shape(), Plan()
    tokenizer, target, draft, figures = train(shape, plan, show)
    with output.replacing(directory) as partial:
        export(shape, target, draft, tokenizer, partial)
        output.write_manifest(partial, made_by | {"seed": plan.seed, "held_out": figures})
    show(f"{directory}: trained in {time.monotonic() - start:.0f} s")


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
