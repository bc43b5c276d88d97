-- How does tau move from checkpoint to checkpoint on each kind of prompt?
-- `change` is against the previous scored step, NULL without one; slice 'group' holds sets such as trained-on and held-out.
SELECT
    run, slice, dataset, step, tau_pooled, ci_low, ci_high,
    CASE WHEN step IS NOT NULL THEN
        tau_pooled - lag(tau_pooled) OVER (PARTITION BY run, slice, dataset, conditions ORDER BY step)
    END AS change,
    num_prompts, conditions, target, block_size, dtype, transcripts_digest
FROM learning_curve
WHERE is_newest_of_step
ORDER BY run, conditions, slice, dataset, step;
