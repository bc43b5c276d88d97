-- How much of each score hangs on near-ties of the target, which another kernel or dtype may decide otherwise?
-- NULL where the margins of the target are not known.
SELECT
    run, step, slice, dataset,
    num_near_ties / nullif(num_verification_steps, 0) AS near_tie_share,
    tau_pooled,
    tau_without_near_ties,
    tau_without_near_ties - tau_pooled AS difference,
    num_near_ties, num_verification_steps, evaluation_id
FROM acceptance
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
WHERE status = 'done'
ORDER BY near_tie_share DESC NULLS LAST, run, step, slice, dataset;
