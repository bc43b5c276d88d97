-- Which prompts got worse from one checkpoint to another, and by how many verification steps? Here: the two newest
-- steps of the newest run. To compare two others, put their evaluation ids in place of the two subqueries.
WITH newest AS (
    SELECT evaluation_id, step
    FROM learning_curve
    WHERE slice = 'all' AND is_newest_of_step AND step IS NOT NULL
        AND (run, conditions) = (
            SELECT (run, conditions) FROM learning_curve WHERE step IS NOT NULL ORDER BY started_at DESC, run LIMIT 1
        )
),
chosen AS (
    SELECT
        (SELECT evaluation_id FROM newest ORDER BY step DESC LIMIT 1 OFFSET 1) AS a,
        (SELECT evaluation_id FROM newest ORDER BY step DESC LIMIT 1) AS b
)
SELECT
    run_a, step_a, run_b, step_b, paired.prompt_id, dataset, prompt_group, tau_a, tau_b, difference,
    num_verification_steps_b - num_verification_steps_a AS more_steps,
    left(prompt_text, 120) AS prompt_begins, evaluation_a, evaluation_b
FROM chosen
JOIN paired ON evaluation_a = a AND evaluation_b = b
JOIN (SELECT transcripts_digest, prompt_id, prompt_text FROM prompts) AS texts USING (transcripts_digest, prompt_id)
WHERE difference < 0
ORDER BY difference, prompt_id;
