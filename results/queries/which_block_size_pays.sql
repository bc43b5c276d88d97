-- Which block size pays: how does tau fall where blocks are shorter than the one that was evaluated?
SELECT
    run, step, slice, dataset, block_size, method, tau_pooled,
    tau_pooled / max_by(tau_pooled, block_size) OVER of_one AS share_of_the_longest,
    num_verification_steps, evaluation_id
FROM block_sizes
WINDOW of_one AS (PARTITION BY evaluation_id, slice, dataset)
ORDER BY run, step, slice, dataset, block_size;
