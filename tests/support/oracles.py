"""What holds methods whose text is their own to it: for each a test beside its original's output, beside a loop as slow and as
plain as can be, or beside enumeration. `tests/guarantees/test_own_text.py` checks that each is there, and in the fast set."""

ORACLES = {
    "SEARCHES": {
        "beam": "tests/search/test_beam.py::test_wide_enough_it_finds_the_best_of_all_texts",
        "diverse_beam": "tests/search/test_beam.py::test_a_few_groups_as_in_transformers_4",
        "stochastic_beam": "tests/search/test_stochastic_beam.py::test_pairs_are_draws_without_replacement",
        "superposed": "tests/search/test_superposed.py::test_against_a_slow_reference[0.54]",
        "smc": "tests/search/test_smc.py::test_texts_and_evidence_are_the_aligned_distributions",
        "asap": "tests/search/test_asap.py::test_bounds_are_the_slow_tries_and_texts_become_the_aligned_distributions",
    },
    "STEPWISE": {
        "entropy_adaptive": "tests/search/test_entropy_adaptive.py::test_between_them_it_is_the_oracle",
        "astar": "tests/search/test_astar.py::test_without_a_heuristic_it_is_dijkstra[False]",
        "spec_reason": "tests/search/test_spec_reason.py::test_between_the_ends_it_is_the_oracle[likelihood]",
        "speculative_thinking": "tests/search/test_speculative_thinking.py::test_with_cues_it_is_the_oracle",
        "ralm": "tests/search/test_ralm.py::test_plain_retrieval_is_the_loop_that_keeps_nothing",
        "e_lang": "tests/search/test_e_lang.py::test_the_large_model_writes_where_the_small_one_was_unsure[6-1.0]",
        "plan_search": "tests/search/test_plan_search.py::test_the_model_is_asked_as_often_as_the_authors_program_does",
        "hide_message": "tests/search/test_coupling.py::test_texts_have_exactly_the_models_distribution[True]",
        "read_message": "tests/search/test_coupling.py::test_a_reader_finds_what_was_hidden",
        "chops": "tests/search/test_chops.py::test_the_completion_that_the_model_names_is_taken[2]",
        "x_mbr": "tests/search/test_x_mbr.py::test_without_other_languages_and_by_answers_it_is_the_majority[letter]",
        "verbalized": "tests/search/test_verbalized.py::test_a_reply_is_read_as_the_authors_parser_does[0]",
        "merged_prompts": "tests/search/test_merged_prompts.py::test_texts_are_those_of_whole_passes[trained]",
        "self_agreement": "tests/search/test_self_agreement.py::test_texts_are_those_of_two_plain_runs[4]",
    },
    "SELECTIONS": {
        "majority": "tests/search/test_selection.py::test_majority_takes_the_first_of_the_most_frequent",
        "self_certainty": "tests/search/test_selection.py::test_certainty_is_the_divergence_of_the_even_distribution",
        "borda": "tests/search/test_selection.py::test_borda_is_the_authors_program",
        "first_finish": "tests/search/test_first_finish.py::test_it_is_the_shortest_of_full_completions[none-3]",
        "reward": "tests/search/test_reward.py::test_numbers_of_steps_are_one_number[min]",
    },
    "MIXERS": {
        "gumbel": "tests/soft/test_soft_thinking.py::test_against_numpy_and_whole_passes",
        "dirichlet": "tests/soft/test_soft_thinking.py::test_weights_have_their_distributions",
        "mean": "tests/soft/test_soft_thinking.py::test_weights_have_their_distributions",
    },
    "UNMASKS": {
        "fixed": "tests/diffusion/test_decoder.py::test_equal_to_the_oracle[fixed-same]",
        "dream": "tests/diffusion/test_policies.py::test_equal_to_the_oracle[dream-drawn-8-False]",
        "redo": "tests/diffusion/test_policies.py::test_equal_to_the_oracle[redo-8-False]",
        "remdm": "tests/diffusion/test_remdm.py::test_equal_to_a_loop_over_its_draws[cap]",
        "p2": "tests/diffusion/test_klass_and_p2.py::test_equal_to_a_loop_over_whole_passes[p2]",
        "rcr": "tests/diffusion/test_policies.py::test_equal_to_the_oracle[rcr-8-False]",
        "sequential": "tests/diffusion/test_block.py::test_sequential_goes_from_left_to_right",
    },
    "SAMPLERS": {"entropy_renoise": "tests/diffusion/test_canvas.py::test_equal_to_transformers[19-greedy]"},
}
