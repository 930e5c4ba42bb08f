"""The parts of papers.py, a file each: what one paper claims, and how it is measured here."""
