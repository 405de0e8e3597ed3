"""The foundation under every config: fields, errors, the command line.

errors.py has the exit codes and the one exception for a user's mistake;
field.py declares a field with its bounds; model.py and mixers.py are sections
of the schema. From outside: everything. command_line.py and meant.py alone know
the schema.

Read first: errors.py.
"""
