"""Is a host fit to serve? One implementation for the deploy's preflight and for ``fab doctor``.

``collector`` runs on the host and reads facts; ``nvidia_smi`` parses what NVIDIA's tools print; ``models`` and
``checks`` judge, with the versions of ``support``; ``expected`` holds what the inventory expects; ``doctor`` is the
task of ``fab``. The action plug-in ``host_checks`` does the same for a play. docs/gpu-host.md explains each check.
"""
