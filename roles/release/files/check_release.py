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
# The kernels, where the lock file has them. The import of FlashInfer compares its version with that of its cubins.
KERNEL_MODULES = {
    "flashinfer-python": "flashinfer",
    "flashinfer-cubin": "flashinfer_cubin",
    "sglang-kernel": "sgl_kernel",
}


def installed(distribution: str) -> bool:
    return any(metadata.distributions(name=distribution))


def main(plugins: list[str]) -> None:
    """``plugins``: names of the distributions that must offer an SGLang plug-in."""
    offered = {point.dist.name for point in metadata.entry_points(group="sglang.srt.plugins") if point.dist}
    missing = sorted(set(plugins) - offered)
    if missing:
        sys.exit(f"these plug-ins are not installed or offer no entry point: {', '.join(missing)}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    kernels = [module for distribution, module in KERNEL_MODULES.items() if installed(distribution)]
    for module in (*SERVER_MODULES, *kernels):
        importlib.import_module(module)

    site_packages = sysconfig.get_paths()["purelib"]
    example = os.path.join(site_packages, "torch", "__init__.py")
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


if __name__ == "__main__":
    main(sys.argv[1:])
