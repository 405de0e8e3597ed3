"""Ascending steps: 1, 2, 4, .. tokens a call, and rewards along that order

paper: arXiv:2509.23924
mechanism: decode/unmask/policies.py, decode/unmask/tuning.py
test: tests/decode/unmask/test_policies.py, tests/decode/unmask/test_tuning.py,
  tests/decode/unmask/test_unmask.py, tests/train/claims/decode/test_traces.py
run: paraxis reproduce ascending_steps
cost: 1,600 CPU-seconds
expect: EQ log probabilities of a record are those of passes over its canvases,
  1e-5. LEARN, 3 seeds, lists of 8: copies and sorted lists in 3 calls, log2 of
  their tokens, .3% of the right answers lost. LEARN, 3 seeds: lists of 4 to
  shuffle, rewarded for places as in the sorted list, two tokens a call: no
  answer is sorted before, .85 (.77 to .97) are after 80 updates; ratios of a
  first update are 1.
differs: masked models of 0.6M parameters, trained on lists, where the paper has
  LLaDA-8B and questions in words. Copies and sorted lists are as often right in
  one call (parallelbench), which would pass the claim too: 3 calls are enough,
  and that they are needed is not shown. The weight of ends grows with the share
  of the canvas that is text, and no text of a list has an end: it is tested,
  not claimed. Where any shuffle is rewarded, a model whose items are all as
  likely is at a saddle: in 150 updates of rate .1 it rose in one seed of three
  (.40 to 1.00) and fell in two (.32 and .34 to .04 and .11), with rate .03 or
  Adam it did not rise. At rate .1 sorted lists fell again after 40 updates (one
  seed). No KL term, one update on each group of texts. Every block begins with
  one token again (the paper's code: the next power of 2, from block to block);
  an answer is one block here.
partial: decode/unmask/tuning.py tunes the models of claims; no command does.
"""

from paraxis.configs import presets


def get_config():
  """A small masked model on lists."""
  return presets.masked_lists()


def claims():
  """What `paraxis reproduce ascending_steps` checks."""
  from paraxis.train.claims.decode import canvases
  from paraxis.train.claims.decode import traces

  kept = dict(
    check=traces.on_policy, changes=presets.SMALL_MASKED, prompts=6, new=13,
    policy=dict(count='ascending', block=8), within=1e-5,
  )  # fmt: skip
  doubling = presets.LISTS | dict(
    check=canvases.calls, policies=[{}, dict(count='ascending')],
    operations=['copy', 'sort'], bounds=[2.65, 0.02], lists_of=[8, 100],
  )  # fmt: skip
  rewarded = dict(
    check=traces.rewarded, on=presets.LISTS, operations=['shuffle', 'sort'],
    policy=dict(score='entropy', tokens=2),
    learned=dict(updates=80, prompts=16, group=8, rate=0.03), by=0.1,
    lists_of=[4, 100],
  )  # fmt: skip
  return [
    ('a record is of its own canvases', 'EQ', kept, None),
    ('log2 of the tokens are enough calls', 'LEARN', doubling, 'log2 L'),
    ('rewards along the order', 'LEARN', rewarded, None),
  ]


def knockouts():
  """Canvases of another call are taken; all is decoded one by one."""
  from paraxis.train.claims.decode import traces

  return [
    ('any_call', 'a record is of its own canvases', traces.any_call),
    (
      'one_by_one', 'log2 of the tokens are enough calls',
      {'policies': [{}, {}]},
    ),
    ('of_others', 'rewards along the order', traces.of_others),
  ]  # fmt: skip
