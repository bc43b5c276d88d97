-- What did each checkpoint cost: seconds in all and per stage, bytes read of the bytes there, and how much per prompt?
-- A stage that the store answered took next to nothing; `num_cached_stages` says how many did.
SELECT
    run, step, status, total_seconds,
    list_sort(map_entries(CAST(seconds AS MAP(VARCHAR, DOUBLE)))) AS seconds_per_stage,
    total_seconds / nullif(num_prompts, 0) AS seconds_per_prompt,
    bytes_read, bytes_read / nullif(bytes_total, 0) AS share_of_bytes_read,
    bytes_read / 1e6 / nullif(CAST(seconds ->> '$.stream_checkpoint' AS DOUBLE), 0) AS mb_per_second,
    len(list_filter(map_values(CAST(cached AS MAP(VARCHAR, BOOLEAN))), lambda is_cached: is_cached)) AS num_cached_stages,
    tau_pooled, device, started_at, evaluation_id
FROM evaluations
JOIN checkpoints USING (checkpoint_id)
LEFT JOIN (FROM acceptance WHERE slice = 'all') AS acceptance USING (evaluation_id)
ORDER BY run, step NULLS FIRST, started_at;
