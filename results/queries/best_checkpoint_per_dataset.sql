-- Which checkpoint is the best on each dataset, and how far behind is the one that is best on all prompts together?
-- Only checkpoints under the same conditions compete; slice 'group' holds sets such as trained-on and held-out.
WITH curve AS (
    FROM learning_curve WHERE is_newest_of_step AND tau_pooled IS NOT NULL
),
best_of_all AS (
    SELECT conditions, evaluation_id AS best_id
    FROM curve WHERE slice = 'all'
    QUALIFY row_number() OVER (PARTITION BY conditions ORDER BY tau_pooled DESC, step, run) = 1
)
SELECT
    slice, dataset, run, step, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_prompts,
    max(tau_pooled) FILTER (evaluation_id = best_id) OVER of_one AS tau_of_the_best_of_all,
    conditions, target, block_size, evaluation_id
FROM curve JOIN best_of_all USING (conditions)
WINDOW of_one AS (PARTITION BY conditions, slice, dataset)
QUALIFY row_number() OVER (PARTITION BY conditions, slice, dataset ORDER BY tau_pooled DESC, step, run) = 1
ORDER BY conditions, slice, dataset;
