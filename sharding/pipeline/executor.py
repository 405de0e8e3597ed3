"""One executor for every pipeline schedule: a scan over phased ticks.

    tick:  E embed | F forward | loss | B backward | W weights | two messages

Every device runs the same program on its own column of the tables
(sharding/pipeline/tables.py). A phase is entered by a condition on which all
devices agree (some stage is active), so that collectives may be inside it; what
an idle stage computes there is *selected* away, never multiplied by zero, and
written to a trash row. Messages are one ppermute for each link and direction at
the end of a tick. Buffers have as many rows as the schedule has inputs in
flight: memory does not grow with the number of microbatches.

The embedding and the loss are spread over all stages (vocabulary parallelism,
arXiv:2411.05288): they run in the tick in which the first, or last, stage needs
them. Functions of local arrays, for a fully manual region with check_vma=False;
the only sums over devices are those of `Calls`, and the caller adds up
gradients once, after the last tick.

Sources: PipeDream-Flush / Megatron-LM (arXiv:1909.08053, 2104.04473), GPipe
(1811.06965), zero bubble (2401.10241). Cost: ticks of the schedule; F and B of
a tick run one after the other.

Legend: B rows of a microbatch, T tokens, D model.
"""

from typing import Any, NamedTuple

from paraxis.sharding.pipeline import ticks as pipeline_ticks

AXIS = pipeline_ticks.AXIS
Found = pipeline_ticks.Found


class Calls(NamedTuple):
  """The model as a pipeline sees it; i is a microbatch, traced.

  embed(ends, i) -> x_BTD, the same on all stages; where it is differentiated,
    only the first stage has a cotangent that is not zero.
  loss(ends, y_BTD, i) -> () of this shard's tokens, the same on all stages;
    y is zero but on the last stage.
  context_of(i) -> what layers need of a microbatch besides x, such as angles of
    its positions: a pytree, made once for a phase, outside of its branch.
  forward(rows, x, layer_context, layer_mask) -> (y_BTD, found, kept): a chunk
    of layers. rows: {path: rows of the chunk} as this device stores them.
    layer_mask: (layers,) bool, which rows hold a layer, or None: all.
    found: `Found`, of this shard's tokens.
    kept: a pytree that `backward` reads, () to recompute it.
  backward(rows, x, kept, g_BTD, layer_context, layer_mask) -> (gx_BTD,
    gradients, tapes): the gradients of `rows`, in their layout, or of some of
    them; tapes: a pytree from which `weights` makes the others, () if none.
    The backward pass of terms that `forward` found is its own affair.
  weights(tapes) -> gradients, likewise.
  cotangent: () of the loss.
  """

  embed: Any
  loss: Any
  context_of: Any
  forward: Any
  backward: Any
  weights: Any
  cotangent: Any = 1.0


def gradients(schedule, calls, ends, stack, mask=None):
  """Loss and gradients of all microbatches of a schedule, of this shard.

  Args:
    schedule: schedules.Schedule.
    calls: `Calls`.
    ends: parameters of embedding, last norm and head, whole, the vocabulary
      spread over all stages.
    stack: {path: (chunks x layers that have it, ...)}, layers of this stage.
    mask: (stages, chunks, layers) bool: which rows hold a layer; None: all.

  Returns:
    (loss, found, gradients of ends, gradients of the stack): this shard's terms
    summed over microbatches, in at least float32; the caller adds them up over
    summed over microbatches, in at least float32; the caller adds them up over
    the mesh axes that a parameter's layout lacks. found: `Found` of all chunks.
  """
  run = pipeline_ticks.Executor(schedule, calls, ends, stack, mask)
  carry = run.scan(run.tick, run.start())
  return carry.loss, carry.found, carry.ends, carry.stack


def forward(schedule, calls, ends, stack, mask=None):
  """The forward phases alone; arguments as of `gradients`.

  Returns:
    (loss, found) as of `gradients`.
  """
  args = schedule, calls, ends, stack, mask
  run = pipeline_ticks.Executor(*args, forward=True)
  carry = run.scan(run.forward_tick, run.start_forward())
  return carry.loss, carry.found
