"""Is a host fit to serve? One implementation for the deploy's preflight and for ``fab doctor``.

``collector`` runs on the host and reads facts; ``machine``, ``cards`` and ``models`` judge them, with ``nvidia_smi``
(parsers), ``support`` (versions) and ``expected`` (what the inventory expects); ``checks`` puts all together.
``doctor`` is the task of ``fab``; the action plug-in ``host_checks`` does the same in a play. docs/gpu-host.md explains
each check.
"""
