"""How often a branch is taken, or a loop turns, said by a name in the program.

    with turns.scope(15, 22): lax.cond(...)      15 of the loop's 22 turns
    with jax.named_scope('about_4_trips'): lax.while_loop(...)

Counting work or messages from a traced or a compiled program (predict.py,
flops.py, compiled.py) takes the dearer branch of a conditional; without this it
would take it in every turn, and cannot count a loop whose trip count depends on
data. The name survives compiling, as names of layers do.
"""

import fractions
import re

import jax

_NAME = re.compile(r'turns_(\d+)_of_(\d+)(?:/cond)?$')
_TRIPS = re.compile(r'about_(\d+)_trips\)*(?:/while)?$')


def scope(taken, turns):
  """Context around a lax.cond; what it calls must open a scope of its own."""
  return jax.named_scope(f'turns_{taken}_of_{turns}')


def share(name):
  """Of the turns, in how many the conditional of that name goes on; 1: all."""
  match = _NAME.search(str(name))
  if not match or not int(match[2]):
    return 1
  return fractions.Fraction(int(match[1]), int(match[2]))


def trips(name):
  """Turns of the loop of that name, to count it by; None: it says nothing."""
  match = _TRIPS.search(str(name))
  return int(match[1]) if match else None


def times(count, share):
  """count x share; whole numbers stay int."""
  scaled = count * share
  return int(scaled) if scaled == int(scaled) else float(scaled)
