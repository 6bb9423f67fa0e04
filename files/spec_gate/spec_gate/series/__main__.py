"""Builds the manifest of a series from its patches and pristine source.

    python -m spec_gate.series build --site-packages DIR [--series-directory DIR]

Writes the id of the series into the patches and manifest.json beside them, for the version of SGLang in DIR, which must
be as released. The result is a function of the patches and of that release alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from spec_gate import series
from spec_gate.patching import PatchError, patched, sha256


def build(site_packages: Path, directory: Path) -> Path:
    """Build the manifest for the SGLang in `site_packages` and return its path. Raises SeriesError or PatchError."""
    version = series.sglang_version(site_packages)
    folder = directory / version
    patch_files = series.patches(folder)
    if not patch_files:
        raise series.SeriesError(f"{folder} holds no *.patch files: write them first")
    series_id = series.series_id(version, folder)
    files = []
    for patch in patch_files:
        module = patch.name.removesuffix(".patch")
        path = module.replace(".", "/") + ".py"
        text = series.with_series_id(patch.read_bytes(), series_id)
        if text.count(series_id.encode()) != 1:
            raise series.SeriesError(f'{patch} must add one call register(__name__, "") at the top of the module')
        upstream = (site_packages / path).read_bytes()
        files.append(
            {
                "path": path,
                "module": module,
                "upstream_sha256": sha256(upstream),
                "patched_sha256": sha256(patched(upstream, text, path)),
            }
        )
        patch.write_bytes(text)
    manifest = folder / "manifest.json"
    document = {"schema": series.MANIFEST_SCHEMA, "sglang_version": version, "series": series_id, "files": files}
    manifest.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return manifest


def main() -> int:
    """Run the command line; the exit status is 0, or 1 with one sentence on standard error."""
    parser = argparse.ArgumentParser(prog="python -m spec_gate.series", description=__doc__)
    parser.add_argument("action", choices=["build"])
    parser.add_argument("--site-packages", required=True, type=Path, help="where SGLang is installed, as released")
    parser.add_argument("--series-directory", type=Path, default=series.DIRECTORY, help="holds one folder per version")
    arguments = parser.parse_args()
    try:
        print(build(arguments.site_packages, arguments.series_directory))
    except (series.SeriesError, PatchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
