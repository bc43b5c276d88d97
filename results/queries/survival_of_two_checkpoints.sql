-- At which draft position do two checkpoints part? Here: the first and the best of the newest conditions.
-- To compare two others, put their evaluation ids in place of the two subqueries.
WITH curve AS (
    SELECT *
    FROM learning_curve
    WHERE slice = 'all' AND is_newest_of_step
        AND conditions = (SELECT conditions FROM learning_curve ORDER BY started_at DESC, evaluation_id LIMIT 1)
),
chosen AS (
    SELECT
        (SELECT evaluation_id FROM curve ORDER BY step, run LIMIT 1) AS a,
        (SELECT evaluation_id FROM curve ORDER BY tau_pooled DESC NULLS LAST, step LIMIT 1) AS b
)
SELECT
    draft_position,
    any_value(survival) FILTER (evaluation_id = a) AS survival_a,
    any_value(survival) FILTER (evaluation_id = b) AS survival_b,
    any_value(conditional_acceptance) FILTER (evaluation_id = a) AS conditional_a,
    any_value(conditional_acceptance) FILTER (evaluation_id = b) AS conditional_b,
    a AS evaluation_a,
    b AS evaluation_b
FROM survival, chosen
WHERE slice = 'all' AND evaluation_id IN (a, b)
GROUP BY draft_position, a, b
ORDER BY draft_position;
