"""Claims about replicas that step alone, and exchange now and then.

Named by configs such as diloco.

Read first: steps.py.
"""
