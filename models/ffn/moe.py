"""Mixture of experts in place of an mlp.

    y = sum_k mix_k f_ids_k(x) [+ c gate(x) g(x)]     shared experts
    y = c_0 sum_k mix_k f_ids_k(x) + c_1 g(x)         residual: c = softmax(x C)

f_e are as the model's mlp, with biases of their own if mlp_bias. With
scale_inputs the sum is of f_ids_k(mix_k x) (Llama 4): each choice is then a
token of its own in the exchange. Shared experts are one mlp g of `shared` times
the width (arXiv:2401.06066; a sigmoid gate as Qwen2-MoE's); residual: g has an
expert's width (PR-MoE, arXiv:2201.05596, section 4.1). The routed part runs in
one manual region: tokens are sharded as the residual stream is, so every device
of the region has tokens of its own if the length is sharded over it
(mesh.sequence), and they are sent once each way (sharding/experts/dispatch.py).
Tokens that several devices hold are sent by each, and count a fraction.

Terms of the loss and counts leave beside y (models/aux.py): assignments to each
expert, those dropped, and the router's entropy summed over tokens. `load` and
`bias` are read like parameters and not learned: `load` holds the counts of the
previous step, `bias` follows them (train/expert_counts.py). With a cache
nothing is dropped: a request's result must not depend on its neighbours.

Legend: B rows, T tokens, D model, F hidden width, E experts, K choices, S rows
sorted by expert.
"""

import dataclasses
import functools
import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.models import parameter
from paraxis.models.ffn import mlp
from paraxis.models.ffn import router
from paraxis.sharding import annotate
from paraxis.sharding.experts import dispatch as expert

RESIDUAL = mlp.RESIDUAL
ROWS = RESIDUAL[:2]
WIDE = ('experts', 'expert_embed', 'expert_mlp')
# Of one expert each: matrices, and biases if there are some.
WEIGHTS = ('up', 'down', 'gate', 'up_bias', 'down_bias', 'gate_bias')
DOWN = ('experts', 'expert_mlp', 'expert_embed')


def width(config) -> int:
  """Hidden width of an expert."""
  return config.experts.d_ff or config.d_ff


