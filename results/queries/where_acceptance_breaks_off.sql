-- Where does acceptance break off: at which draft position do how many blocks end, in the best checkpoint?
-- Of the newest conditions. Blocks end where a draft is wrong, or where the transcript does; `lost_tokens` is what
-- each position costs: tokens per step that would be there if no block ended at it and all went on as those that did not.
WITH best AS (
    SELECT evaluation_id, run, step
    FROM leaderboard
    WHERE conditions = (SELECT conditions FROM leaderboard ORDER BY started_at DESC, evaluation_id LIMIT 1)
    ORDER BY tau_pooled DESC NULLS LAST, step LIMIT 1
),
positions AS (
    SELECT
        slice, dataset, draft_position, num_blocks, num_available, num_survived, survival, conditional_acceptance,
        lag(num_survived, 1, num_blocks) OVER of_one - num_survived AS num_ended_here,
        sum(num_survived) OVER (of_one ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS num_drafts_from_here,
        evaluation_id
    FROM survival
    WINDOW of_one AS (PARTITION BY evaluation_id, slice, dataset ORDER BY draft_position)
)
SELECT
    run, step, slice, dataset, draft_position, survival, conditional_acceptance,
    num_ended_here, num_ended_here / nullif(num_blocks, 0) AS share_ended_here,
    num_drafts_from_here * (1 / nullif(conditional_acceptance, 0) - 1) / nullif(num_blocks, 0) AS lost_tokens,
    num_blocks, num_available, evaluation_id
FROM positions JOIN best USING (evaluation_id)
ORDER BY slice, dataset, draft_position;
