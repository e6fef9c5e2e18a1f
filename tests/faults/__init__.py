"""Faults made on purpose, some hundred times: scripts that print a report, and end with 1 if a promise was broken."""
