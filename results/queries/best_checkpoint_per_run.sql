-- Which checkpoint of each run is the best, and by how much does it lead the newest one?
-- Only checkpoints under the same conditions compete. NULL where there is none: an interval of the best, a newest step.
WITH curve AS (
    FROM learning_curve WHERE slice = 'all' AND is_newest_of_step
),
found AS (
    SELECT
        run, conditions, target, block_size, dtype, transcripts_digest,
        -- Whole rows: of single columns arg_max would skip the rows where they are NULL.
        arg_max(curve, tau_pooled) AS best,
        arg_max(curve, step) AS newest,
        count(*) AS num_checkpoints
    FROM curve
    GROUP BY run, conditions, target, block_size, dtype, transcripts_digest
)
SELECT
    run,
    best.step AS best_step,
    best.tau_pooled AS best_tau,
    best.ci_low AS ci_low,
    best.ci_high AS ci_high,
    newest.step AS newest_step,
    best.tau_pooled - newest.tau_pooled AS lead_over_newest,
    num_checkpoints,
    conditions, target, block_size, dtype, transcripts_digest
FROM found
ORDER BY best_tau DESC NULLS LAST, run;
