"""Rehearsal hosts: small Linux hosts on this machine, with a real systemd and a real SSH server.

`python3 -m rehearsal up` boots one; see docs/rehearsal-host.md. Standard library only, because it runs before anything
is installed.
"""
