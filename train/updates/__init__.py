"""Update rules: how parameters move by their gradients.

optimizers.py says which rule moves which parameters, at what rate;
update_rules.py is the table of rules; soap.py and kron.py are two of them,
matrices.py shares whole matrices out over all devices; tuning.py says which
rates are far above those of pretrained weights.

Read first: optimizers.py.
"""
