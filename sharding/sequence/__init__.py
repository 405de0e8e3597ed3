"""One long row over several devices: context parallel attention and scans.

From outside: attention.py (six forms behind one call), scan.py (recurrences
that hand their state to the next shard) and order.py (which tokens a shard
has).

Read first: attention.py, then forms.py.
"""
