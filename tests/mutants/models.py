"""Mutations of models."""

from mutants.mutation import Mutation

_MIXER = 'tests/models/mixers/test_protocol.py::'
_ROUTER = 'tests/models/ffn/test_router.py::'

TABLE = [
  Mutation(
    'layernorm_bf16',
    'models/norm.py',
    'y = y - jnp.mean(y, -1, keepdims=True)',
    'y = x - jnp.mean(x, -1, keepdims=True)',
    'LayerNorm is computed in bfloat16',
    'tests/models/test_norm.py::'
    'test_layernorm_of_bfloat16_is_computed_in_float32',
  ),
  Mutation(
    'post_norm',
    'models/layer.py',
    'x = x + self._after(mix.name, y)',
    'x = self._after(mix.name, x + y)',
    'the norm after a part takes the residual too',
    'tests/models/huggingface/test_families.py::'
    'test_logits_and_gradients_are_golden[olmo2]',
  ),
  Mutation(
    'embedding_scale',
    'models/decoder.py',
    'x = x * jnp.asarray(config.embedding_scale, dtype)',
    'x = x + 0 * jnp.asarray(config.embedding_scale, dtype)',
    'the embedding is not scaled',
    'tests/models/huggingface/test_families.py::'
    'test_logits_and_gradients_are_golden[gemma2]',
  ),
  Mutation(
    'logit_softcap',
    'models/decoder.py',
    'return cap * jnp.tanh(z / cap) if cap else z',
    'return jnp.tanh(z / cap) if cap else z',
    'capped logits are at most 1',
    'tests/models/test_decoder.py::test_logits_are_capped',
  ),
  Mutation(
    'rope_sign',
    'models/mixers/rope.py',
    '[x1 * cos - x2 * sin, x2 * cos + x1 * sin]',
    '[x1 * cos + x2 * sin, x2 * cos - x1 * sin]',
    'rotary positions turn the other way',
    'tests/models/mixers/test_rope.py::test_rotation_is_a_complex_product',
  ),
  Mutation(
    'document_reset',
    'models/mixers/protocol.py',
    'return (see.positions == 0) & valid(see)',
    'return (see.positions < 0) & valid(see)',
    'a recurrence keeps its state where a document begins',
    _MIXER + 'test_packed_documents_are_what_they_are_alone[M]',
  ),
  Mutation(
    'bias_in_the_mix',
    'models/ffn/router.py',
    'mix = jnp.take_along_axis(s_BTE, ids, -1)',
    'mix = jnp.take_along_axis(choice, ids, -1)',
    "an expert's bias enters its weight",
    _ROUTER + 'test_a_bias_moves_choices_and_not_weights',
  ),
  Mutation(
    'balance_of_padding',
    'models/ffn/router.py',
    'mass_BE = jnp.where(valid_BT[..., None], p_BTE, 0).sum(1)',
    'mass_BE = p_BTE.sum(1)',
    'padding counts in the balance term',
    _ROUTER + 'test_terms_and_counts',
  ),
  Mutation(
    'copies',
    'models/ffn/moe.py',
    'share = 1 / _copies()',
    'share = 1.0',
    'tokens that several devices hold count several times',
    'tests/models/ffn/test_moe.py::test_tokens_that_several_devices_hold',
  ),
  Mutation(
    'kv_copies',
    'models/mixers/protocol.py',
    'x = jnp.broadcast_to(x_BSGH[:, :, :, None], (b, s, g, heads // g, h))',
    'x = jnp.broadcast_to(x_BSGH[:, :, None], (b, s, heads // g, g, h))',
    'copies of few kv heads stand in another order',
    'tests/models/mixers/test_attention.py::test_few_kv_heads',
  ),
  Mutation(
    'coldest_experts',
    'sharding/experts/dispatch.py',
    'return lax.top_k(load_E, count)[1]',
    'return lax.top_k(-load_E, count)[1]',
    'the experts that every device gathers are the coldest',
    'tests/models/ffn/test_moe.py::'
    'test_hot_experts_are_the_busiest_of_the_step_before',
  ),
  Mutation(
    'residual_expert',
    'models/ffn/moe.py',
    'c[..., 1:] * self.beside(x_BTD)',
    'c[..., 1:] * 0 * self.beside(x_BTD)',
    'the mlp beside the experts counts nothing',
    'tests/models/ffn/test_moe.py::test_tokens_that_several_devices_hold',
  ),
  Mutation(
    'windows_ignored',
    'models/mixers/attention.py',
    'window=config.window if mixers.TABLE[kind].windowed else 0',
    'window=0',
    'layers with a window attend to the whole row',
    'tests/models/test_decoder.py::'
    'test_scanned_and_unrolled_equal_a_loop[WF-5]',
  ),
  Mutation(
    'gate_ignored',
    'models/mixers/gated_linear.py',
    'jax.nn.log_sigmoid(z + bias) /',
    '0 * jax.nn.log_sigmoid(z + bias) /',
    'gated linear attention forgets nothing',
    'tests/models/mixers/test_gated_linear.py::'
    'test_output_and_every_gradient_are_those_of_the_loop',
  ),
  Mutation(
    'decay_ignored',
    'models/mixers/mamba.py',
    '(dt[..., None] * x).astype(x.dtype), dt * self._rate(dt.dtype)',
    '(dt[..., None] * x).astype(x.dtype), 0 * self._rate(dt.dtype) * dt',
    'Mamba-2 forgets nothing',
    'tests/models/mixers/test_mamba.py::test_equals_a_loop_over_tokens',
  ),
  Mutation(
    'lru_decay',
    'models/mixers/rg_lru.py',
    'log_a = -SHARPNESS * r *',
    'log_a = 0 * r *',
    'RG-LRU forgets nothing, and lets nothing in',
    'tests/models/mixers/test_rg_lru.py::test_equals_a_loop_over_tokens',
  ),
  Mutation(
    'logits_bf16',
    'models/decoder.py',
    'wide = jnp.promote_types(x_BTD.dtype, jnp.float32)',
    'wide = x_BTD.dtype',
    'logits are summed in bfloat16',
    'tests/models/test_decoder.py::test_bfloat16_arithmetic_stays_close',
  ),
  Mutation(
    'balance_scale',
    'models/ffn/router.py',
    'return p_BTE.shape[-1] * (f_BE',
    'return (f_BE',
    'the balance term lacks the number of experts',
    _ROUTER + 'test_terms_and_counts',
  ),
  Mutation(
    'best_group',
    'models/ffn/router.py',
    '_, chosen = jax.lax.top_k(best.sum(-1), config.top_groups)',
    '_, chosen = jax.lax.top_k(best[..., 0], config.top_groups)',
    'groups of experts are chosen by their best expert alone',
    _ROUTER + 'test_choices',
  ),
  Mutation(
    'norm_of_a_shard',
    'sharding/annotate.py',
    'return jax.lax.pmean(y, axes) if axes else y',
    'return y',
    'a norm over heads has the mean of one shard',
    'tests/sharding/test_annotate.py::test_mean_over_heads_that_are_split',
  ),
  Mutation(
    'learned_positions',
    'models/decoder.py',
    'x = x + self._lookup(ends.positions, batch.positions, dtype)',
    'x = x + self._lookup(ends.positions, 0 * batch.positions, dtype)',
    'every token has the first position',
    'tests/models/huggingface/test_families.py::'
    'test_logits_and_gradients_are_golden[gpt2]',
  ),
  Mutation(
    'local_base',
    'models/mixers/rope.py',
    'if local and config.rope_local_theta:\n    theta',
    'if config.rope_local_theta:\n    theta',
    'layers without a window rotate at the base of those with one',
    'tests/models/mixers/test_rope.py::test_a_local_base_is_never_scaled[yarn]',
  ),
  Mutation(
    'router_in_order',
    'models/depth.py',
    "BY_EXPERT = ('experts', 'choices')",
    "BY_EXPERT = ('experts',)",
    "experts are stacked in another order, and their router's columns are not",
    'tests/train/test_expert_order.py::'
    'test_slots_hold_the_experts_that_are_named',
  ),
  Mutation(
    'experts_back',
    'models/depth.py',
    '_slots(x, dim, np.argsort(order))',
    '_slots(x, dim, order)',
    'a checkpoint holds experts permuted twice instead of in order',
    'tests/models/test_depth.py::test_experts_out_of_order_and_back[numpy]',
  ),
]
