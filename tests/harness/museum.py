"""The bug museum: published bugs of reinforcement learning for language models, and their guards.

An exhibit consists of a published bug, the test that guards against it, whose name says what holds
instead, and the edit of a source file that introduces the bug. test_museum.py applies each edit to
a copy of the project and checks that the test fails.
"""

import dataclasses

MUTATION = "a seeded mutation of this project that its tests once did not catch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One bug.

    Attributes:
      name: the name of the bug, an identifier.
      source: where it was published: an issue or pull request (without the owner if only one such
        library exists), a paper, or a version in which it was reproduced.
      test: pytest id of the test that guards it.
      where: the end of the dotted name of the definition that the bug is put in: a function, class
        or variable.
      old: an expression or statements that occur exactly once in it, compared by syntax.
      new: what replaces them.
    """

    name: str
    source: str = MUTATION
    test: str
    where: str
    old: str
    new: str


TEST_GENERATE = "tests/sampler/test_generate.py"
TEST_SAMPLING = "tests/sampler/test_sampling.py"
TEST_PACKING = "tests/training/test_packing.py"
TEST_PROPERTIES = "tests/kernels/test_properties.py"
TEST_PROMPTS = "tests/data/test_tokenize_prompts.py"
TEST_CHATS = "tests/data/test_chat_templates.py"
TEST_FUNCTIONS = "tests/rewards/test_reward_functions.py"
TEST_RULES = "tests/rewards/test_number_rules.py"
TEST_METRICS = "tests/reporting/test_sinks.py"
TEST_CHECKPOINT = "tests/training/test_checkpoint.py"
TEST_MASKED = "tests/kernels/test_masked_statistics.py"
TEST_LOGPROBS = "tests/kernels/test_logprobs.py"
TEST_STAGES = "tests/runtime/parallelism/test_pipeline.py"
TEST_UPDATE = "tests/ppo/test_update.py"
TEST_EXPERIENCE = "tests/ppo/test_experience.py"
TEST_OBJECTIVES = "tests/ppo/test_objectives.py"
TEST_ROUTER_REPLAY = "tests/ppo/test_router_replay.py"
TEST_OPTIMIZER = "tests/training/test_optimizer.py"
TEST_ROPE = "tests/models/test_rope.py"
TEST_EVALUATION = "tests/run/test_evaluation.py"
TEST_MASKED_LOSSES = "tests/ppo/test_masked_losses.py"
TEST_PARTS = "tests/run/test_parts.py"
TEST_HF_LOGITS = "tests/models/hf/test_hf_logits.py"

EXHIBITS = [
    # The end of a response.
    Exhibit(
        name="the_sampler_strips_the_eos",
        source="tunix 0.1.7: the EOS is stripped, so no gradient reaches the decision to stop",
        test=f"{TEST_GENERATE}::test_eos_is_kept_and_nothing_comes_after_it",
        where="record_draws",
        old="state.lengths.at[written_B].set(drawn_B, mode='drop')",
        new=(
            "state.lengths.at[written_B].set(drawn_B - finishes_responses(job.options, "
            "draws.tokens, stop_B), mode='drop')"
        ),
    ),
    Exhibit(
        name="the_loss_mask_excludes_the_eos",
        source="tunix 0.1.7, trl#1623, verl#535: mask = (ids != pad) with pad = EOS",
        test=f"{TEST_PACKING}::test_gather_by_hand",
        where="gather_rows",
        old="sequences.lengths[samples]",
        new="sequences.lengths[samples] - 1",
    ),
    Exhibit(
        name="lengths_are_counted_from_pad_ids",
        source="trl#5303, trl#1482: if pad is the EOS, `ids != pad` takes real tokens for padding",
        test=f"{TEST_GENERATE}::test_pad_may_be_eos",
        where="pad_queue",
        old="jnp.pad(prompts.lengths, (0, missing), constant_values=1)",
        new=(
            "jnp.pad((prompts.tokens != (*options.eos_ids, -1)[0]).sum(-1), (0, missing), "
            "constant_values=1)"
        ),
    ),
    Exhibit(
        name="a_response_without_an_eos_is_not_flagged",
        source="verl#3805: without an EOS the mask continued over the padding",
        test=f"{TEST_GENERATE}::test_eos_is_kept_and_nothing_comes_after_it",
        where="generate_responses",
        old="~state.finished",
        new="jnp.zeros_like(state.finished)",
    ),
    Exhibit(
        name="a_second_eos_counts_as_truncation",
        source="trl#7039: another EOS of generation_config.json counted as truncation",
        test=f"{TEST_GENERATE}::test_eos_is_kept_and_nothing_comes_after_it",
        where="decode_step",
        old="state.finished.at[slots.sample].set(finishes_B, mode='drop')",
        new=(
            "state.finished.at[slots.sample].set(tokens_B == (*options.eos_ids, -1)[0], "
            "mode='drop')"
        ),
    ),
    Exhibit(
        name="only_the_first_of_several_eos_ends_a_response",
        source="vllm#4180, textgen#5885: Llama 3 continues after <|eot_id|>",
        test=f"{TEST_GENERATE}::test_eos_is_kept_and_nothing_comes_after_it",
        where="finishes_responses",
        old="options.eos_ids",
        new="options.eos_ids[:1]",
    ),
    Exhibit(
        name="eos_ids_in_generation_config_are_not_read",
        source="vllm#4182: Llama 3 lists its second EOS only in generation_config.json",
        test=f"{TEST_HF_LOGITS}::test_every_end_of_sequence_is_known_the_configs_first",
        where="read_architecture",
        old="reader.token_ids('eos_token_id')",
        new="()",
    ),
    Exhibit(
        name="sampling_continues_after_the_eos",
        source="trl#2387: PPOTrainer samples every response to the maximum length",
        test=f"{TEST_GENERATE}::test_the_loop_ends_with_the_last_row",
        where="decode_step",
        old="finishes_B | (state.slots.drawn == job.limit_of(sample_B))",
        new="state.slots.drawn == job.limit_of(sample_B)",
    ),
    Exhibit(
        name="changed_eos_ids_do_not_retrace",
        source="tunix 0.1.7: other EOS ids run the program compiled for the previous ones",
        test=f"{TEST_GENERATE}::test_options_are_the_identity_of_a_program",
        where="SamplingOptions",
        old="eos_ids: tuple[int, ...] = ()",
        new="eos_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)",
    ),
    # Sampling and its cache.
    Exhibit(
        name="sampler_log_probs_at_another_temperature",
        source="trl#4159, vime#64: vLLM's log-probs were of undivided logits",
        test=f"{TEST_GENERATE}::test_logprobs_are_those_of_a_full_forward_pass",
        where="sample_tokens",
        old="_token_logprobs(logits_BxV, tokens_B, filters, shards, known)",
        new="_token_logprobs(logits_BxV * 0.7, tokens_B, filters, shards)",
    ),
    Exhibit(
        name="log_probs_instead_of_logits_divided_by_the_temperature",
        source="prime-rl#697: `logprobs /= temperature`",
        test=f"{TEST_GENERATE}::test_logprobs_are_those_of_a_full_forward_pass",
        where="sample_tokens",
        old="_token_logprobs(logits_BxV, tokens_B, filters, shards, known)",
        new="_token_logprobs(logits_BxV * 0.7, tokens_B, filters, shards) / 0.7",
    ),
    Exhibit(
        name="top_p_renormalizes_only_the_samplers_log_probs",
        source="trl#6789, verl#6240, vime#69: only the sampler's log-probs are after the filters",
        test=f"{TEST_SAMPLING}::test_log_prob_is_from_before_the_filters",
        where="_draw_filtered",
        old="shards.sum(weights_BxV.sum(-1))",
        new="filters.keep(logits_BxV, weights_BxV, weights_BxV.sum(-1), shards).weights.sum(-1)",
    ),
    Exhibit(
        name="top_p_drops_the_token_that_crosses_it",
        source="rasbt/reasoning-from-scratch#164, Biohub/esm#360: `cumsum <= p` keeps less than p",
        test=f"{TEST_SAMPLING}::test_top_p_by_hand",
        where="_keep_heaviest",
        old="bits_BxM >= least_B[:, None]",
        new="bits_BxM > least_B[:, None]",
    ),
    Exhibit(
        name="top_p_before_top_k",
        source="mlx-lm#388: the filters' order matters, and top_p took the remaining sum as 1",
        test=f"{TEST_SAMPLING}::test_draws_follow_the_filtered_distribution",
        where="Filters.keep",
        old="shards.sum(top_BxM.sum(-1))",
        new="sums_B",
    ),
    Exhibit(
        name="a_token_of_probability_zero_is_drawn",
        source="pytorch#4858, transformers#23088: multinomial where its cumulative sum rounds",
        test=f"{TEST_SAMPLING}::test_running_sums_that_round_never_pick_weight_0",
        where="invert_cdf",
        old="(sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]) & (weights_BxN > 0)",
        new="sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]",
    ),
    Exhibit(
        name="one_key_for_all_samples",
        source="tunix 0.1.7: a constant sampling key, so all responses to a prompt are the same",
        test=f"{TEST_GENERATE}::test_samples_depend_on_key_and_index",
        where="sample_keys",
        old="jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples_B)",
        new="jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, 0 * samples_B)",
    ),
    Exhibit(
        name="every_replica_draws_the_same_samples",
        source="verl#5179, vllm#11953, Megatron-LM#5983: all replicas started from one seed",
        test="tests/sampler/test_sharded.py::test_eight_devices_draw_the_samples_of_one",
        where="generate_responses",
        old="sampling.sample_keys(key, indices_N)",
        new="sampling.sample_keys(key, jnp.arange(len(indices_N)))",
    ),
    Exhibit(
        name="positions_count_the_padding",
        source="OpenRLHF#217, trlx#509: rotary positions started at the padded width",
        test=f"{TEST_GENERATE}::test_one_program_a_bucket_and_the_same_samples_from_each",
        where="decode_step",
        old="job.prompts.lengths[sample_B // job.options.n]",
        new="job.prompts.tokens.shape[1]",
    ),
    Exhibit(
        name="one_position_for_the_whole_batch",
        source="unsloth#3795, unsloth#3803: one position for all rows of a left-padded batch",
        test=f"{TEST_GENERATE}::test_logprobs_are_those_of_a_full_forward_pass",
        where="decode_step",
        old="jnp.where(busy_slots(job, state), prompt_lengths_B + slots.drawn - 1, 0)",
        new="jnp.broadcast_to((prompt_lengths_B + slots.drawn - 1).max(), prompt_lengths_B.shape)",
    ),
    Exhibit(
        name="a_slot_keeps_the_position_of_the_previous_sample",
        source="tt-inference-server#4557: a new request did not reset its slot's position",
        test="tests/sampler/test_slots.py::test_refilled_slots_draw_the_samples_of_a_static_batch",
        where="fill_slots",
        old="put(slots.drawn, job.start_of(sample_g))",
        # Without the bound no loop would end.
        new="jnp.minimum(slots.drawn, job.options.max_response_length - 1)",
    ),
    Exhibit(
        name="the_cache_is_indexed_by_batch_row",
        source="sparkinfer#289: every sequence was decoded with the cache of slot 0",
        test="tests/sampler/test_slots.py::test_refilled_slots_draw_the_samples_of_a_static_batch",
        where="fill_slots",
        old="prompt_g - (state.prefilled - job.group)",
        new="jnp.zeros_like(prompt_g)",
    ),
    Exhibit(
        name="responses_are_paired_with_the_wrong_prompts",
        source="R1-V#67, VLM-R1#129, trl#3098: P1 P2 P1 P2 on one side, P1 P1 P2 P2 on the other",
        test=f"{TEST_GENERATE}::test_the_contract",
        where="generate_responses",
        old="jnp.repeat(x, options.n, axis=0)",
        new="jnp.concatenate([x] * options.n)",
    ),
    Exhibit(
        name="a_row_reads_the_cache_up_to_the_longest_row",
        source="exllamav2#200, mlx-lm#1736: the cache behind shorter prompts changes results",
        test=f"{TEST_GENERATE}::test_logprobs_are_those_of_a_full_forward_pass",
        where="readable_columns",
        old="columns_B[:, None]",
        new="jnp.broadcast_to(columns_B.max(), columns_B.shape)[:, None]",
    ),
    # Models.
    Exhibit(
        name="the_gradient_of_a_norm_of_zeros_is_nan",
        source="maxtext#5295, tunix#2310: Qwen3.5's keys of padding have length 0",
        test="tests/models/test_recurrent_layers.py"
        "::test_padding_whose_embedding_is_zero_leaves_every_gradient_finite",
        where="DeltaNet._heads",
        old="x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + EPSILON)",
        new="x / (jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)) + EPSILON)",
    ),
    Exhibit(
        name="a_state_continues_into_the_next_sample_of_a_row",
        source="miles#1578: recurrent layers carried their state across packed samples",
        test="tests/kernels/test_delta_rule.py::test_segments_do_not_see_each_other",
        where="_decay_factors",
        old="segments_NxBx1xC[..., None] == segments_NxBx1xC[..., None, :]",
        new="segments_NxBx1xC[..., None] == segments_NxBx1xC[..., None]",
    ),
    Exhibit(
        name="a_convolution_reads_the_sample_before_it",
        source="maxtext#5295, miles#1578: a convolution read padding, or the sample before",
        test="tests/models/test_recurrent_layers.py::test_a_convolution_by_hand",
        where="recurrent_layers.convolve",
        old="jnp.where((segments == segments_BxT)[..., None], earlier, 0)",
        new="earlier",
    ),
    Exhibit(
        name="packed_samples_see_each_other",
        source="trl#784, trl#3526: packing without an attention mask between the samples of a row",
        test="tests/models/test_decoder.py::test_packed_sequences_do_not_see_each_other",
        where="visible_keys",
        old="visible &= query_segments[:, :, None] == key_segments[:, None]",
        new="visible = jnp.broadcast_to(visible, (len(query_segments), *visible.shape[1:]))",
    ),
    Exhibit(
        name="context_parallel_attention_ignores_the_samples_of_a_row",
        source="trl#6843, axolotl#3608: packed samples attend to all earlier ones of the row",
        test="tests/models/test_attention_over_parts.py"
        "::test_parts_of_rows_attend_to_their_samples_in_the_whole_row",
        where="_attend_in_blocks",
        old="part.segments[:, queries]",
        new="None",
    ),
    Exhibit(
        name="positions_continue_through_a_packed_row",
        source="OpenRLHF#377: packed rows with positions 0 ... 8 instead of 0 ... 4, 0 ... 3",
        test=f"{TEST_PROPERTIES}::test_a_packing_puts_every_token_in_one_place",
        where="pack_samples",
        old="np.arange(lengths_B[b])",
        new="np.arange(start, end)",
    ),
    Exhibit(
        name="key_heads_are_tiled_not_repeated",
        source="onnx#7274, axlearn#842: query heads read key heads 0 1 0 1, not 0 0 1 1",
        test="tests/models/test_attention.py::test_xla_is_the_definition",
        where="attend_block_of_queries",
        old=(
            "(q_BxQxHxd * (d ** (-0.5) if scale is None else scale)).reshape(B, Q, K, -1, "
            "d).transpose(0, 2, 3, 1, 4)"
        ),
        new=(
            "(q_BxQxHxd * (d ** (-0.5) if scale is None else scale)).reshape(B, Q, -1, K, "
            "d).transpose(0, 3, 2, 1, 4)"
        ),
    ),
    Exhibit(
        name="fused_projections_of_heads_are_read_as_thirds",
        source="lablup/mlxcel#928: a three-way split, as of GPT-2's, of Pythia's query_key_value",
        test="tests/models/test_families.py::test_logits_logprobs_and_gradients[gpt_neox]",
        where="_DecoderTable.add_attention",
        old="a.num_heads if self.family.fused_by_head else 1",
        new="1",
    ),
    Exhibit(
        name="key_heads_are_tiled_when_decoding",
        source="axlearn#842: the cached path mapped heads differently from the whole-sequence path",
        test="tests/models/test_cache.py::test_it_is_that_of_the_last_token",
        where="cache_logits",
        old="(q_Bx1xHxd * (d ** (-0.5) if scale is None else scale)).reshape(B, K, -1, d)",
        new=(
            "(q_Bx1xHxd * (d ** (-0.5) if scale is None else scale)).reshape(B, -1, K, "
            "d).swapaxes(1, 2)"
        ),
    ),
    Exhibit(
        name="llama3_frequencies_are_read_and_not_used",
        source="mlxcel#1355, felafax#59: rope_scaling was parsed and not used",
        test=f"{TEST_ROPE}::test_frequencies_and_logits_are_those_of_transformers[llama3]",
        where="inverse_frequencies",
        old="_llama3(inverse, scaling)",
        new="inverse",
    ),
    Exhibit(
        name="the_other_spelling_of_rope_type_is_ignored",
        source="mlxcel#1355: the reader expected `type`, but the file had `rope_type`",
        test=f"{TEST_ROPE}::test_transformers_4_spellings",
        where="_OneRope._read_kind",
        old="entries.string('rope_type', older)",
        new="entries.string('rope_type', 'default')",
    ),
    Exhibit(
        name="rotary_angles_in_bfloat16",
        source="transformers#29285, modded-nanogpt#39: cos and sin rounded to 8 bits",
        test=f"{TEST_ROPE}::test_a_pair_is_turned_by_its_angle",
        where="rotation_tables",
        old="table * factors.astype(np.float32)",
        new="(table * factors.astype(np.float32)).astype(jnp.bfloat16)",
    ),
    Exhibit(
        name="the_norm_rounds_after_its_scale",
        source="TransformerEngine#1132, transformers#33133: other results in bfloat16",
        test=f"{TEST_HF_LOGITS}::test_the_norm_rounds_where_transformers_does",
        where="RMSNorm.__call__",
        old="scale * wide.astype(x.dtype)",
        new="(scale.astype(jnp.float32) * wide).astype(x.dtype)",
    ),
    Exhibit(
        name="head_dim_is_computed_and_not_read",
        source="lmdeploy#2761, candle#2358: head_dim of Mistral Nemo is not hidden_size / heads",
        test=f"{TEST_HF_LOGITS}::test_logits_are_those_of_transformers[llama, wide heads]",
        where="_read_head_dim",
        old="head_dim is None",
        new="True",
    ),
    Exhibit(
        name="logits_in_bfloat16",
        source="Megatron-LM#7182: sampling and log_softmax in the dtype of the logits",
        test="tests/models/test_decoder.py::test_heads",
        where="compute_logits",
        old="jnp.einsum('...d,vd->...v', hidden, weight, preferred_element_type=jnp.float32)",
        new="jnp.einsum('...d,vd->...v', hidden, weight)",
    ),
    Exhibit(
        name="an_untied_head_is_tied",
        source="transformers#42612: lm_head.weight was overwritten by the input embedding",
        test="tests/models/test_decoder.py::test_heads",
        where="output_embedding",
        old="params.get('lm_head', params['embed'])",
        new="params['embed']",
    ),
    Exhibit(
        name="the_value_head_does_not_start_at_zero",
        source="verl's quickstart log: first values from -14 to 9.5, a value loss of 15",
        test="tests/models/test_decoder.py::test_heads",
        where="init_params",
        old="jnp.zeros((architecture.hidden_size, 1), jnp.float32)",
        new="jax.random.normal(key_head, (architecture.hidden_size, 1), jnp.float32)",
    ),
    Exhibit(
        name="weights_of_another_shape_are_ignored",
        source="bumblebee#364: parameters of a mismatched shape were ignored",
        test="tests/models/hf/test_hf_errors.py::test_another_shape",
        where="validate_tensors",
        old="checkpoint.shape(name) != row.hf_shape",
        new="False",
    ),
    # Export.
    Exhibit(
        name="scanned_layers_reach_the_engine_in_another_order",
        source="maxtext#4404: layers were unstacked wrongly, and the engine wrote random text",
        test="tests/sampler/engines/test_hugging_face.py"
        "::test_it_draws_the_tokens_of_the_built_in_engine[plain]",
        where="_in_order",
        old="(layer,)",
        new="(row.layers - 1 - layer,)",
    ),
    Exhibit(
        name="the_exports_vocabulary_is_padded",
        source="maxtext#2914, maxtext#3003: a padded vocabulary no longer fitted the model",
        test="tests/models/test_families.py::test_exported_it_is_the_same_model[llama]",
        where="to_hf_config",
        old="a.vocab_size",
        new="-(-a.vocab_size // 128) * 128",
    ),
    Exhibit(
        name="a_checkpoint_without_hugging_face_weights",
        source="verl#770: no Hugging Face weights in a checkpoint",
        test="tests/models/hf/test_save.py::test_there_and_back",
        where="export_checkpoint",
        old="write_weights(Path(folder), rows, arrays, dtype)",
        new="write_weights(Path(folder).parent, rows, arrays, dtype)",
    ),
    Exhibit(
        name="an_untied_model_is_exported_as_tied",
        source="Automodel#2571, LLaVA-NeXT#315: config.json and weights disagree on the head",
        test="tests/models/hf/test_save.py::test_there_and_back",
        where="to_hf_config",
        old="a.tied",
        new="True",
    ),
    Exhibit(
        name="a_transposed_tensor_is_written_in_memory_order",
        source="safetensors#825: Fortran-ordered arrays are read back as garbage",
        test="tests/models/hf/test_hf_errors.py::test_written_files_are_as_the_arrays_look",
        where="write_safetensors",
        old="np.ascontiguousarray(array).view(np.uint8).data",
        new="array.tobytes('A')",
    ),
    Exhibit(
        name="eos_ids_are_lost_on_export",
        source="unsloth#384: the saved model had one of two EOS ids and generated endlessly",
        test=(
            "tests/models/hf/test_save.py::test_generation_defaults_come_along_but_the_ends_are_the_architectures"
        ),
        where="_write_description",
        old="list(architecture.eos_ids) or None",
        new="architecture.eos_ids[0]",
    ),
    # Data.
    Exhibit(
        name="truncation_is_read_and_never_applied",
        source="verl: data.truncation has no effect",
        test=f"{TEST_PROMPTS}::test_truncation_is_applied",
        where="encode_prompts",
        old="ids = _truncate(ids, limit, encoding.truncation, location)",
        new="ids = (_truncate(ids, limit, encoding.truncation, location), ids)[1]",
    ),
    Exhibit(
        name="truncation_error_raises_no_error",
        source="verl: data.truncation has no effect, not even `error`",
        test=f"{TEST_PROMPTS}::test_truncation_error_names_row_length_and_option",
        where="_truncate",
        old='truncation == "right"',
        new='truncation in ("right", "error")',
    ),
    Exhibit(
        name="the_position_in_the_data_is_lost_on_resume",
        source="verl#7013, tunix#2288, tunix#2290: resumed from the first batch",
        test=f"{TEST_PROMPTS}::test_a_saved_position_goes_on_identically",
        where="PromptBatches.__init__",
        old="self.position = position",
        new="self.position = 0",
    ),
    Exhibit(
        name="a_resumed_epoch_is_shuffled_like_the_first",
        source="accelerate#2823, accelerate#4071, ms-swift#10050: the epoch number was lost",
        test=f"{TEST_PROMPTS}::test_a_saved_position_goes_on_identically",
        where="PromptBatches._epoch_order",
        old="self._ordered_epoch != epoch",
        new="self._ordered_epoch < 0",
    ),
    Exhibit(
        name="every_epoch_has_the_same_order",
        source="lm-human-preference-details (JAX): one shuffle key for every update",
        test=f"{TEST_PROMPTS}::test_an_epoch_gives_each_row_once_in_a_fresh_order",
        where="PromptBatches._epoch_order",
        old="[self.seed, epoch]",
        new="[self.seed]",
    ),
    Exhibit(
        name="a_resumed_run_ends_with_its_epoch",
        source="verl#5725: a resumed run ended silently at the end of the epoch",
        test=f"{TEST_PROMPTS}::test_a_saved_position_goes_on_identically",
        where="PromptBatches.__next__",
        old="epoch = self.epoch",
        new="epoch = self.epoch\nif epoch and self._ordered_epoch < 0:\n    raise StopIteration",
    ),
    Exhibit(
        name="a_batch_larger_than_the_data",
        source="pytorch-a2c-ppo-acktr-gail#192, vamb#425: drop_last silently leaves no batch",
        test=f"{TEST_PROMPTS}::test_fewer_rows_than_a_batch_are_refused",
        where="PromptBatches.__init__",
        old="1 <= batch_size <= len(dataset)",
        new="1 <= batch_size",
    ),
    Exhibit(
        name="evaluation_drops_its_last_batch",
        source="Autoformer#104, PatchTST#129, NeMo-RL#1029: drop_last in validation",
        test=f"{TEST_PROMPTS}::test_evaluation_counts_each_row_once",
        where="evaluation_batches",
        old="range(0, len(dataset), batch_size)",
        new="range(0, max(len(dataset) - batch_size + 1, 1), batch_size)",
    ),
    Exhibit(
        name="rows_that_pad_the_last_batch_are_counted",
        source="composer#2218, pytorch/examples#1063: metrics count repeated rows twice",
        test=f"{TEST_EVALUATION}::test_rows_that_fill_the_last_batch_are_not_counted",
        where="evaluate_batches",
        old="n * batch.count",
        new="len(batch_scores)",
    ),
    Exhibit(
        name="two_bos",
        source="open-r1#462, trl#1114, alignment-handbook#127: special tokens around a template",
        test=f"{TEST_CHATS}::test_a_chat_template_writes_bos_once",
        where="render_prompt",
        old="return (text, False)",
        new="return (text, True)",
    ),
    Exhibit(
        name="no_bos",
        source="unsloth#10312: base models of Gemma without the BOS that they were trained with",
        test=f"{TEST_CHATS}::test_a_prompt_has_the_tokenizers_bos_but_no_eos",
        where="encode_text",
        old="tokenizer.encode(text, add_special_tokens=special, verbose=False)",
        new="tokenizer.encode(text, add_special_tokens=False, verbose=False)",
    ),
    Exhibit(
        name="an_eos_after_the_prompt",
        source="vllm#7491, trlx#287: add_eos_token ends the prompt, and the response is empty",
        test=f"{TEST_CHATS}::test_a_prompt_has_the_tokenizers_bos_but_no_eos",
        where="encode_text",
        old="if not text_ends_in_eos:\n    ids.pop()",
        new="if not text_ends_in_eos:\n    pass",
    ),
    Exhibit(
        name="a_chat_prompt_without_the_assistants_turn",
        source="llama_index#15239: apply_chat_template without add_generation_prompt",
        test=f"{TEST_CHATS}::test_a_chat_template_writes_bos_once",
        where="render_prompt",
        old="{kind: True}",
        new="{kind: False}",
    ),
    Exhibit(
        name="a_begun_answer_is_closed",
        source="transformers' templates close every message without continue_final_message",
        test=f"{TEST_CHATS}::test_a_chat_that_ends_with_the_assistant_is_continued",
        where="render_prompt",
        old='"continue_final_message" if is_prefilled(prompt) else "add_generation_prompt"',
        new='"add_generation_prompt"',
    ),
    Exhibit(
        name="repository_code_is_executed",
        source="tinker-cookbook#333: trust_remote_code=True for all tokenizers (declined)",
        test="tests/data/test_tokenizer.py::test_code_of_a_repository_is_not_run",
        where="load_tokenizer",
        old="AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)",
        new="AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)",
    ),
    Exhibit(
        name="the_sign_of_a_gold_answer_is_lost",
        source="proeval#19: `#### -3` was read as 3",
        test="tests/data/test_sources.py::test_rows_of_gsm8ks_form",
        where="_read_answer",
        old="answer.rpartition('####')[2].strip()",
        new="answer.rpartition('####')[2].strip(' -')",
    ),
    # Rewards by rule.
    Exhibit(
        name="answers_in_other_formats_are_not_matched",
        source="verl's pattern: `####42`, `#### $42`, `#### **42**`, `#### 42.` score 0",
        test=f"{TEST_RULES}::test_rewards_differ_from_verls_only_as_listed",
        where="extract_gsm8k",
        old="last_number(tail)",
        new="last_number(tail.partition('#### ')[2])",
    ),
    Exhibit(
        name="the_flexible_method_is_unreachable",
        source="verl#7789: the option never reached the function",
        test=f"{TEST_RULES}::test_rewards_differ_from_verls_only_as_listed",
        where="score_gsm8k",
        old="extract_gsm8k(text, method)",
        new="extract_gsm8k(text, 'strict')",
    ),
    Exhibit(
        name="a_comma_is_taken_for_the_answer",
        source="helm#4337, omlx#3484: `72, in total` resulted in an empty answer",
        test=f"{TEST_RULES}::test_what_is_extracted",
        where="_INTEGER",
        old=(
            "'(?:\\\\d{1,3}(?:(?:,|\\\\{,\\\\}|,\\\\\\\\!)\\\\d{3})+(?!\\\\d)"
            "|\\\\d{1,2}(?:,\\\\d{2})+,\\\\d{3}(?!\\\\d)"
            "|\\\\d{1,3}(?:[ \\'\\\\u00a0\\\\u2009\\\\u202f]\\\\d{3})+(?![\\\\d-])|\\\\d+)'"
        ),
        new="'[\\\\d,]+'",
    ),
    Exhibit(
        name="the_sign_of_an_answer_is_lost",
        source="open-instruct#1530: a wrong sign was rewarded",
        test=f"{TEST_RULES}::test_what_is_extracted",
        where="_written",
        old="sign + _GROUPING.sub('', text)",
        new="_GROUPING.sub('', text)",
    ),
    Exhibit(
        name="numbers_are_compared_as_text",
        source="lm-evaluation-harness#3254: 29.00 against 29",
        test=f"{TEST_RULES}::test_all_notations_of_a_number_are_equal",
        where="score_gsm8k",
        old="number == parse_number(ground_truth)",
        new="answer == ground_truth",
    ),
    Exhibit(
        name="the_first_answer_counts",
        source="verifiers#1336, ai-agent-book#699: an intermediate `answer:` was taken",
        test=f"{TEST_RULES}::test_what_is_extracted",
        where="extract_gsm8k",
        old="leading_number(answers[-1])",
        new="leading_number(answers[0])",
    ),
    Exhibit(
        name="the_models_output_is_evaluated",
        source="CVE-2026-6878 (verl): a grader called eval on a response",
        test=f"{TEST_RULES}::test_nothing_that_a_model_wrote_is_evaluated",
        where="score_gsm8k",
        old="parse_number(answer)",
        new="eval(solution.rpartition('#### ')[2])",
    ),
    # Packed rows.
    Exhibit(
        name="log_probs_of_the_token_itself",
        source="trl#44, trlx#248, prime-rl#1525: logits and targets misaligned by one",
        test=f"{TEST_PACKING}::test_gather_by_hand",
        where="gather_rows",
        old="jnp.minimum(packing.position + 1, last)",
        new="packing.position",
    ),
    Exhibit(
        name="the_mask_is_off_by_one",
        source="trl#1781, trlx#509: the mask was applied to log-probs of one position earlier",
        test=f"{TEST_PACKING}::test_gather_by_hand",
        where="gather_rows",
        old="packing.position + 1 - sequences.prompt_lengths[samples]",
        new="packing.position - sequences.prompt_lengths[samples]",
    ),
    Exhibit(
        name="prompts_are_trained_on",
        source="trl#334: the loss ran over query and response",
        test=f"{TEST_PACKING}::test_gather_by_hand",
        where="gather_rows",
        old="filled & (steps >= 0)",
        new="filled",
    ),
    Exhibit(
        name="balancing_moves_samples_between_mini_batches",
        source="verl: balancing by length reorders samples across mini-batches",
        test=f"{TEST_PROPERTIES}::test_a_packing_puts_every_token_in_one_place",
        where="pack_samples",
        old="group[members]",
        new="members",
    ),
    Exhibit(
        name="rows_that_fill_no_micro_batch_are_dropped",
        source="open-instruct#1271: rows beyond a multiple of the workers were dropped",
        test=f"{TEST_PROPERTIES}::test_a_packing_puts_every_token_in_one_place",
        where="pack_samples",
        old="-(-len(rows) // R)",
        new="len(rows) // R",
    ),
    Exhibit(
        name="every_micro_batch_of_a_pipeline_gets_the_mask_of_the_first",
        source="pytorch/torchtitan#1723: the mask is not split; KempnerForge#204: no segments",
        test=f"{TEST_STAGES}::test_stages_change_no_hidden_state_and_no_gradient[four_stages]",
        where="run_stages",
        old="jnp.clip(t - stage, 0, M - 1)",
        new="0",
    ),
    # Masked reductions.
    Exhibit(
        name="padding_counts_in_the_mean_of_advantages",
        source="SkyRL#1305: masked variance about an unmasked mean",
        test=f"{TEST_MASKED}::test_whiten_by_hand",
        where="whiten",
        old="masked_mean(x, mask)",
        new="jnp.mean(x)",
    ),
    Exhibit(
        name="bessels_correction_divides_by_zero",
        source="tunix; stable-baselines3#270, DeepAnalyze#116: one element's deviation is NaN",
        test=f"{TEST_MASKED}::test_whitening_one_token_gives_zero",
        where="masked_variance",
        old="masked_mean(jnp.square(deviation), mask)",
        new="masked_sum(jnp.square(deviation), mask) / (jnp.sum(mask) - 1)",
    ),
    Exhibit(
        name="masked_positions_cause_nan_gradients",
        source="trl#6121, tunix#2310: `where` after the arithmetic: 0 * NaN in the gradient",
        test=f"{TEST_MASKED}::test_garbage_under_the_mask_reaches_neither_value_nor_gradient",
        where="zero_outside",
        old="jnp.where(mask.astype(bool), _at_least_float32(x), 0.0)",
        new="_at_least_float32(x) * mask",
    ),
    Exhibit(
        name="a_fully_masked_batch_results_in_nan",
        source="trl: all responses of a batch were truncated and masked out; grpo: 0 / 0",
        test=f"{TEST_MASKED}::test_empty_mask_gives_zero_and_no_gradient",
        where="masked_mean",
        old="jnp.maximum(count, 1)",
        new="count",
    ),
    Exhibit(
        name="a_mean_over_an_outer_product",
        source="RLinf#1564: [B] * [B, 1] made the entropy bonus B times too large",
        test=f"{TEST_MASKED}::test_shapes_that_would_broadcast_are_refused",
        where="zero_outside",
        old="assert_one_shape(x=x, mask=mask)",
        new="None",
    ),
    # Log-probs.
    Exhibit(
        name="a_scoring_pass_without_the_temperature",
        source="trl#3029, verl#6280, unsloth-zoo#832, tunix: one of the passes ran at T = 1",
        test=f"{TEST_LOGPROBS}::test_by_hand",
        where="_forward",
        old="logits / options.temperature",
        new="logits",
    ),
    Exhibit(
        name="the_gradient_omits_the_temperature",
        source="unsloth-zoo#832: for T != 1 the size of the policy gradient differed from TRL's",
        test=f"{TEST_LOGPROBS}::test_gradient_is_that_of_the_definition",
        where="_backward",
        old="slope / options.temperature",
        new="slope",
    ),
    Exhibit(
        name="negative_entropy",
        source="trl#6121: an entropy below 0",
        test=f"{TEST_LOGPROBS}::test_entropy_is_never_negative_nor_logprob_positive",
        where="_forward",
        old="jnp.maximum(entropy, 0)",
        new="top + jnp.log(total) - jnp.sum(jnp.exp(shifted) * z, axis=-1) / total",
    ),
    Exhibit(
        name="the_chunks_gradient_is_summed_in_bfloat16",
        source="Liger-Kernel#830, #512, #827: the head's gradient over chunks in bfloat16",
        test=f"{TEST_LOGPROBS}::test_gradient_of_the_master_is_summed_in_float32",
        where="hidden_and_weight_grad",
        old="weight_sum + weight_grad",
        new="(weight_sum + weight_grad).astype(hidden.dtype).astype(jnp.float32)",
    ),
    Exhibit(
        name="returned_log_probs_are_not_masked",
        source="SkyRL#1782, trl#7024: values under the padding reached the advantages",
        test=f"{TEST_PROPERTIES}::test_logprobs_entropy_and_full_kl",
        where="_forward",
        old="zero_outside(chunks.scatter(x), mask)",
        new="chunks.scatter(x)",
    ),
    # Scores and KL.
    Exhibit(
        name="the_score_is_one_past_the_last_token",
        source="trl#1893, trl#3750, trl#5338, DeepSpeedExamples#672: a reward after the EOS",
        test=f"{TEST_UPDATE}::test_score_sits_on_the_last_token_and_returns_are_raw",
        where="shape_rewards",
        old="last_actions(masks.actions)",
        new="jnp.roll(last_actions(masks.actions), 1, axis=1)",
    ),
    Exhibit(
        name="a_reward_model_is_read_at_the_padding",
        source="trl#2778, trl#6800, trl#937, reward-bench#154: read at the other side's pad",
        test=f"{TEST_UPDATE}::test_reward_model_scores_stand_on_the_last_token",
        where="score_positions",
        old="column < lengths[:, None]",
        new="column <= lengths[:, None]",
    ),
    Exhibit(
        name="a_gap_between_prompt_and_response",
        source="OpenRLHF#217, trlx#509: padding stood between prompt and scored response",
        test=f"{TEST_UPDATE}::test_joining_leaves_no_gap",
        where="join_sequences",
        old="column - prompts",
        new="column - rollout.prompts.tokens.shape[1]",
    ),
    Exhibit(
        name="the_missing_eos_penalty_replaces_the_score",
        source="trl#2012: PPO and RLOO replaced the score by the penalty, OnlineDPO subtracted it",
        test=f"{TEST_EXPERIENCE}::test_penalties_come_after_normalisation_and_clip",
        where="shape_scores",
        old="rewards_B - reward.missing_eos_penalty * truncated_B",
        new="jnp.where(truncated_B, -reward.missing_eos_penalty, rewards_B)",
    ),
    Exhibit(
        name="the_missing_eos_penalty_is_never_applied",
        source="trl#5338: it looked for an EOS where the stop token had been replaced by padding",
        test=f"{TEST_EXPERIENCE}::test_penalties_come_after_normalisation_and_clip",
        where="shape_scores",
        old="reward.missing_eos_penalty * truncated_B",
        new="reward.missing_eos_penalty * (lengths_B > options.max_response_length)",
    ),
    Exhibit(
        name="the_kl_is_averaged_over_padding",
        source="rlhf-book#216: approx_kl.mean() over padding, and the KL of padding in the returns",
        test=f"{TEST_EXPERIENCE}::test_the_whole_kl_is_taken_where_it_is_given",
        where="add_kl_penalty",
        old="masked_mean(kl_tokens, actions)",
        new="kl_tokens.mean()",
    ),
    Exhibit(
        name="the_kl_reported_is_not_the_kl_in_use",
        source="trl#1161, trl#1180: k1 was reported, whatever the estimator",
        test=f"{TEST_EXPERIENCE}::test_the_kl_is_estimated_as_asked",
        where="reward_shaping.reference_kl",
        old="algorithm.kl_penalty",
        new="'k1'",
    ),
    Exhibit(
        name="the_teacher_in_the_students_place",
        source="trl#3043, twinkle#112: GKD's two KL divergences were exchanged",
        test="tests/ppo/test_teacher.py::test_its_rewards_follow_the_reverse_kl",
        where="add_teacher_rewards",
        old="kl.kl_estimate(old_logprobs, outputs.teacher_logprobs, actions, kl.k1)",
        new="kl.kl_estimate(outputs.teacher_logprobs, old_logprobs, actions, kl.k1)",
    ),
    Exhibit(
        name="the_teachers_logits_are_those_of_another_token",
        source="ms-swift#8436: the logits of the teacher were not shifted against the labels",
        test="tests/ppo/test_teacher.py::"
        "test_its_logprobs_are_of_the_sampled_tokens_at_the_sampling_temperature",
        where="_compute_rows",
        old="forward.hidden_states(net, params, rows)",
        new="jnp.roll(forward.hidden_states(net, params, rows), 1, axis=1)",
    ),
    Exhibit(
        name="the_reference_at_another_temperature",
        source="tunix at T = 0.9: log-probs at T = 1, the reference's at T: a KL to itself",
        test=f"{TEST_UPDATE}::test_first_mini_batch_has_ratio_one_and_kl_zero",
        where="_compute_rows",
        old="logprobs(ref_net, reference, ref_hidden)",
        new="forward.target_logprobs(ref_net, reference, ref_hidden, rows, 1.0)",
    ),
    Exhibit(
        name="the_controller_always_adapts",
        source="trl#18: adap_kl_ctrl was read and not used",
        test=f"{TEST_EXPERIENCE}::test_the_coefficient_of_the_next_step",
        where="next_control",
        old="KL_CONTROLLERS[options.type]",
        new="KL_CONTROLLERS['adaptive']",
    ),
    Exhibit(
        name="the_kl_target_in_other_units",
        source="OpenAI's target of 6 is a sum over a response, verl's of 0.1 is a mean per token",
        test=f"{TEST_EXPERIENCE}::test_the_coefficient_of_the_next_step",
        where="next_control",
        old="options.target_unit == 'token'",
        new="options.target_unit != 'token'",
    ),
    Exhibit(
        name="the_one_sided_clamp_described_backwards",
        source="CS336's notes: clamp(log p - log ref, min=0) penalizes MORE likely tokens",
        test="tests/kernels/test_kl.py::test_clamped_holds_back_only_tokens_made_more_likely",
        where="clamped",
        old="return jax.nn.relu(log_ratio)",
        new="return jax.nn.relu(-log_ratio)",
    ),
    Exhibit(
        name="k3_in_the_loss_has_another_kls_gradient",
        source="arXiv 2510.01555, arXiv 2512.21852: an unbiased estimate is not an unbiased loss",
        test="tests/kernels/test_kl.py::test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2",
        where="k3_plus",
        old="jax.lax.stop_gradient(k3(log_ratio)) + (square - jax.lax.stop_gradient(square))",
        new="k3(log_ratio)",
    ),
    Exhibit(
        name="k3_overflows",
        source="verl clamps low_var_kl at +-20 for this reason; trl#7120",
        test="tests/kernels/test_kl.py::test_k3_of_a_huge_log_ratio_is_clamped_and_flat",
        where="k3",
        old="jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)",
        new="log_ratio",
    ),
    # Advantages.
    Exhibit(
        name="advantages_leak_in_from_after_the_end",
        source="stable-baselines#385, RoboVerse#814, rlevo#342, cleanrl#16: mask a step late",
        test=f"{TEST_PROPERTIES}::test_gae",
        where="gae",
        old="jnp.where(chosen, advantage, next_advantage)",
        new="advantage",
    ),
    Exhibit(
        name="padding_leaks_into_returns",
        source="ROLL#447, rlhf-book#216: values of masked tokens reached the real ones",
        test=f"{TEST_PROPERTIES}::test_gae",
        where="gae",
        old="zero_outside(values_T, mask_T)",
        new="jnp.asarray(values_T, jnp.float32)",
    ),
    Exhibit(
        name="rewards_are_shifted_by_one",
        source="spinningup#50: each reward was stored with the following step",
        test="tests/kernels/test_advantages.py::test_by_hand",
        where="gae",
        old="(rewards_T, values_T, gamma_T, mask_T.astype(bool))",
        new="(jnp.roll(rewards_T, 1), values_T, gamma_T, mask_T.astype(bool))",
    ),
    Exhibit(
        name="returns_without_advantages",
        source="cleanrl#337: returns were computed from a buffer of advantages that was still 0",
        test="tests/kernels/test_advantages.py::test_by_hand",
        where="gae",
        old="advantages_T + values_T",
        new="values_T",
    ),
    Exhibit(
        name="returns_from_whitened_advantages",
        source="the CS336 notes: the critic was trained on whitened advantages plus values",
        test=f"{TEST_UPDATE}::test_score_sits_on_the_last_token_and_returns_are_raw",
        where="generalized_advantages",
        old="advantages, returns = gae(actor_lams)",
        new=(
            "advantages, _ = gae(actor_lams)\nreturns = whiten(advantages, masks.actions) + values"
        ),
    ),
    Exhibit(
        name="whitening_over_part_of_a_batch",
        source="tunix: whitened within each service batch; miles#3229: within each slice",
        test=f"{TEST_UPDATE}::test_score_sits_on_the_last_token_and_returns_are_raw",
        where="estimate_advantages",
        old="whiten(estimates.advantages, masks.loss, size=estimates.size)",
        new="jax.vmap(whiten)(estimates.advantages, masks.loss)",
    ),
    Exhibit(
        name="finished_responses_are_bootstrapped",
        source="RoboVerse#814, rlevo#342: the value after an end rewarded ending",
        test=f"{TEST_EXPERIENCE}::test_only_a_truncated_response_is_bootstrapped",
        where="critic_values",
        old="sequences.truncated & bootstraps",
        new="bootstraps",
    ),
    Exhibit(
        name="groups_are_the_whole_batch",
        source="grpo-flat#2: mean and deviation over the batch, not over a prompt's responses",
        test="tests/kernels/test_advantages.py::test_groups_by_hand",
        where="group_mean_baseline",
        old="scores_B.astype(jnp.promote_types(scores_B.dtype, jnp.float32)).reshape(-1, n)",
        new="scores_B.astype(jnp.promote_types(scores_B.dtype, jnp.float32)).reshape(1, -1)",
    ),
    Exhibit(
        name="a_group_of_one",
        source="DeepAnalyze#116: with num_generations=1 deviation and loss are NaN",
        test="tests/kernels/test_advantages.py::test_what_is_no_group_is_refused",
        where="group_mean_baseline",
        old="n > 1 and scores_B.shape[0] % n == 0",
        new="scores_B.shape[0] % n == 0",
    ),
    # Losses and their ratio.
    Exhibit(
        name="the_first_ratio_is_not_1",
        source="verl#6280, trl#454, trl#3029: old and new log-probs came from different passes",
        test=f"{TEST_UPDATE}::test_first_mini_batch_has_ratio_one_and_kl_zero",
        where="_compute_rows",
        old="logprobs(net, actor, hidden, with_entropy=options.entropy)",
        new="forward.target_logprobs(net, actor, hidden, rows, 1, with_entropy=options.entropy)",
    ),
    Exhibit(
        name="the_ratio_is_always_1",
        source="torchforge#571: logprobs - logprobs.detach()",
        test=f"{TEST_UPDATE}::test_first_mini_batch_has_ratio_one_and_kl_zero",
        where="policy_loss_inputs",
        old="is_on_policy",
        new="True",
    ),
    Exhibit(
        name="old_policy_and_reference_are_mixed_up",
        source="the CS336 notes: the old policy's log-probs are named ref_logprobs",
        test=f"{TEST_OBJECTIVES}::test_the_ratio_is_to_the_old_policy_and_the_kl_to_the_reference",
        where="policy_loss_inputs",
        old="packing.to_rows(experience.old_logprobs, rows)",
        new="packing.to_rows(experience.ref_logprobs, rows)",
    ),
    Exhibit(
        name="the_clip_range_begins_at_epsilon",
        source="RL2#21: the ratio was clipped to [epsilon, 1 + epsilon]",
        test="tests/kernels/test_losses.py::test_policy_loss_by_hand",
        where="clipped_surrogate",
        old="1.0 - clip.low",
        new="clip.low",
    ),
    Exhibit(
        name="the_ratio_overflows",
        source="trl#7120: exp of a log-ratio in the hundreds",
        test=f"{TEST_PROPERTIES}::test_policy_losses",
        where="log_ratios_and_advantages",
        old="jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)",
        new="log_ratio",
    ),
    Exhibit(
        name="the_smaller_value_loss_is_taken",
        source="implementation-matters#1, baselines#765: the paper has min, the code max",
        test="tests/kernels/test_losses.py::test_value_loss_by_hand",
        where="value_loss",
        old="jnp.maximum(unclipped_loss, clipped_loss)",
        new="jnp.minimum(unclipped_loss, clipped_loss)",
    ),
    Exhibit(
        name="values_are_clipped_around_themselves",
        source="tensorflow/agents#352: old values were recomputed, and nothing was clipped",
        test=f"{TEST_OBJECTIVES}::test_the_value_loss_is_clipped_around_the_values_of_the_rollout",
        where="weighted_value_loss",
        old="packing.to_rows(experience.values, rows)",
        new="jax.lax.stop_gradient(values)",
    ),
    Exhibit(
        name="a_negative_kl_stops_nothing",
        source="stable-baselines3#417, spinningup#137: mean(old - new) may be negative",
        test=f"{TEST_OBJECTIVES}::test_the_approximate_kl_is_never_negative",
        where="policy_metrics",
        old="jnp.expm1(policy.log_ratio) - policy.log_ratio",
        new="-policy.log_ratio",
    ),
    Exhibit(
        name="masked_weights_miss_some_aggregations",
        source="arcee-ai/NeMo-RL#24: the loss per sequence ignored IcePop's mask",
        test=f"{TEST_MASKED_LOSSES}::test_packed_losses_equal_those_computed_token_by_token",
        where="ActorObjective.loss",
        old="jnp.sum(token_weights.loss * importance_RxL * policy.loss)",
        new="jnp.sum(token_weights.loss * policy.loss)",
    ),
    Exhibit(
        name="importance_weights_have_a_gradient",
        source="verl#4105, unsloth-zoo#343: weights for the sampler's mismatch were not detached",
        test="tests/kernels/test_importance.py::test_no_gradient_and_no_overflow",
        where="importance_weights",
        old="jax.lax.stop_gradient(zero_outside(weights, mask))",
        new="zero_outside(weights, mask)",
    ),
    Exhibit(
        name="the_bounds_of_a_ratio_are_applied_to_its_inverse",
        source="verl#6377: rollout_rs=token_k1 with 0.6_1.4 keeps ratio 1.5 and rejects 0.65",
        test="tests/kernels/test_importance.py::test_by_hand",
        where="importance_weights",
        old="(weights >= lower) & (weights <= upper)",
        new="(1 / weights >= lower) & (1 / weights <= upper)",
    ),
    # Updates.
    Exhibit(
        name="a_mean_of_micro_batch_means",
        source="verl#5625, Unsloth and transformers (October 2024), nanochat#59, prime-rl#2358",
        test=f"{TEST_UPDATE}::test_micro_batches_and_packing_do_not_change_the_gradient",
        where="RolloutObjective.token_weights",
        old="jnp.where(mask, weights.loss[rows.samples], 0)",
        new="mask / mask.sum()",
    ),
    Exhibit(
        name="a_mean_over_each_devices_tokens",
        source="prime-rl#2358, Arctic-Platform#119: each rank divided by its own token count",
        test=f"{TEST_UPDATE}::test_devices_do_not_change_the_gradient",
        where="RolloutObjective.token_weights",
        old="jnp.where(mask, weights.loss[rows.samples], 0)",
        new="mask / jnp.maximum(mask.sum(1, keepdims=True), 1) / len(mask)",
    ),
    Exhibit(
        name="tokens_are_selected_from_each_micro_batch",
        source="verl#7829: KL-Cov selected the largest covariances of each micro-batch",
        test="tests/ppo/test_update.py::test_a_loss_sees_the_tokens_of_the_whole_mini_batch",
        where="policy_loss_inputs",
        old="experience.action_mask & members_B[:, None]",
        new=(
            "experience.action_mask & jnp.zeros(len(experience.advantages), bool)"
            ".at[rows.samples].max(rows.segments >= 0)[:, None]"
        ),
    ),
    Exhibit(
        name="the_router_loss_counts_once_per_micro_batch",
        source="NVIDIA-NeMo/Automodel#3359: router losses without the accumulation's divisor",
        test="tests/ppo/test_router_loss.py::"
        "test_micro_batches_and_packing_do_not_change_the_routers_loss",
        where="RolloutObjective.token_weights",
        old="share_RxL * weights.sequence[rows.samples]",
        new="share_RxL / jnp.maximum(share_RxL.sum(), 1)",
    ),
    Exhibit(
        name="replayed_experts_are_those_of_the_next_token",
        source="NovaSky-AI/SkyRL#1908, vllm#37094: experts were cut to other tokens",
        test=f"{TEST_ROUTER_REPLAY}::test_the_record_is_what_one_pass_over_the_whole_sequence_selects",
        where="routing.record_tokens",
        old="record.sequences.at[sample_B, positions_B]",
        new="record.sequences.at[sample_B, positions_B + 1]",
    ),
    Exhibit(
        name="the_experts_of_prompts_are_not_replayed",
        source="THUDM/slime#1145, vllm#37094: the record began with the response",
        test=f"{TEST_ROUTER_REPLAY}::test_the_record_is_what_one_pass_over_the_whole_sequence_selects",
        where="routing.record_entries",
        old="return record._replace(sequences=sequences)",
        new="return record",
    ),
    Exhibit(
        name="replayed_experts_outside_the_top_k_weigh_nothing",
        source="ISEEKYAN/Megatron-LM#79: weights and gradients zero outside the new top k",
        test=f"{TEST_ROUTER_REPLAY}::test_the_gradient_of_replayed_experts_is_that_of_a_softmax_over_them",
        where="experts.select_experts",
        old="weights = jnp.take_along_axis(probabilities, experts, axis=-1)",
        new=(
            "weights = jnp.take_along_axis("
            "jnp.where(probabilities >= weights.min(-1, keepdims=True), probabilities, 0), "
            "experts, axis=-1)"
        ),
    ),
    Exhibit(
        name="the_entropy_bonus_grows_with_the_micro_batches",
        source="RLinf#1564, verl#4711: scaled by number or size of micro-batches",
        test=f"{TEST_UPDATE}::test_micro_batches_and_packing_do_not_change_the_gradient",
        where="ActorObjective.loss",
        old="jnp.sum(token_weights.loss * entropy_RxL)",
        new="jnp.mean(entropy_RxL)",
    ),
    Exhibit(
        name="the_value_loss_is_averaged_per_micro_batch",
        source="verl#5625, verl#7110: the actor's loss was fixed, the critic's was not",
        test=f"{TEST_UPDATE}::test_micro_batches_and_packing_do_not_change_the_gradient",
        where="weighted_value_loss",
        old="options.value_loss_coef * jnp.sum(weights.loss * value.loss)",
        new="options.value_loss_coef * jnp.sum(value.loss) / jnp.maximum(rows.mask.sum(), 1)",
    ),
    Exhibit(
        name="gradients_are_clipped_before_they_are_summed",
        source="transformers#1563, lingua#59: clip_grad_norm_ after every backward pass",
        test=f"{TEST_UPDATE}::test_micro_batches_and_packing_do_not_change_the_gradient",
        where="add_gradients",
        old="jax.tree.map(jnp.add, widen(gradient_sum), gradients)",
        new="jax.tree.map(lambda t, g: t + jnp.clip(g, -0.001, 0.001), gradient_sum, gradients)",
    ),
    Exhibit(
        name="masked_responses_count_in_the_denominator",
        source="trl#6369: mask_truncated_completions left the count of tokens as it was",
        test=f"{TEST_UPDATE}::test_masked_responses_teach_nothing",
        where="count_learned_tokens",
        old="batch.members & experience.sample_mask",
        new="batch.members",
    ),
    Exhibit(
        name="epochs_repeat_one_mini_batch",
        source="tunix: a mini-batch's epochs follow each other; lm-human-preference-details",
        test=f"{TEST_PARTS}::test_every_epoch_of_every_step_cuts_the_whole_rollout_anew",
        where="RolloutPacker._mini_batches",
        old="[self.config.seed, step, epoch]",
        new="[self.seed]",
    ),
    Exhibit(
        name="one_key_for_all_steps",
        source="tunix 0.1.7: the sampling key does not change from step to step",
        test=f"{TEST_PARTS}::test_keys_differ_by_seed_stream_and_step",
        where="sample_key",
        old="jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)",
        new="jax.random.fold_in(jax.random.key(seed), stream)",
    ),
    Exhibit(
        name="critic_warmup_is_one_step_short",
        source="verl: critic_warmup of N results in N - 1 steps",
        test=f"{TEST_UPDATE}::test_critic_warmup_is_exactly_n_steps",
        where="update_actor",
        old="step >= warmup",
        new="step + 1 >= warmup",
    ),
    Exhibit(
        name="a_pretrained_critic_loses_its_head",
        source="NeMo-RL#3821: finetune=True would give a trained critic a random head",
        test="tests/run/test_critic_alone.py::test_ppo_starts_with_the_values_of_the_critic",
        where="critic_head",
        old="bool(options.path) and folder is not None and holds_critic(folder)",
        new="False",
    ),
    Exhibit(
        name="the_first_learning_rate_is_zero",
        source="verl#3674, torchtune#2010, bert#1293: the first warm-up step changes nothing",
        test=f"{TEST_OPTIMIZER}::test_a_schedule_ends_at_its_floor_and_stays_there",
        where="learning_rate",
        old="options.lr * (step + 1)",
        new="options.lr * step",
    ),
    Exhibit(
        name="weight_decay_applies_to_norms",
        source="transformers#35927, Fast-LLM#542: the scales of RMSNorm were decayed",
        test=f"{TEST_OPTIMIZER}::test_weight_decay_leaves_norms_alone",
        where="make_optimizer",
        old="path[-1].key in DECAYED_LEAVES",
        new="path[-1].key != 'bias'",
    ),
    Exhibit(
        name="weight_decay_goes_through_adam",
        source="arXiv 1711.05101: L2 regularization in Adam is not weight decay",
        test=f"{TEST_OPTIMIZER}::test_weight_decay_leaves_norms_alone",
        where="make_optimizer",
        old=(
            "optax.chain(optax.clip_by_global_norm(section.grad_clip), "
            "optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.eps), "
            "optax.add_decayed_weights(options.weight_decay, mask=is_matrix))"
        ),
        new=(
            "optax.chain(optax.clip_by_global_norm(section.grad_clip), "
            "optax.add_decayed_weights(options.weight_decay, mask=is_matrix), "
            "optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.eps))"
        ),
    ),
    Exhibit(
        name="a_nan_gradient_is_applied",
        source='verl#747: NaN, then "!!!!" forever',
        test=f"{TEST_UPDATE}::test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted",
        where="descend",
        old="is_finite & update_enabled",
        new="update_enabled",
    ),
    Exhibit(
        name="a_skipped_update_changes_the_optimizer_state",
        source="flaxchat#6: gradients were zeroed, but counts and moments advanced",
        test=f"{TEST_UPDATE}::test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted",
        where="descend",
        old="select(new_opt_state, opt_state)",
        new="new_opt_state",
    ),
    Exhibit(
        name="the_controllers_coefficient_is_lost_on_resume",
        source="verl#7013, OpenRLHF, trl#2657: a resumed run started with the initial coefficient",
        test="tests/training/test_control.py::test_only_an_adapted_coefficient_survives_a_resume",
        where="resumed_control",
        old="KL_CONTROLLERS[kl_options.type].adapts",
        new="False",
    ),
    # Rules in a run.
    Exhibit(
        name="a_plain_function_is_not_accepted_as_reward",
        source="trl#2518, trl#2363, trl#3093: PPOTrainer accepted only an nn.Module as reward",
        test=f"{TEST_FUNCTIONS}::test_a_function_of_a_file",
        where="resolve_reward_function",
        old='_load_function(options.function, "reward.function")',
        new="_apply_built_in_rule",
    ),
    Exhibit(
        name="rewards_are_truncated_to_integers",
        source="tunix 0.1.7: 0.49 becomes 0",
        test=f"{TEST_FUNCTIONS}::test_a_failing_sample_costs_nobody_else_anything",
        where="score_batch",
        old="np.array([result.score for result in results], np.float32)",
        new="np.array([result.score for result in results], np.int32).astype(np.float32)",
    ),
    Exhibit(
        name="one_crashing_score_ends_the_run",
        source="verl#6673, trl#5281, AReaL#1426: one sample's error aborted the batch",
        test=f"{TEST_FUNCTIONS}::test_a_failing_sample_costs_nobody_else_anything",
        where="score_sample",
        old="BaseException",
        new="ArithmeticError",
    ),
    Exhibit(
        name="a_nan_score_poisons_its_batch",
        source="trl#5773, trl#5775: a NaN reward made mean, deviation and loss NaN",
        test=f"{TEST_FUNCTIONS}::test_a_failing_sample_costs_nobody_else_anything",
        where="validate_result",
        old="not abs(result.score) <= LARGEST_SCORE",
        new="abs(result.score) > LARGEST_SCORE",
    ),
    Exhibit(
        name="rules_see_special_tokens",
        source="verl#715: `...</answer><|im_end|>` matches no pattern that ends with </answer>",
        test=f"{TEST_PARTS}::test_rules_see_each_response_beside_its_own_example_and_nothing_special",
        where="decode_texts",
        old="tokenizer.batch_decode(rows, skip_special_tokens=not has_marks, **options)",
        new="tokenizer.batch_decode(rows, skip_special_tokens=False, **options)",
    ),
    Exhibit(
        name="rules_see_the_wrong_example",
        source="VLM-R1#129, R1-V#146: solutions were shifted against n responses per prompt",
        test=f"{TEST_PARTS}::test_rules_see_each_response_beside_its_own_example_and_nothing_special",
        where="RuleScorer._decode_local",
        old="batch.examples[i // n]",
        new="batch.examples[i % len(batch.examples)]",
    ),
    Exhibit(
        name="no_warning_that_filters_make_the_run_off_policy",
        source="trl#6789, verl#6240: top-p below 1 silently biased the ratio",
        test=f"{TEST_PARTS}::test_filters_are_said_to_make_what_is_learned_off_policy",
        where="train_notes",
        old="rollout.truncates",
        new="False",
    ),
    Exhibit(
        name="held_out_batches_share_their_draws",
        source="Megatron-LM#5983, vllm#11953: batches of one seed drew the same samples",
        test=f"{TEST_EVALUATION}::test_samples_of_all_batches_have_addresses_of_their_own",
        where="evaluate_batches",
        old="first_sample += len(batch_scores)",
        new="first_sample += 0",
    ),
    # Clips and other losses.
    Exhibit(
        name="the_minimum_is_taken_before_the_advantage",
        source="takuseno/ppo#3: min(ratio, clipped ratio) * A almost never clips bad tokens",
        test="tests/kernels/test_losses.py::test_policy_loss_by_hand",
        where="clipped_surrogate",
        old="jnp.maximum(unclipped_loss, clipped_loss)",
        new="-advantages * jnp.minimum(ratio, jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high))",
    ),
    Exhibit(
        name="the_dual_clip_applies_to_good_tokens",
        source="tianshou#433: with a positive advantage, the loss became -c A",
        test="tests/kernels/test_losses.py::test_policy_loss_by_hand",
        where="clipped_surrogate",
        old="jnp.where(advantages < 0, jnp.minimum(loss, ceiling), loss)",
        new="jnp.minimum(loss, ceiling)",
    ),
    Exhibit(
        name="the_loss_of_bad_tokens_is_unbounded",
        source="verl#783, ray#37334: a ratio of thousands times a negative advantage",
        test="tests/kernels/test_losses.py::test_policy_loss_by_hand",
        where="clipped_surrogate",
        old="clip.dual is not None",
        new="False",
    ),
    Exhibit(
        name="every_ratio_outside_the_range_counts_as_clipped",
        source="trl#3175: clip fractions ignored the sign of the advantage",
        test="tests/kernels/test_losses.py::test_policy_loss_by_hand",
        where="clipped_surrogate",
        old="clipped_loss > unclipped_loss",
        new="(ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high)",
    ),
    Exhibit(
        name="no_value_ever_counts_as_clipped",
        source="RLinf#1529: the clipped value was compared with its own range",
        test="tests/kernels/test_losses.py::test_value_loss_by_hand",
        where="value_loss",
        old="clipped_loss > unclipped_loss",
        new=(
            "jnp.abs(jnp.clip(values, old_values - clip, old_values + clip) - old_values)"
            " > 1.001 * clip"
        ),
    ),
    Exhibit(
        name="divided_by_the_longest_response_of_the_batch",
        source="trl#3138, open-instruct#636: Dr. GRPO requires a constant divisor",
        test="tests/kernels/test_losses.py::test_loss_weights_by_hand",
        where="seq_mean_token_sum_norm",
        old="samples * scale",
        new="samples * jnp.max(counts_B)",
    ),
    Exhibit(
        name="masked_tokens_leak_into_the_sequences_ratio",
        source="Soup#723: the means of GSPO included padding",
        test=f"{TEST_PROPERTIES}::test_policy_losses",
        where="log_ratios_and_advantages",
        old="zero_outside(batch.logprobs, batch.mask)",
        new="batch.logprobs",
    ),
    Exhibit(
        name="gspo_per_token",
        source="Soup#723: a loss named GSPO had one ratio per token",
        test="tests/kernels/test_policy_losses.py::test_by_hand",
        where="gspo",
        old="_mean_over_response(log_ratio, batch, sequence_sum)",
        new="log_ratio",
    ),
    Exhibit(
        name="the_ratio_of_sums_of_log_probs",
        source="hands-on-modern-rl#75: exp of a difference of sums; GSPO uses means",
        test="tests/kernels/test_policy_losses.py::test_by_hand",
        where="_mean_over_response",
        old="jnp.maximum(batch.action_counts, 1)",
        new="1",
    ),
    # Early stops.
    Exhibit(
        name="the_early_stop_ends_only_one_epoch",
        source="ManiSkill#830, cleanrl#520: it left one of two loops, and the next epoch went on",
        test=f"{TEST_UPDATE}::test_after_the_stop_nothing_is_learned",
        where="Learner.scan_mini_batches",
        old="within_limit &= is_within",
        new="within_limit = is_within",
    ),
    Exhibit(
        name="the_step_past_the_kl_target_is_taken",
        source="firedup#3, stable-baselines3#419: the KL was checked after the gradient step",
        test=f"{TEST_UPDATE}::test_target_kl_stops_the_actor_and_not_the_critic",
        where="Learner.take_optimizer_step",
        old="update_enabled & is_within",
        new="update_enabled",
    ),
    Exhibit(
        name="steps_that_were_not_taken_are_counted",
        source="stable-baselines3#1229: n_updates increased by all epochs, stopped or not",
        test=f"{TEST_UPDATE}::test_target_kl_stops_the_actor_and_not_the_critic",
        where="Learner.scan_mini_batches",
        old="jnp.sum(taken_U)",
        new="taken_U.size",
    ),
    Exhibit(
        name="an_entropy_collapse_is_not_reported",
        source="verl#5953: the entropy fell to nearly 0 without a warning",
        test="tests/run/test_report.py::test_a_collapse_is_said_once_and_counted_also_after_a_resume",
        where="_diagnose_entropy",
        old="entropy < limit",
        new="entropy < 0",
    ),
    Exhibit(
        name="a_run_of_nan_updates_continues",
        source="verl#747: a run whose every update is NaN trains for days",
        test="tests/run/test_report.py::test_too_many_skipped_updates_in_a_row_end_the_run",
        where="Journal._count_skipped_update",
        old="self._skipped_in_a_row += 1",
        new="self._skipped_in_a_row = 1",
    ),
    # Moments and shaping.
    Exhibit(
        name="a_batch_counts_as_one_number",
        source="cleanrl#18: RunningMeanStd was updated with a batch_count of 1",
        test="tests/kernels/test_masked_statistics.py::test_moments_by_hand",
        where="update_moments",
        old="jnp.sum(mask.astype(bool))",
        new="jnp.any(mask)",
    ),
    Exhibit(
        name="equal_rewards_are_divided_by_almost_zero",
        source="baselines#266: first rewards divided by a deviation near 0",
        test=f"{TEST_MASKED}::test_no_spread_divides_by_1",
        where="moments_std",
        old="jnp.where(spread, jnp.sqrt(variance + EPSILON), 1.0)",
        new="jnp.sqrt(variance + EPSILON)",
    ),
    Exhibit(
        name="advantages_of_normalized_values",
        source="marlbenchmark/on-policy#12: values were not denormalized before",
        test=f"{TEST_EXPERIENCE}::test_normalised_values_stand_for_the_same_advantages",
        where="critic_values",
        old="values = mean + std * values",
        new="pass",
    ),
    Exhibit(
        name="normalized_values_are_clipped_around_raw_ones",
        source="Mava#811: the critic's units were clipped around units of reward",
        test=f"{TEST_EXPERIENCE}::test_normalised_values_stand_for_the_same_advantages",
        where="estimate_experience",
        old="outputs.values",
        new=(
            "outputs.values * advantages.moments_std(control.moments['returns']) "
            "if options.normalizes_values else outputs.values"
        ),
    ),
    Exhibit(
        name="targets_use_the_old_moments",
        source="rlax#111: the PopArt example normalized with the moments from before the update",
        test=f"{TEST_EXPERIENCE}::test_normalised_values_stand_for_the_same_advantages",
        where="normalize_returns",
        old="normalize_by_moments(returns, updated, size)",
        new="normalize_by_moments(returns, moments, size)",
    ),
    Exhibit(
        name="the_penalty_begins_where_responses_end",
        source="verl#3855: it began at max_response_length, which no response reaches",
        test="tests/ppo/test_reward_shaping.py::test_soft_overlong_penalty_by_hand",
        where="soft_overlong_penalty",
        old="longest - buffer",
        new="longest",
    ),
    Exhibit(
        name="the_soft_penalty_grows_beyond_the_limit",
        source="tunix 0.1.7: reward_shaping counts characters, and the penalty has no bound",
        test="tests/ppo/test_reward_shaping.py::test_soft_overlong_penalty_by_hand",
        where="soft_overlong_penalty",
        old="jnp.clip(over / buffer, 0.0, 1.0)",
        new="jnp.maximum(over / buffer, 0.0)",
    ),
    Exhibit(
        name="a_buffer_longer_than_a_response",
        source="verl#2107: an expected length below 0 penalized every response",
        test="tests/config/test_loading.py::test_impossible_values_are_named",
        where="Reward",
        old="c.reward.overlong_buffer_len <= c.data.max_response_length",
        new="True",
    ),
    Exhibit(
        name="one_response_compared_to_itself",
        source="verl#7581: RLOO with rollout.n = 1 silently learned nothing",
        test="tests/config/test_loading.py::test_impossible_values_are_named",
        where="compares_responses",
        old=(
            "count(c) > 1 "
            "or not ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).needs_groups"
        ),
        new="True",
    ),
    Exhibit(
        name="a_step_reward_is_one_token_off",
        source="LightRFT#53: rewards stood on the token after the step's last one",
        test=f"{TEST_FUNCTIONS}::test_a_step_is_rewarded_at_the_token_that_ends_it",
        where="assign_step_rewards",
        old="bisect.bisect_left",
        new="bisect.bisect_right",
    ),
    # Runs.
    Exhibit(
        name="the_best_checkpoint_is_forgotten_by_a_restart",
        source="transformers#11748, transformers#15089: the best checkpoint was deleted",
        test=f"{TEST_CHECKPOINT}::TestKeeping::test_the_last_and_the_best_stay_through_a_restart",
        where="Checkpointer.__init__",
        old=(
            "ocp.CheckpointManagerOptions(preservation_policy=policy, "
            "best_fn=self._quality, cleanup_tmp_directories=True, "
            "temporary_path_class=checksums.temporary_path_class(self._directory))"
        ),
        new=(
            "ocp.CheckpointManagerOptions(preservation_policy=policy, "
            "cleanup_tmp_directories=True, "
            "temporary_path_class=checksums.ChecksummedPath)"
        ),
    ),
    Exhibit(
        name="a_nan_metric_is_the_best",
        source="pytorch-lightning#2636, ray#23820: comparisons with a NaN metric are all false",
        test=f"{TEST_CHECKPOINT}::TestKeeping::test_a_figure_that_is_not_finite_never_wins",
        where="Checkpointer.save",
        old="value is not None and math.isfinite(value)",
        new="value is not None",
    ),
    Exhibit(
        name="the_values_variance_is_explained",
        source="stable-baselines3#225: explained_variance had values and returns exchanged",
        test="tests/run/test_critic_quality.py::test_figures_by_hand",
        where="_describe_tokens",
        old="errors.var() / returns.var(dtype=np.float64)",
        new="errors.var() / values.var(dtype=np.float64)",
    ),
    Exhibit(
        name="the_optimizer_state_is_not_saved",
        source="dreamerv3-torch#38, ART#72, tinker-feedback#127: Adam's moments restart at 0",
        test=f"{TEST_CHECKPOINT}::test_what_was_saved_comes_back",
        where="Checkpointer.save",
        old="arrays.items()",
        new="[pair for pair in arrays.items() if pair[0] != 'optimizer']",
    ),
    Exhibit(
        name="steps_after_the_checkpoint_are_recorded_twice",
        source="wandb#1040: rows of a killed run next to rows of the resumed one",
        test=f"{TEST_METRICS}::TestCurveFile::test_an_interruption_leaves_no_trace",
        where="CurveFile.__init__",
        old="[row for row in rows if int(row['step']) <= steps_done]",
        new="[*rows]",
    ),
    Exhibit(
        name="tensorboard_shows_steps_twice",
        source="Speech#4541, wandb#859: curves of a resumed run fold back",
        test=f"{TEST_METRICS}::TestTensorBoard::test_tensorboard_shows_each_step_once",
        where="MetricsLog._open_tensorboard",
        old="first_step + 1 if first_step else 0",
        new="None",
    ),
    Exhibit(
        name="wandb_drops_the_steps_of_a_resumed_run",
        source="tango#152, wandb#4482: `Step must only increase in log calls`",
        test=f"{TEST_METRICS}::test_wandb_takes_our_step_as_a_metric_since_its_own_cannot_decrease",
        where="open_wandb",
        old="run.log({'step': step} | metrics)",
        new="run.log(metrics, step=step)",
    ),
    Exhibit(
        name="a_resumed_run_is_a_new_one_to_wandb",
        source="tango#152, wandb#859: a resumed run gets a new id",
        test=f"{TEST_METRICS}::test_wandb_takes_our_step_as_a_metric_since_its_own_cannot_decrease",
        where="open_wandb",
        old="not (first_step and id_file.exists())",
        new="not id_file.exists() or first_step",
    ),
    # Mutations.
    Exhibit(
        name="a_resumed_run_accepts_another_model",
        test="tests/training/test_resume.py::test_no_option_of_the_model_may_change",
        where="Config",
        old="section(Model, fixed_on_resume=True)",
        new="section(Model)",
    ),
    Exhibit(
        name="evaluated_accuracy_counts_rows_without_a_right_answer",
        test=f"{TEST_EVALUATION}::test_accuracy_is_of_the_rows_whose_rule_defines_correctness",
        where="evaluate_batches",
        old="defined_correct.mean()",
        new="np.nan_to_num(all_correct).mean()",
    ),
    Exhibit(
        name="training_accuracy_counts_rows_without_a_right_answer",
        test=f"{TEST_EVALUATION}::test_accuracy_is_of_the_rows_whose_rule_defines_correctness",
        where="measure_sampling",
        old="masked_mean(correct_B, is_known_B)",
        new="jnp.maximum(correct_B, 0).mean()",
    ),
    Exhibit(
        name="the_cosine_schedule_ends_at_zero",
        test=f"{TEST_OPTIMIZER}::test_a_schedule_ends_at_its_floor_and_stays_there",
        where="cosine_rate",
        old="optax.cosine_decay_schedule(options.lr, decay_steps, alpha=options.min_lr_ratio)",
        new="optax.cosine_decay_schedule(options.lr, decay_steps)",
    ),
    Exhibit(
        name="a_normalized_value_is_bootstrapped_from",
        test=f"{TEST_EXPERIENCE}::test_the_value_bootstrapped_from_is_in_units_of_reward",
        where="critic_values",
        old="mean + std * final_values",
        new="final_values",
    ),
    Exhibit(
        name="masked_responses_enter_the_moments_of_returns",
        test=f"{TEST_EXPERIENCE}::test_moments_of_returns_leave_out_masked_responses",
        where="normalize_returns",
        old="update_moments(moments, returns, learned_values(masks), size)",
        new="update_moments(moments, returns, masks.actions, size)",
    ),
    Exhibit(
        name="the_critics_lambda_defaults_to_one",
        test=f"{TEST_EXPERIENCE}::test_the_critics_lambda_is_the_actors_unless_set",
        where="generalized_advantages",
        old="actor_lams = critic_lams = lams",
        new="actor_lams, critic_lams = lams, dict.fromkeys(lams, jnp.ones(len(values)))",
    ),
    Exhibit(
        name="a_pair_is_kept_if_one_side_fits",
        test="tests/data/test_responses.py::test_a_pair_is_dropped_if_one_side_is_too_long",
        where="_encode_fitting_responses",
        old="max(map(len, encoded)) <= max_response_length",
        new="min(map(len, encoded)) <= max_response_length",
    ),
    Exhibit(
        name="the_sum_of_a_response_is_its_largest_token",
        test=f"{TEST_PACKING}::test_sums_over_a_response_stand_at_each_of_its_tokens",
        where="sample_sums",
        old="jnp.zeros(samples, values_RxL.dtype).at[rows.samples].add(masked_RxL)",
        new="jnp.zeros(samples, values_RxL.dtype).at[rows.samples].max(masked_RxL)",
    ),
    Exhibit(
        name="nothing_is_due_after_the_last_step",
        test="tests/training/test_resume.py::test_everything_is_due_after_the_last_step",
        where="is_due",
        old="is_multiple or completed_steps == total_steps",
        new="is_multiple",
    ),
    Exhibit(
        name="moments_overflow",
        test="tests/kernels/test_masked_statistics.py::test_a_batch_whose_moments_overflow_is_ignored",
        where="update_moments",
        old="jnp.isfinite(updated.mean) & jnp.isfinite(updated.m2)",
        new="jnp.isfinite(updated.mean)",
    ),
    # Dialogues.
    Exhibit(
        name="the_mask_of_the_environment_is_ignored",
        source="trl#4975: one path of the loss learned the tokens of tools",
        test="tests/sampler/test_dialogues.py::test_dialogues_are_those_of_a_loop_over_one_sequence",
        where="record_dialogues",
        old="dialogues.is_action",
        new="rollout.action_mask",
    ),
    Exhibit(
        name="the_mask_of_the_environment_is_inverted",
        source="RAGEN#71: the gradient went to the states and not to the actions",
        test="tests/sampler/test_dialogues.py::test_dialogues_are_those_of_a_loop_over_one_sequence",
        where="record_turns",
        old="dialogues.is_action.at[written_B, before.drawn].set(~is_observed_B, mode='drop')",
        new="dialogues.is_action.at[written_B, before.drawn].set(is_observed_B, mode='drop')",
    ),
    Exhibit(
        name="rewards_stop_at_an_observation",
        source="verl#7278: rewards after an observation were lost; miles#1827: GAE decayed them",
        test="tests/run/test_two_turns.py::test_reward_to_go_counts_what_a_turn_can_still_change",
        where="gae",
        old="jnp.where(chosen, advantage, next_advantage)",
        new="jnp.where(chosen, advantage, 0.0)",
    ),
    Exhibit(
        name="a_turn_without_a_reward_is_none",
        source="RAGEN's bi-level GAE: a turn ended only at a reward, so one of 0 joined the next",
        test=f"{TEST_EXPERIENCE}::test_turns_and_their_tokens_in_dialogues",
        where="bi_level_gae",
        old="ends_T = _ends_of_turns(mask_T, starts_T)",
        new="ends_T = zero_outside(rewards_T, mask_T) != 0",
    ),
    Exhibit(
        name="turns_without_an_answer_are_one",
        test="tests/sampler/test_dialogues.py::test_dialogues_are_those_of_a_loop_over_one_sequence",
        where="record_dialogues",
        old="dialogues.starts",
        new="dialogues.is_action & ~jnp.pad(dialogues.is_action, ((0, 0), (1, 0)))[:, :-1]",
    ),
    Exhibit(
        name="the_value_of_a_turn_is_that_of_its_last_token",
        source="RAGEN's bi-level GAE read the critic at a turn's end; VAGEN at its beginning",
        test="tests/kernels/test_advantages.py::test_turns_by_hand",
        where="turn_gae",
        old="gae(earned_T, values_T, starts_T, gamma, lam, bootstrap_value)",
        new=(
            "gae(earned_T, reward_to_go(jnp.where(_ends_of_turns(mask_T, starts_T), values_T, 0.0),"
            " mask_T, ~_ends_of_turns(mask_T, starts_T)), starts_T, gamma, lam, bootstrap_value)"
        ),
    ),
    Exhibit(
        name="the_critic_learns_the_last_turn_alone",
        source="oat#67: a critic of several turns saw one stale state in every mini-batch",
        test="tests/run/test_two_turns.py::test_returns_average_to_the_values_of_the_policys_states",
        where="select_tokens",
        old="loss & starts if values_turns else None",
        new="loss & (jnp.cumsum(starts, 1) == jnp.sum(starts, 1, keepdims=True))",
    ),
    Exhibit(
        name="the_kl_counts_observations",
        source="Search-R1#21: the reported KL included the tokens of search results",
        test="tests/run/test_two_turns.py::test_the_measured_kl_is_that_of_the_policys_own_tokens",
        where="add_kl_penalty",
        old="masked_mean(kl_tokens, actions)",
        new="kl_tokens.mean()",
    ),
    Exhibit(
        name="every_stage_works_on_the_micro_batch_of_the_first",
        test=f"{TEST_STAGES}::test_stages_change_no_hidden_state_and_no_gradient[four_stages]",
        where="run_stages",
        old="t - stage",
        new="t",
    ),
    Exhibit(
        name="the_template_between_turns_is_cut",
        source="verl#3720: the template's line break after a turn stood in training alone",
        test="tests/environments/test_tool_calls.py::"
        "test_results_come_back_as_the_template_writes_them",
        where="MessageFrame.encode",
        old="self._before[1:] if self._before[:1] == [last] else self._before",
        new="self._before[2:] if self._before[:1] == [last] else self._before",
    ),
]
