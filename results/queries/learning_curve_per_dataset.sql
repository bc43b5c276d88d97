-- How does tau move from checkpoint to checkpoint on each kind of prompt?
-- `change` is against the previous scored step; slice 'group' holds sets such as trained-on and held-out.
SELECT
    run, slice, dataset, step, tau_pooled, ci_low, ci_high,
    tau_pooled - lag(tau_pooled) OVER (
        PARTITION BY run, slice, dataset, target, transcripts_digest, block_size, dtype ORDER BY step
    ) AS change,
    num_prompts, target, block_size, dtype, transcripts_digest
FROM learning_curve
WHERE is_newest_of_step
ORDER BY run, transcripts_digest, block_size, dtype, slice, dataset, step;
