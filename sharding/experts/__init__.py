"""Tokens travel to the devices that hold their experts, and back.

From outside: dispatch.py. product.py multiplies rows by their expert's matrix.

Read first: dispatch.py.
"""
