-- Which checkpoint of each run is the best, and by how much does it lead the newest one?
-- Only checkpoints under the same conditions (target, transcripts, block size, dtype) compete.
SELECT
    run,
    arg_max(step, tau_pooled) AS best_step,
    max(tau_pooled) AS best_tau,
    arg_max(ci_low, tau_pooled) AS ci_low,
    arg_max(ci_high, tau_pooled) AS ci_high,
    max(step) AS newest_step,
    max(tau_pooled) - arg_max(tau_pooled, step) AS lead_over_newest,
    count(*) AS num_checkpoints,
    target, block_size, dtype, transcripts_digest
FROM learning_curve
WHERE slice = 'all' AND is_newest_of_step
GROUP BY run, target, block_size, dtype, transcripts_digest
ORDER BY best_tau DESC NULLS LAST, run;
