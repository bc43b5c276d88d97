-- On which prompts does the best checkpoint of the newest conditions do worst, and what was asked there?
SELECT
    prompt_acceptance.prompt_id, dataset, prompt_group, tau, num_verification_steps, num_near_ties,
    left(prompt_text, 120) AS prompt_begins,
    run, step, evaluation_id
FROM prompt_acceptance
JOIN (SELECT transcripts_digest, prompt_id, prompt_text FROM prompts) AS texts USING (transcripts_digest, prompt_id)
WHERE evaluation_id = (
    SELECT evaluation_id
    FROM leaderboard
    WHERE conditions = (SELECT conditions FROM leaderboard ORDER BY started_at DESC, evaluation_id LIMIT 1)
    ORDER BY tau_pooled DESC NULLS LAST LIMIT 1
)
ORDER BY tau, prompt_id
LIMIT 20;
