"""What fsdp gathers in a pipeline's phases: in the dtype of the products.

A cast commutes with a gather, so loss and every gradient are, bit for bit,
those of a pipeline that gathers parameters as they are kept.
"""

import collections
import dataclasses

import jax
from jax.extend import core
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.configs.base import model as model_schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.train import pipeline_step
from paraxis.train.certify import trial

EXPERTS = model_schema.Experts(count=4, top_k=2, d_ff=16, region='data')


def config_of(
  mesh='stage=2,fsdp=2', pattern='F', layers=4, schedule='one_f_one_b',
  chunks=1, activations='recompute', remat='none', experts=None,
):  # fmt: skip
  """schema.Config: parameters in float32, products in bfloat16."""
  model = schema.Model(
    vocab_size=32, d_model=16, num_heads=4, head_dim=4, d_ff=24,
    num_layers=layers, pattern=pattern, attention_block=16,
    dtype='bfloat16', param_dtype='float32',
    gated_linear=mixer_schema.GatedLinear(heads=4, gate_rank=2, conv_width=3),
    mamba=mixer_schema.Mamba(head_dim=4, state=4, dt_rank=2, groups=2),
    recurrent=mixer_schema.Recurrent(heads=4),
    tcn=mixer_schema.Tcn(kernel=3, depth=2, chunk=4),
    latent=mixer_schema.Latent(
      rank=8, query_rank=8, nope_dim=2, rope_dim=2, value_dim=2
    ),
    experts=experts or model_schema.Experts(),
  )  # fmt: skip
  return schema.Config(
    mesh=schema.Mesh(**mesh_lib.parse(mesh)),
    pipeline=schema.Pipeline(
      schedule=schedule, chunks=chunks, activations=activations
    ),
    model=model,
    data=schema.Data(sequence_length=16),
    train=schema.Train(batch_size=8, remat=remat),
  )


def gathers(jaxpr):
  """{(name of the dtype, shape): times} of every all_gather in it."""
  found = collections.Counter()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'all_gather':
      x = eqn.invars[0].aval
      found[x.dtype.name, x.shape] += 1
    for inner in core.jaxprs_in_params(eqn.params):
      found += gathers(inner)
  return found


def measured(config):
  """((loss, {path: gradient}), `gathers` of the step)."""
  sizes = dataclasses.astuple(config.mesh)[:6]
  side = trial.Runner(config, jax.devices()[: int(np.prod(sizes))])
  reference = trial.reference(config, True, jax.devices()[0])
  state = side.start(reference.params)
  with side.job.context():
    batch = side.put(reference.batches[0])
    traced = side._grads.trace(state.params, batch)
    results = traced.lower().compile()(state.params, batch)
  return jax.device_get(results), gathers(traced.jaxpr.jaxpr)


def wide(config):
  """`measured` with every parameter gathered in its own dtype."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      pipeline_step.Pipeline, '_gathered_dtype', lambda self, path, own: own
    )
    return measured(config)


@pytest.mark.parametrize(
  'case',
  [
    dict(layers=5),
    dict(layers=5, activations='store'),
    dict(schedule='interleaved', chunks=2, remat='full'),
    dict(mesh='stage=2,fsdp=2,tensor=2', schedule='zero_bubble'),
    dict(pattern='GM', schedule='zero_bubble'),
    dict(pattern='SR', schedule='zero_bubble'),
    dict(pattern='R', schedule='v_half', chunks=2),
    dict(pattern='LC', activations='store'),
    dict(pattern='A-M'),
    dict(mesh='stage=2,data=2,fsdp=2', experts=EXPERTS),
    dict(mesh='stage=2,data=2,fsdp=2', experts=EXPERTS, schedule='zero_bubble'),
  ],
  ids=lambda case: ','.join(
    'experts' if v is EXPERTS else str(v) for v in case.values()
  ),
)
def test_parameters_travel_in_the_dtype_of_products(case):
  config = config_of(**case)
  (loss, gradients), narrow_ = measured(config)
  (same_loss, same), wide_ = wide(config)
  # The table of the vocabulary travels once a step, in float32.
  tables = {(d, shape) for d, shape in narrow_ if d == 'float32'}
  assert len(tables) <= 1, tables
  count = lambda found: collections.Counter(
    {s: sum(n for (_, t), n in found.items() if t == s) for _, s in found}
  )
  assert count(narrow_) == count(wide_)  # no more and no fewer
  assert sum(n for (d, _), n in wide_.items() if d == 'float32') > 10
  assert loss == same_loss
  for path, g in gradients.items():
    assert g.dtype == np.float32
    np.testing.assert_array_equal(g, same[path], err_msg=path)
