"""`paraxis decode --certify`: is decoding the model without a cache?

table.py prints the verdicts, properties.py proves each of them, cases.py has
the models and feeds the tokens.

Read first: table.py, then properties.py.
"""
