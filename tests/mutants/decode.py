"""Mutations of decoding."""

from mutants.mutation import Mutation

TABLE = [
  Mutation(
    'cache_position',
    'decode/loop.py',
    'state.position + 1,',
    'state.position,',
    "all new tokens have the position of the prompt's last",
    'tests/decode/test_loop.py::test_a_row_is_what_it_is_alone',
  ),
  Mutation(
    'cache_slots',
    'decode/step.py',
    'cache = _shift(cache, model.pattern, length - lengths_B)',
    'cache = _shift(cache, model.pattern, lengths_B)',
    'prompts do not end in the slot before the first new token',
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
    'decode/loop.py',
    'bad = ~state.done & ~jnp.all(jnp.isfinite(z), -1)',
    'bad = state.done & ~jnp.all(jnp.isfinite(z), -1)',
    'a token is drawn from logits that are not finite',
    'tests/decode/test_loop.py::'
    'test_logits_that_are_not_finite_end_the_decoding',
  ),
  Mutation(
    'row_keys',
    'decode/sampling.py',
    'return jax.vmap(jax.random.fold_in, (0, None))(one, index)',
    'return one',
    'every token of a row is drawn with the same noise',
    'tests/decode/test_sampling.py::test_draws_have_the_exact_probabilities',
  ),
  Mutation(
    'prefill_of_all_blocks',
    'models/mixers/slots.py',
    'None if whole else order',
    'order',
    'a prompt attends to blocks that its mask hides',
    'tests/decode/test_step.py::test_full_attention_visits_a_triangle',
  ),
]
