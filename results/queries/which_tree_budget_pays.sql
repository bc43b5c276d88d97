-- Which tree budget pays: how many more tokens does a step emit for each node more that the target must read?
-- `tokens_per_node_more` is against the next smaller budget (the chain's drafts for the smallest).
SELECT
    run, step, slice, dataset, budget, tau_pooled, chain_tau_pooled, gain,
    (tau_pooled - lag(tau_pooled, 1, chain_tau_pooled) OVER of_one)
        / nullif(budget - lag(budget, 1, evaluations.num_drafts) OVER of_one, 0) AS tokens_per_node_more,
    num_verification_steps, evaluation_id
FROM tree_budgets
JOIN evaluations USING (evaluation_id)
WINDOW of_one AS (PARTITION BY evaluation_id, slice, dataset ORDER BY budget)
ORDER BY run, step, slice, dataset, budget;
