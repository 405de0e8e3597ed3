"""Bytes sent, memory and work of a program, counted without running it.

traced.py reads a jaxpr (predict.py, liveness.py and flops.py count in it),
compiled.py a compiled program (hlo.py and traffic.py count in it); aot.py
compiles for target.py's accelerators. compiling.py compiles what is to run,
with the options (narrow.py: of bfloat16 on CPU) and the store of programs
(compile_store.py) that all commands share. From outside: all of these.

Read first: hlo.py, then traced.py.
"""
