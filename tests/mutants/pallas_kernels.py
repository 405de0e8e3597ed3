"""Mutations of kernels."""

from mutants.mutation import Mutation

_ATTENTION = 'tests/pallas_kernels/attention/'
_SCANS = 'tests/pallas_kernels/scans/'

TABLE = [
  Mutation(
    'lse_correction',
    'pallas_kernels/attention/xla.py',
    'new, total * a + e.sum(-1)',
    'new, total + e.sum(-1)',
    'the sum of a row is not rescaled when its maximum grows',
    _ATTENTION + 'test_op.py::test_equals_the_definition_in_float64[odd]',
  ),
  Mutation(
    'causal_blocks',
    'pallas_kernels/attention/xla.py',
    'hidden = mask.causal and j > i',
    'hidden = mask.causal and j >= i',
    'the blocks on the diagonal are taken for hidden',
    _ATTENTION + 'test_op.py::'
    'test_static_pairs_are_exactly_those_that_hold_a_visible_entry',
  ),
  Mutation(
    'causal_blocks_of_kernels',
    'pallas_kernels/attention/blocks.py',
    'full = full & (q1 - k0 < mask.window)',
    'full = full & (q0 - k0 < mask.window)',
    'a block that a window cuts is computed without a mask',
    _ATTENTION + 'test_blocks.py::test_kinds_are_true_of_every_pair',
  ),
  Mutation(
    'window_edge',
    'pallas_kernels/attention/xla.py',
    'rules.append(row - col < mask.window)',
    'rules.append(row - col <= mask.window)',
    'a window holds one token more',
    _ATTENTION + 'test_op.py::test_equals_the_definition_in_float64[window]',
  ),
  Mutation(
    'documents_meet',
    'pallas_kernels/attention/xla.py',
    'rules += [x == y, x > 0]',
    'rules += [x > 0]',
    'a token attends to the documents before its own',
    _ATTENTION + 'test_op.py::test_equals_the_definition_in_float64[packed]',
  ),
  Mutation(
    'softcap_slope',
    'pallas_kernels/attention/xla.py',
    's, slope = mask.softcap * tanh, 1 - tanh * tanh',
    's, slope = mask.softcap * tanh, 1 - tanh',
    'the derivative of the softcap',
    _ATTENTION + 'test_op.py::test_equals_the_definition_in_float64[softcap]',
  ),
  Mutation(
    'decode_begin',
    'pallas_kernels/decode_attention/op.py',
    'filled = (order[1] >= begin) & (order[1] < end)',
    'filled = order[1] < end',
    'decoding reads the slots before a document',
    'tests/pallas_kernels/decode_attention/test_op.py::'
    'test_rows_of_unequal_length',
  ),
  Mutation(
    'gated_decay',
    'pallas_kernels/scans/gated_chunk.py',
    'leave = _pick(col > row, g, precision)',
    'leave = _pick(col >= row, g, precision)',
    'a token decays its own key on the way out of a chunk',
    _SCANS + 'test_gated.py::test_equals_the_loop_in_float64',
  ),
  Mutation(
    'scan_adjoint',
    'pallas_kernels/scans/linear.py',
    'before = jnp.concatenate([state[:, None], h[:, :-1]], 1)',
    'before = h',
    'the gradient of a factor takes the state after its token',
    _SCANS + 'test_linear.py::test_equals_the_loop[shape0-xla]',
  ),
  Mutation(
    'newton_bound',
    'pallas_kernels/scans/newton.py',
    'return h if bound == math.inf else jnp.clip(h, -bound, bound)',
    'return h',
    'iterates are not held within the bound',
    _SCANS + 'test_newton.py::test_a_bound_that_cuts_the_solution_is_noticed',
  ),
  Mutation(
    'newton_adjoint',
    'pallas_kernels/scans/newton.py',
    'return *pull(transpose(g)[0]), None',
    'return *pull(g), None',
    'the gradient of a solved state forgets the tokens behind it',
    _SCANS + 'test_newton.py::test_equals_the_loop[gru-auto]',
  ),
  Mutation(
    'conv_document',
    'pallas_kernels/scans/causal_conv.py',
    'jnp.where((positions_BT >= far)[..., None], past, 0)',
    'past',
    'a convolution reads the document before its own',
    _SCANS + 'test_causal_conv.py::test_equals_the_loop[17-4-1]',
  ),
  Mutation(
    'quantized_scale',
    'pallas_kernels/matmul/quantized.py',
    'scale = (jnp.abs(w).max(1) / MOST).astype(dtype)',
    'scale = (jnp.abs(w).max(1) / (MOST + 1)).astype(dtype)',
    'the largest weight of a group is clipped',
    'tests/pallas_kernels/matmul/test_quantized.py::'
    'test_rounding_is_off_by_half_a_step_at_most',
  ),
  Mutation(
    'chunked_loss_sign',
    'pallas_kernels/matmul/cross_entropy.py',
    'dz = (dz * slope).astype(x_TD.dtype)',
    'dz = dz.astype(x_TD.dtype)',
    'the chunked loss leaves the softcap out of its gradient',
    'tests/pallas_kernels/matmul/test_cross_entropy.py::'
    'test_equals_the_definition_in_float64',
  ),
  Mutation(
    'newton_unused',
    'pallas_kernels/scans/newton.py',
    'failed = ~(size <= options.tol)',
    'failed = size <= jnp.inf',
    "what Newton's method has solved is computed token by token again",
    _SCANS + 'test_newton.py::test_equals_the_loop[gru-auto]',
  ),
  Mutation(
    'one_scale_a_column',
    'pallas_kernels/matmul/quantized.py',
    'q = jnp.round(w / scale.astype(wide)[:, None])',
    'scale = jnp.broadcast_to(scale.max(0), scale.shape)\n'
    '  q = jnp.round(w / scale.astype(wide)[:, None])',
    'all groups of a column have the scale of the largest',
    'tests/pallas_kernels/matmul/test_quantized.py::'
    'test_rounding_is_off_by_half_a_step_at_most',
  ),
  Mutation(
    'merged_lse',
    'pallas_kernels/decode_attention/schedule.py',
    'return attention_xla.finish(x + y, top, wx + wy)',
    'return attention_xla.finish(x + y, top, wx)',
    'a merged row is divided by the weight of one part',
    'tests/pallas_kernels/decode_attention/test_schedule.py::'
    'test_parts_merge_to_attention_over_the_keys_of_both',
  ),
  Mutation(
    'group_of_block',
    'pallas_kernels/matmul/grouped.py',
    "found = jnp.searchsorted(last, jnp.arange(count), side='right')",
    "found = jnp.searchsorted(last, jnp.arange(count), side='left')",
    'the first block of a run is multiplied by the matrix before its own',
    'tests/pallas_kernels/matmul/test_grouped.py::test_equal_to_a_loop',
  ),
  Mutation(
    'delta_decay',
    'pallas_kernels/scans/delta_xla.py',
    'after = reach[..., -1:, None] * state',
    'after = state',
    'the delta rule forgets nothing from chunk to chunk',
    _SCANS + 'test_delta.py::test_equals_the_loop_in_float64[63-options1-lost]',
  ),
  Mutation(
    'delta_read',
    'pallas_kernels/scans/delta_xla.py',
    'scale(x.beta, x.v - known))',
    'scale(x.beta, x.v))',
    'a chunk writes without reading the state it starts in',
    _SCANS + 'test_delta.py::test_equals_the_loop_in_float64[63-options1-lost]',
  ),
  Mutation(
    'affine_order',
    'pallas_kernels/scans/affine.py',
    'product = (j2[..., :, :, None, :] * j1[..., None, :, :, :]).sum(-3)',
    'product = (j1[..., :, :, None, :] * j2[..., None, :, :, :]).sum(-3)',
    'affine maps are composed in the other order',
    _SCANS + 'test_newton.py::test_equals_the_loop[lstm-xla]',
  ),
  Mutation(
    'attention_gradients_bf16',
    'pallas_kernels/attention/xla.py',
    'return dq + dqi, dk + dkj, dv + dvj',
    'sums = dq + dqi, dk + dkj, dv + dvj\n'
    '    return tuple(x.astype(qi.dtype).astype(x.dtype) for x in sums)',
    'the gradients of attention are summed in bfloat16',
    'tests/pallas_kernels/attention/test_kernels.py::'
    'test_bfloat16_is_no_worse_than_twice_a_dense_one[xla]',
  ),
  Mutation(
    'documents_not_skipped',
    'pallas_kernels/attention/xla.py',
    "skips = 'loop' if on_cpu and here and len(pairs) > 1 else ''",
    "skips = ''",
    'packed documents cost as much as one',
    'tests/pallas_kernels/attention/test_op.py::'
    'test_documents_that_a_row_packs_are_computed_apart',
  ),
  Mutation(
    'selective_tpu_reset',
    'pallas_kernels/scans/selective_tpu.py',
    'return jnp.where(keep, g * decay, 0.0)',
    'return g * decay',
    "on a TPU the gradient of Mamba's state crosses documents",
    'tests/pallas_kernels/scans/test_selective.py::'
    'test_kernels_equal_the_loop[37-3-4-tpu]',
  ),
  Mutation(
    'selective_gpu_group',
    'pallas_kernels/scans/selective_gpu.py',
    'k = groups - 1 - k',
    'k = groups - 1 - k if CHUNK < 0 else k',
    'on a GPU groups of a chunk are taken in order in the backward pass',
    'tests/pallas_kernels/scans/test_selective.py::'
    'test_kernels_equal_the_loop[37-3-4-gpu]',
  ),
  Mutation(
    'selective_gpu_segment',
    'pallas_kernels/scans/selective_gpu.py',
    'kept & token.keep',
    'kept',
    'on a GPU what enters a segment passes a reset in it',
    'tests/pallas_kernels/scans/test_selective.py::'
    'test_segments_equal_the_loop',
  ),
  Mutation(
    'grouped_gpu_table',
    'pallas_kernels/matmul/grouped_gpu.py',
    "side='right', method='compare_all'",
    "side='left', method='compare_all'",
    'on a GPU the first tile of a run has the matrix of the run before',
    'tests/pallas_kernels/matmul/test_grouped.py::'
    'test_the_gpu_kernel_equals_a_loop',
  ),
  Mutation(
    'int4_gpu_halves',
    'pallas_kernels/matmul/quantized_gpu.py',
    'pl.ds((2 * g + high) * half, half)',
    'pl.ds((2 * g + 1 - high) * half, half)',
    'on a GPU the halves of a group are swapped',
    'tests/pallas_kernels/matmul/test_quantized.py::'
    'test_the_kernel_for_gpus_equals_the_loop',
  ),
  Mutation(
    'int4_gpu_ptx',
    'pallas_kernels/matmul/quantized_gpu.py',
    'prmt.b32 $1, n, c, 0x4342;',
    'prmt.b32 $1, n, c, 0x4341;',
    'on a GPU one weight of eight is that of its neighbour',
    'tests/pallas_kernels/matmul/test_quantized.py::'
    'test_the_ptx_makes_bfloat16_of_four_bytes',
  ),
  Mutation(
    'int4_gpu_shares',
    'pallas_kernels/matmul/quantized_gpu.py',
    'jnp.minimum((share + 1) * each, groups)',
    '(share + 1) * each',
    'on a GPU the last share of an int4 product reads beyond the inputs',
    'tests/pallas_kernels/matmul/test_quantized.py::'
    'test_the_kernel_for_gpus_equals_the_loop',
  ),
  Mutation(
    'decode_gpu_own',
    'pallas_kernels/decode_attention/gpu.py',
    'seen = seen[b] > 0',
    'seen = seen[b] >= 0',
    'on a GPU a query sees its own key though it is said not to',
    'tests/pallas_kernels/decode_attention/test_kernels.py::'
    'test_a_query_also_sees_its_own_key',
  ),
  Mutation(
    'delta_batched_reverse',
    'pallas_kernels/scans/delta_batched.py',
    'd_state += kept * d_after -',
    'd_state += kept * d_after +',
    'gradients pass through batched chunks with the sign of a correction wrong',
    'tests/pallas_kernels/scans/test_delta.py::'
    'test_batched_chunks_equal_the_loop',
  ),
  Mutation(
    'slot_write_tile',
    'pallas_kernels/decode_attention/slot_write_tpu.py',
    'place[i] % slots) & (keep[i] > 0)',
    'place[i] % slots)',
    'on a TPU tokens are written that are not kept',
    'tests/pallas_kernels/decode_attention/test_slot_write.py::'
    'test_tokens_are_at_their_places_and_nothing_else_changes',
  ),
]
