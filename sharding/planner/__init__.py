"""Choosing: what a schedule or a layout would cost before it is built.

From outside: simulate.py (time of a pipeline schedule). conversions.py,
signatures.py and auto_rules.py are used by claims only: an algebra of layouts
and rules made from shapes, beside the ones that training uses.

Read first: simulate.py.
"""
