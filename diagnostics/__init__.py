"""Checks and measurements of a deployed host, for people (``fab``) and for the playbooks.

``inventory`` and ``connect`` reach the hosts; ``traffic`` sends prompts; the package ``proof`` finds out which worker
serves; ``tasks`` holds the command line and ``render`` what people see. docs/diagnostics.md describes it.
"""
