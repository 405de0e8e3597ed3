"""One long row over several devices: context parallel attention and scans.

From outside: attention.py (six forms behind one call) and scan.py (recurrences
that hand their state to the next shard); order.py says which tokens a shard
has.

Read first: attention.py, then forms.py.
"""
