"""Mutations of decoding."""

from mutants.mutation import Mutation

_METHODS = 'tests/decode/test_methods.py::'
_TEXTS = _METHODS + 'test_replayed_drafts_give_the_text_of_one_by_one'
_DRAFTS = 'tests/decode/test_drafts.py::'
_PACKED = 'tests/decode/test_packed.py::'
_FORKS = 'tests/decode/test_forks.py::'

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
    'models/mixers/slot_writes.py',
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
    '(how.order(ids.position),) * 2 if how.block else None',
    '(how.order(ids.position),) * 2',
    'a prompt attends to blocks that its mask hides',
    'tests/decode/test_step.py::test_full_attention_visits_a_triangle',
  ),
  Mutation(
    'replay_keeps_others',
    'decode/judges.py',
    'same = (tokens[:, :-1] == drafts.tokens) & drafts.valid',
    'same = (tokens[:, :-1] >= drafts.tokens) & drafts.valid',
    'drafts are kept that decoding one by one would not draw',
    _TEXTS + '[F-speculative-drawn]',
  ),
  Mutation(
    'residual',
    'decode/judges.py',
    'rest=lambda p, q: jnp.maximum(p - q, 0)',
    'rest=lambda p, q: p',
    'what a dropped draft is replaced by is drawn from p',
    _METHODS + 'test_judges_are_what_they_declare[rejection]',
  ),
  Mutation(
    'ancestors',
    'models/mixers/packed.py',
    'return (ids.ancestors[:, :, None] >> node) & 1 == 1',
    'return (ids.ancestors[:, :, None] >> node) & 1 >= 0',
    'branches of a tree see one another',
    _PACKED + 'test_a_tree_is_every_path_alone[F]',
  ),
  Mutation(
    'rows_of_lanes',
    'models/mixers/packed.py',
    'row = jnp.where(valid, packed.request, 0)',
    'row = jnp.where(valid, 0 * packed.request, 0)',
    'every lane that is not its own row reads row 0',
    _PACKED + 'test_mixed_requests_are_what_they_are_alone[F]',
  ),
  Mutation(
    'shared_rows',
    'models/mixers/slots.py',
    'row = jnp.where(jnp.isnan(x[:, 0, 0, 0]), 0, one.row[:, 0])',
    'row = 0 * one.row[:, 0]',
    'every fork reads row 0',
    _FORKS + 'test_forks_are_what_they_are_alone[F]',
  ),
  Mutation(
    'read_twice',
    'decode/cache.py',
    'one.begin <= found[-1].end:',
    'one.begin < found[-1].begin:',
    'a merge counts the prefix of its children twice',
    _FORKS + 'test_a_merge_is_one_pass_in_which_children_are_apart[F]',
  ),
  Mutation(
    'states_of_chains',
    'models/mixers/protocol.py',
    'rows_where(count > t, z, old)',
    'rows_where(count >= t, z, old)',
    'a recurrence keeps a token more of a chain',
    _PACKED + 'test_any_part_of_a_chain_is_kept[G]',
  ),
  Mutation(
    'tenant',
    'decode/scheduler.py',
    'request.row, new[row] = row, True',
    'request.row, new[row] = row, False',
    'a row is given away with what the last request left',
    'tests/decode/test_scheduler.py::'
    'test_served_texts_are_those_of_one_batch[WF-greedy]',
  ),
  Mutation(
    'tree_walk',
    'decode/judges.py',
    'node = jnp.where(here, jnp.argmax(child, 1).astype(jnp.int32) + 1, node)',
    'node = jnp.where(here, jnp.argmax(child, 1).astype(jnp.int32), node)',
    'the path of a tree goes on at the draft before the one that is kept',
    _METHODS + 'test_a_tree_that_holds_every_token_makes_as_many_as_it_is_deep',
  ),
  Mutation(
    'tree_ancestors',
    'decode/trees.py',
    'out = np.eye(self.width + 1, dtype=bool)',
    'out = np.eye(self.width + 1, k=-1, dtype=bool)',
    'a draft of a tree sees another one in place of itself',
    'tests/decode/test_trees.py::test_paths_share_their_beginnings',
  ),
  Mutation(
    'jacobi_shift',
    'decode/drafts/jacobi.py',
    'place = seen.n[:, None] + jnp.arange(width, dtype=jnp.int32)',
    'place = seen.n[:, None] - 1 + jnp.arange(width, dtype=jnp.int32)',
    'drafts of a window stand a place too late',
    _DRAFTS + 'test_calls_are_those_of_a_plain_loop[jacobi]',
  ),
  Mutation(
    'pearl_length',
    'decode/drafts/drafters.py',
    'length = was + seen.n + jnp.where(there, width, 0)',
    'length = was + seen.n + jnp.where(there, width, 1)',
    'the draft model keeps a token that the text does not have',
    _DRAFTS + 'test_drafts_of_the_model_itself_are_all_kept[pearl-how0]',
  ),
  Mutation(
    'eagle_features',
    'decode/drafts/eagle.py',
    'return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))',
    'return x_BTD',
    'a token is mixed with the features that it makes itself',
    _DRAFTS + 'test_features_before_a_token',
  ),
  Mutation(
    'wavefront_prefix',
    'decode/wavefront.py',
    'final = jnp.cumsum(~ready, 1) == 0',
    'final = ready',
    'a place is text before one in front of it is',
    'tests/decode/test_wavefront.py::test_it_is_a_loop_over_calls[how3]',
  ),
  Mutation(
    'scattered_slots',
    'models/mixers/slot_writes.py',
    'return keep & (place >= 0) & (place < size)',
    'return (place >= 0) & (place < size)',
    'on a GPU tokens are written that are not kept',
    'tests/models/mixers/test_slot_writes.py::'
    'test_every_kept_token_is_at_its_place',
  ),
  Mutation(
    'shared_rows_number',
    'decode/shared_rows.py',
    'numbers[at], index[row], new[row] = number, at, True',
    'numbers[at], index[row], new[row] = row, at, True',
    'a request that shares rows draws by its row, not by its number',
    'tests/decode/test_shared_rows.py::'
    'test_texts_are_those_of_one_batch[lookup-drawn]',
  ),
  Mutation(
    'shared_rows_index',
    'decode/shared_rows.py',
    'return x[index_R]',
    'return x[index_R * 0]',
    'requests that are read together all take the first one for theirs',
    'tests/decode/test_shared_rows.py::'
    'test_texts_are_those_of_one_batch[lookup-drawn]',
  ),
  Mutation(
    'shared_rows_idle',
    'decode/shared_rows.py',
    'np.bool_(bool(self.waiting))',
    'np.bool_(False)',
    'rows that have ended stay idle while requests wait',
    'tests/decode/test_shared_rows.py::test_rows_take_requests_as_they_end',
  ),
  Mutation(
    'latent_slots_once',
    'models/mixers/latent_slots.py',
    'near &= here.first == 0',
    'near &= True',
    'latents in flight are counted by every shard of the slots',
    'tests/decode/test_context.py::'
    'test_latents_are_sharded_in_width_and_in_slots[summed]',
  ),
  Mutation(
    'latent_slots_first',
    'models/mixers/latent_slots.py',
    'slots = part.first + jnp.arange(part.size)',
    'slots = jnp.arange(part.size)',
    'slots of latents count from each shard',
    'tests/decode/test_context.py::'
    'test_latents_are_sharded_in_width_and_in_slots[summed]',
  ),
  Mutation(
    'latent_slots_explicit',
    'models/mixers/latent.py',
    'self._uncached(mine.astype(q.dtype))',
    'self._uncached(0 * mine.astype(q.dtype))',
    'many tokens see no committed latents',
    'tests/decode/test_context.py::'
    'test_latents_are_sharded_in_width_and_in_slots[summed]',
  ),
  Mutation(
    'scored_as_loaded',
    'decode/evaluate/score.py',
    'self._program(self._read, tokens',
    'self._program(self._params, tokens',
    'scores are of the loaded weights, whatever decode.weights says',
    'tests/decode/evaluate/test_score.py::'
    'test_weights_of_4_bits_are_scored_as_such',
  ),
  Mutation(
    'joint_apart',
    'decode/drafts/joint.py',
    'if not together.coupled:',
    'if together.coupled:',
    "the heads' loss reaches the model where it is not to",
    'tests/decode/test_joint.py::'
    'test_without_coupling_the_model_learns_the_text_alone',
  ),
  Mutation(
    'joint_targets',
    'decode/drafts/joint.py',
    'choice[:, 1 + k :]',
    'choice[:, k:]',
    'a head learns the token before its own',
    'tests/decode/test_joint.py::test_the_loss_is_a_plain_loop',
  ),
  Mutation(
    'belief_late',
    'decode/evaluate/ensemble.py',
    'seen = jnp.cumsum(nats_EBT, -1) - nats_EBT',
    'seen = jnp.cumsum(nats_EBT, -1)',
    'an expert is believed by the token that is to be predicted',
    'tests/decode/evaluate/test_ensemble.py::'
    'test_scores_are_those_of_bayes[data=1]',
  ),
  Mutation(
    'belief_still',
    'decode/evaluate/ensemble.py',
    'log_EB = log_EB + z_EBV[:, np.arange(len(rows)), chosen]',
    'log_EB = log_EB + 0',
    'its own tokens move no belief while a text is made',
    'tests/decode/evaluate/test_ensemble.py::'
    'test_texts_are_the_likeliest_tokens[data=1]',
  ),
]
