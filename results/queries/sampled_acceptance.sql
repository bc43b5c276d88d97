-- How much acceptance is left at temperatures above 0, under either rule, beside the greedy one on the same blocks?
-- The teacher-forced number is an estimate, `at_least` a bound; both and `greedy_accepted` are drafts per block.
SELECT
    run, step, slice, dataset, temperature, rule, first_acceptance,
    expected_accepted_teacher_forced, expected_accepted_at_least,
    acceptance.num_accepted_drafts / nullif(num_verification_steps, 0) AS greedy_accepted,
    num_blocks, evaluation_id
FROM sampled
JOIN acceptance USING (evaluation_id, slice, dataset)
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
ORDER BY run, step, slice, dataset, temperature, rule;
