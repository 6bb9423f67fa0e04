"""The report on deployed hosts: one page made of the documents that a deploy, a comparison and a calibration leave.

``runs`` finds and writes the documents, ``facts`` draws the verdict and the figures from them, ``charts`` plots them
and ``page`` makes the page. No host is asked. docs/report.md describes it.
"""
