"""Proofs about one configuration: equal to one device, and what it will cost.

verify.py, check.py, target_compile.py and doctor.py are commands; trial.py runs
a config on given devices, properties.py compares it with one device.

Read first: verify.py, then properties.py, trial.py.
"""