class Moe(nnx.Module):
  """x_BTD -> (y_BTD, aux.Aux); wide: twice as many experts (pyramid)."""

  def __init__(self, config, rngs, layout=parameter.PLAIN, wide=False):
    experts = config.experts
    self.config, self.layout = config, layout
    self.count = e = experts.count * (2 if wide else 1)
    d, f, std = config.d_model, width(config), config.init_std
    make = functools.partial(parameter.matrix, rngs)
    self.router = make((d, e), ('norm', 'choices'), std=std)
    up = functools.partial(make, (e, d, f), WIDE, std=std or d**-0.5)
    if config.mlp not in mlp.PLAIN:
      self.gate = up()
    self.up = up()
    gain = (2 * config.num_layers) ** -0.5
    self.down = make((e, f, d), DOWN, std=std or f**-0.5, gain=gain)
    if experts.router_bias:
      self.router_bias = parameter.vector((e,), ('choices',))
    if experts.mlp_bias:
      wide = ('experts', 'expert_mlp')
      if config.mlp not in mlp.PLAIN:
        self.gate_bias = parameter.vector((e, f), wide)
      self.up_bias = parameter.vector((e, f), wide)
      self.down_bias = parameter.vector((e, d), ('experts', 'norm'))
    self.load = _not_learned('statistic', e + router.EXTRA)
    if experts.bias_rate:
      self.bias = _not_learned('balance', e)
    times = experts.shared or int(experts.residual)
    if times:
      beside = dataclasses.replace(config, d_ff=times * f, mlp_bias=False)
      self.beside = mlp.Mlp(beside, rngs, layout)
    if experts.shared_gate:
      self.shared_gate = make((d, 1), ('norm', None), std=std)
    if experts.residual:
      self.mix = make((d, 2), ('norm', None), std=std)

  def __call__(self, x_BTD, see):
    y, terms, count = self._routed(x_BTD, see)
    y = self._with_beside(x_BTD, checkpoint_name(y, 'down'))
    return y, aux_lib.Aux(terms, {}, {'load': count})

  def _with_beside(self, x_BTD, y):
    experts = self.config.experts
    if experts.residual:
      c = jax.nn.softmax(self._small(x_BTD, 'mix'), -1)
      weights = c[..., :1], c[..., 1:]
      return parameter.weighed(weights, (y, self.beside(x_BTD)))
    if experts.shared:
      beside = self.beside(x_BTD)
      if experts.shared_gate:
        gate = jax.nn.sigmoid(self._small(x_BTD, 'shared_gate'))
        beside = parameter.weighed((gate,), (beside,))
      if experts.shared_scale != 1:
        beside = parameter.scaled(beside, experts.shared_scale)
      y = y + beside
    return y

  def _small(self, x_BTD, name):
    """x w in at least float32 for a matrix that every device holds."""
    (y,) = parameter.multiply(
      self, x_BTD, RESIDUAL, [(name, 'BTD,DE->BTE', (*ROWS, None))],
      dtype=jnp.promote_types(x_BTD.dtype, jnp.float32),
    )  # fmt: skip
    return y

  def _plan(self, decoding):
    if annotate.mode() == 'manual' and _copies() > 1:
      raise ValueError(
        f'experts: {_copies()} devices hold the same tokens; in a manual '
        'region the length must be sharded over them (mesh.sequence).'
      )
    if annotate.carriers('expert_mlp'):
      raise errors.UserError(
        f'mesh.rules: expert_mlp over {annotate.carriers("expert_mlp")}; the '
        'width of an expert is never sharded: put the axes in '
        'model.experts.region, which shards whole experts.'
      )
    experts, region = self.config.experts, annotate.carriers('experts')
    if self.count % annotate.shards('experts'):
      raise errors.UserError(
        f'model.experts: {self.count} experts do not divide over the '
        f'{annotate.shards("experts")} devices of the region '
        f'{"+".join(region)}; take a multiple, or another '
        'model.experts.region.'
      )
    return expert.DispatchPlan(
      experts=self.count,
      region=region,
      gather=annotate.carriers('expert_embed'),
      factor=0.0 if decoding else experts.capacity_factor,
      hierarchical=experts.hierarchical and len(region) > 1,
    )

  def _routed(self, x_BTD, see):
    """The routed part, in one region -> (y, terms, count), parts of devices."""
    params = {
      name: getattr(self, name)
      for name in ('router', 'router_bias', 'load', 'bias', *WEIGHTS)
      if hasattr(self, name)
    }
    valid, denominator = see.valid, see.denominator
    if valid is None:
      valid = annotate.put(jnp.ones(x_BTD.shape[:2], bool), ROWS)
    denominator = jnp.asarray(1.0 if denominator is None else denominator)
    axes = [p.get_metadata('axes') for p in params.values()]
    plan = self._plan(see.plan is not None)

    def inside(x, valid, denominator, *arrays):
      own = dict(zip(params, arrays, strict=True))
      return self._inside(plan, x, valid, denominator, own)

    parts = annotate.everywhere()
    run = annotate.region(
      inside, (RESIDUAL, ROWS, (), *axes), (RESIDUAL, parts, parts)
    )
    return run(x_BTD, valid, denominator, *(p[...] for p in params.values()))

  def _inside(self, plan, x, valid, denominator, own):
    """On one device; own: {name: the device's share of a parameter}."""
    experts = self.config.experts
    names = [name for name in WEIGHTS if name in own]
    weights = [own[name] for name in names]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    with jax.named_scope('router'):
      # Else accelerators round both, and other experts are chosen.
      logits = jnp.matmul(
        x.astype(wide), own['router'].astype(wide), precision='highest'
      )
      logits = logits + own.get('router_bias', jnp.zeros((), wide)).astype(wide)
      s = router.scores(logits, experts.scores)
      ids, mix = router.choose(s, experts, own.get('bias'))
    load = jax.lax.stop_gradient(own['load'])[: self.count]
    hot = expert.hottest(jnp.abs(load), experts.hot) if experts.hot else None
    flat = lambda a: a.reshape(-1, a.shape[-1])
    run = functools.partial(self._experts, names)
    inputs = flat(x), flat(ids), flat(mix), valid.reshape(-1)
    if experts.scale_inputs:
      inputs = _scaled(*inputs)
    with jax.named_scope('experts'):
      y, dropped = expert.dispatch(run, weights, *inputs, plan, hot)
    if experts.scale_inputs:
      y = y.reshape(-1, experts.top_k, y.shape[-1]).sum(1, dtype=wide)
      y = y.astype(x.dtype)
    p = router.probabilities(s, experts.scores)
    count = router.counts(ids, valid, self.count)
    # Devices that hold the same tokens count a fraction each.
    share = 1 / _copies()
    mean = lambda x: jnp.asarray(x * share, wide) / denominator.astype(wide)
    terms = {}
    if experts.balance:
      f = router.shares(count, experts.balance_scope, _axes(), load)
      terms['balance'] = mean(experts.balance * router.balance(p, f, valid))
    if experts.router_z:
      terms['z'] = mean(experts.router_z * router.z(logits, valid))
    extra = jnp.stack([dropped.astype(wide), router.entropy(p, valid)])
    count = jnp.concatenate([count.sum(0).astype(wide), extra]) * share
    return y.reshape(x.shape), *aux_lib.part((terms, count))

  def _experts(self, names, x_SD, weights, multiply):
    """Rows through their experts.

    names: of the weights. multiply: (rows, w, dimension of the width, bias).
    """
    own = dict(zip(names, weights, strict=True))
    run = lambda x, name, dim: multiply(
      x, own[name], dim, own.get(f'{name}_bias')
    )
    products = [
      checkpoint_name(run(x_SD, name, 1), name)
      for name in ('up', 'gate')
      if name in own
    ]
    return run(mlp.activate(self.config, *products), 'down', 2)


def _scaled(x_ND, ids_NK, mix_NK, valid_N):
  """Each choice of a token as a token of its own, times its weight."""
  x_NKD = parameter.weighed((mix_NK[..., None],), (x_ND[:, None],))
  ids, ones = ids_NK.reshape(-1, 1), jnp.ones_like(mix_NK.reshape(-1, 1))
  valid = jnp.repeat(valid_N, ids_NK.shape[1])
  return x_NKD.reshape(-1, x_ND.shape[1]), ids, ones, valid


def _not_learned(kind, size):
  """State that a layer reads like a parameter."""
  return nnx.Param(jnp.zeros(size), axes=('choices',), kind=kind, inputs=0)


def _axes():
  """(mesh axes that shard a row, mesh axes that shard the tokens)."""
  row = annotate.carriers('residual_length')
  return row, (*annotate.carriers('batch'), *row)


def _copies():
  """Devices that hold the same tokens."""
  split = _axes()[1]
  return math.prod(
    n for a, n in annotate.sizes().items() if a not in split and a != 'stage'
  )
