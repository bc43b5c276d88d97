-- At which draft position does the target's token leave the drafter's k best, where serving came so far?
-- What is missing at k = 1 and there at k = 16 is what a tree or a better choice among candidates could win.
SELECT
    run, step, draft_position,
    max(recall_conditional) FILTER (k = 1) AS recall_at_1,
    max(recall_conditional) FILTER (k = 2) AS recall_at_2,
    max(recall_conditional) FILTER (k = 4) AS recall_at_4,
    max(recall_conditional) FILTER (k = 8) AS recall_at_8,
    max(recall_conditional) FILTER (k = 16) AS recall_at_16,
    max(recall_teacher_forced) FILTER (k = 1) AS match_rate,
    any_value(num_reached) AS num_reached, any_value(num_blocks) AS num_blocks, evaluation_id
FROM recall
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
WHERE slice = 'all'
GROUP BY run, step, draft_position, evaluation_id
ORDER BY run, step, evaluation_id, draft_position;
