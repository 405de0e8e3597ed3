"""What is to be known of a GPU or TPU, part by part.

Read first: parts.py; then correct.py (against the loops of reference.py); then
report.py, the files.
"""
