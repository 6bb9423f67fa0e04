"""Checks a release from inside: run by its own interpreter, prints one JSON line, exits with 1 and a reason if unfit.

Importing what the server imports also leaves compiled files in the release; the service cannot write them.
"""

import importlib
import json
import os
import platform
import sys
import sysconfig
from importlib import metadata

SERVER_MODULES = ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")


def main(plugins: list[str]) -> None:
    """``plugins``: names of the distributions that must offer an SGLang plug-in."""
    offered = {point.dist.name for point in metadata.entry_points(group="sglang.srt.plugins") if point.dist}
    missing = sorted(set(plugins) - offered)
    if missing:
        sys.exit(f"these plug-ins are not installed or offer no entry point: {', '.join(missing)}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in SERVER_MODULES:
        importlib.import_module(module)

    site_packages = sysconfig.get_paths()["purelib"]
    example = os.path.join(site_packages, "sglang", "__init__.py")
    if os.stat(example).st_nlink < 2:
        sys.exit(f"{example} is a copy, not a hard link into the cache: cache and releases must lie in one file system")
    print(
        json.dumps(
            {
                "sglang_version": metadata.version("sglang"),
                "python_version": platform.python_version(),
                "site_packages": site_packages,
            }
        )
    )


main(sys.argv[1:])
