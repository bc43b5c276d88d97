-- Which checkpoints have no numbers, and why: did the evaluation fail, or was the checkpoint gone before it was read?
-- The newest outcome at each address, unless a checkpoint there was scored later.
WITH outcomes AS (
    SELECT * FROM evaluations JOIN checkpoints USING (checkpoint_id)
)
SELECT run, step, status, error, url, started_at, evaluation_id
FROM outcomes
QUALIFY row_number() OVER (PARTITION BY url ORDER BY started_at DESC, (status = 'done') DESC, evaluation_id) = 1
    AND status <> 'done'
ORDER BY status, run, step NULLS FIRST, started_at;
