-- Is a checkpoint better than another on the same prompts, and on how many of them?
-- Each row compares b with an earlier a of the same run; `dflash-eval compare` adds intervals and p-values.
SELECT
    run_a AS run, step_a, step_b, dataset,
    count(*) AS num_prompts,
    sum(num_emitted_tokens_b) / sum(num_verification_steps_b)
        - sum(num_emitted_tokens_a) / sum(num_verification_steps_a) AS difference_pooled,
    avg(difference) AS difference_prompt_mean,
    count(*) FILTER (difference > 0) AS num_better,
    count(*) FILTER (difference < 0) AS num_worse,
    evaluation_a, evaluation_b
FROM paired
WHERE run_a = run_b AND step_a < step_b
GROUP BY run_a, step_a, step_b, dataset, evaluation_a, evaluation_b
ORDER BY run, step_a, step_b, dataset, evaluation_a, evaluation_b;
