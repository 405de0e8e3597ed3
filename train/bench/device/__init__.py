"""`paraxis bench device`: everything worth knowing of a GPU or TPU, in a call.

From outside: command.py, which orders the parts of parts.py, and nothing else.

Read first: parts.py; then what the parts compute, correct.py (problems.py
against the loops of reference.py), speed.py, kernels.py, model.py; then
report.py, the files.
"""
