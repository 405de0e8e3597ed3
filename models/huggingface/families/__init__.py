"""What config.json of each model_type says, in rows, and its tensors' names.

known.py has every family; reader.py types what a file says, rows.py are the
kinds of rows, kin.py what families share. The others are families, by kin.
Read first: kin.py, then dense.py.
"""
