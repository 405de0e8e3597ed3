"""Mutations of decoding."""

from mutants.mutation import Mutation

TABLE = [
  Mutation(
    'cache_position',
    'models/decoder.py',
    'length = jnp.maximum(cache.length, end.max(1))',
    'length = jnp.maximum(cache.length, end.max())',
    'after a prompt all rows are as long as the longest',
    'tests/decode/test_loop.py::test_a_row_is_what_it_is_alone',
  ),
  Mutation(
    'cache_slots',
    'models/mixers/slots.py',
    'place = (row[i, 0], at * 0, at, at * 0)',
    'place = (row[i, 0], at * 0, at * 0, at * 0)',
    'every token is written into the first slot',
    'tests/decode/test_loop.py::test_a_row_is_what_it_is_alone',
  ),
  Mutation(
    'nucleus',
    'decode/sampling.py',
    'return jnp.where(got >= need, higher, t)',
    'return jnp.where(got > need, higher, t)',
    'top-k keeps one token more',
    'tests/decode/test_sampling.py::test_filters_are_their_definitions',
  ),
  Mutation(
    'min_p',
    'decode/sampling.py',
    'jnp.where(z_BV >= best + jnp.log(p), z_BV, -jnp.inf)',
    'jnp.where(z_BV >= best + p, z_BV, -jnp.inf)',
    'min-p is compared as a logit',
    'tests/decode/test_sampling.py::test_filters_are_their_definitions',
  ),
  Mutation(
    'nan_unseen',
    'decode/program.py',
    'bad = live & ~sound[:, 0]',
    'bad = state.done & ~sound[:, 0]',
    'a token is drawn from logits that are not finite',
    'tests/decode/test_loop.py::'
    'test_logits_that_are_not_finite_end_the_decoding',
  ),
  Mutation(
    'row_keys',
    'decode/sampling.py',
    'one = jax.vmap(fold)(one, index_B)',
    'return one',
    'every token of a row is drawn with the same noise',
    'tests/decode/test_sampling.py::test_draws_have_the_exact_probabilities',
  ),
  Mutation(
    'prefill_of_all_blocks',
    'models/mixers/slots.py',
    'how.mask, segments, impl=how.impl)',
    'how.mask, segments, (ids.position,) * 2, how.impl)',
    'a prompt attends to blocks that its mask hides',
    'tests/decode/test_step.py::test_full_attention_visits_a_triangle',
  ),
]
