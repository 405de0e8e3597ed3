"""Claims about runs that fail: what is found, what is lost, what it costs.

Named by configs such as c4.

Read first: faults.py.
"""
