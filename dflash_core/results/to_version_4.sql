-- What the step from schema version 3 to 4 does to the views: all conditions, and `conditions` that tells them apart.

-- Under which conditions each evaluation was made. Two may be compared exactly where `conditions` is the same.
-- Where its target is not recorded by content (files of old), the name has to do.
CREATE OR REPLACE VIEW evaluation_conditions AS
SELECT
    evaluation_id,
    left(md5(CAST(to_json(struct_pack(
        target, target_identity, transcripts_digest, block_size, dtype, target_dtype, store_dtype, thinking,
        chat_template_digest, verification_rule, counting_rule, row_alignment, metrics_version, extraction_version
    )) AS VARCHAR)), 12) AS conditions,
    target, target_identity, transcripts_digest, block_size, dtype, target_dtype, store_dtype, thinking,
    chat_template_digest, verification_rule, counting_rule, row_alignment, metrics_version, extraction_version
FROM (
    SELECT *, spec ->> '$.target_identity' AS target_identity, spec ->> '$.store_dtype' AS store_dtype FROM evaluations
);

-- Per prompt: what the serving walk did there.
CREATE OR REPLACE VIEW prompt_acceptance AS
SELECT
    walk.evaluation_id, checkpoints.run, checkpoints.step, walk.prompt_id, prompts.dataset, prompts.prompt_group,
    walk.num_verification_steps, walk.num_accepted_drafts, walk.num_emitted_tokens, walk.num_near_ties,
    walk.num_emitted_tokens / walk.num_verification_steps AS tau,
    terms.conditions, terms.target, terms.target_identity, terms.transcripts_digest,
    terms.block_size, terms.dtype, terms.target_dtype, terms.store_dtype, terms.thinking,
    terms.chat_template_digest, terms.verification_rule, terms.counting_rule, terms.row_alignment,
    terms.metrics_version, terms.extraction_version
FROM (
    SELECT
        evaluation_id, prompt_id,
        count(*) AS num_verification_steps,
        CAST(sum(num_accepted_drafts) AS BIGINT) AS num_accepted_drafts,
        CAST(sum(num_emitted_tokens) AS BIGINT) AS num_emitted_tokens,
        CASE WHEN count(is_near_tie) = count(*) THEN count(*) FILTER (is_near_tie) END AS num_near_ties
    FROM blocks
    WHERE is_on_walk
    GROUP BY evaluation_id, prompt_id
) AS walk
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
JOIN evaluation_conditions AS terms ON terms.evaluation_id = walk.evaluation_id
JOIN prompts ON prompts.transcripts_digest = evaluations.transcripts_digest AND prompts.prompt_id = walk.prompt_id;

-- Best first. `place` counts only among evaluations that may be compared.
CREATE OR REPLACE VIEW leaderboard AS
SELECT
    rank() OVER (PARTITION BY conditions ORDER BY tau_pooled DESC NULLS LAST) AS place,
    run, step, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_near_ties, tau_without_near_ties,
    tau_prompt_mean_without_near_ties, share_full_blocks, num_prompts, num_verification_steps,
    device, terms.* EXCLUDE (evaluation_id),
    url, checkpoint_id, evaluation_id, started_at
FROM acceptance
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
JOIN evaluation_conditions AS terms USING (evaluation_id)
WHERE status = 'done' AND slice = 'all'
ORDER BY tau_pooled DESC NULLS LAST, run, step, evaluation_id;

-- Tau against step. Of several evaluations of one checkpoint under the same conditions the latest.
CREATE OR REPLACE VIEW learning_curve AS
WITH latest AS (
    SELECT
        run, step, bytes_read, bytes_wanted, bytes_total, total_seconds, seconds, device, checkpoint_id, started_at,
        terms.*
    FROM evaluations
    JOIN checkpoints USING (checkpoint_id)
    JOIN evaluation_conditions AS terms USING (evaluation_id)
    WHERE status = 'done'
    QUALIFY row_number() OVER (PARTITION BY checkpoint_id, conditions ORDER BY started_at DESC, evaluation_id) = 1
),
ranked AS (
    SELECT
        *,
        step IS NULL OR row_number() OVER (
            PARTITION BY run, step, conditions ORDER BY started_at DESC, evaluation_id
        ) = 1 AS is_newest_of_step
    FROM latest
)
SELECT
    run, step, slice, dataset, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_near_ties, tau_without_near_ties,
    tau_prompt_mean_without_near_ties, num_prompts, num_verification_steps,
    bytes_read, bytes_wanted, bytes_total, total_seconds, seconds, is_newest_of_step, device,
    conditions, target, target_identity, transcripts_digest, block_size, dtype, target_dtype, store_dtype, thinking,
    chat_template_digest, verification_rule, counting_rule, row_alignment, metrics_version, extraction_version,
    checkpoint_id, evaluation_id, started_at
FROM ranked
JOIN acceptance USING (evaluation_id)
ORDER BY run, step, slice, dataset, started_at;

-- Every ordered pair of evaluations that may be compared, prompt by prompt.
CREATE OR REPLACE VIEW paired AS
SELECT
    a.evaluation_id AS evaluation_a, a.run AS run_a, a.step AS step_a,
    b.evaluation_id AS evaluation_b, b.run AS run_b, b.step AS step_b,
    a.prompt_id, a.dataset, a.prompt_group,
    a.num_verification_steps AS num_verification_steps_a, a.num_emitted_tokens AS num_emitted_tokens_a,
    b.num_verification_steps AS num_verification_steps_b, b.num_emitted_tokens AS num_emitted_tokens_b,
    a.tau AS tau_a, b.tau AS tau_b, b.tau - a.tau AS difference,
    a.conditions, a.target, a.target_identity, a.transcripts_digest, a.block_size, a.dtype, a.target_dtype,
    a.store_dtype, a.thinking, a.chat_template_digest, a.verification_rule, a.counting_rule, a.row_alignment,
    a.metrics_version, a.extraction_version
FROM prompt_acceptance AS a
JOIN prompt_acceptance AS b
    ON a.prompt_id = b.prompt_id
    AND a.conditions = b.conditions
    AND a.evaluation_id <> b.evaluation_id;

-- Tau by block size: the evaluation's own block and the shorter ones of the sweep.
CREATE OR REPLACE VIEW block_sizes AS
SELECT
    run, step, slice, dataset, found.block_size, method, tau_pooled, tau_prompt_mean, num_prompts,
    num_verification_steps, num_accepted_drafts, num_emitted_tokens,
    conditions, target, terms.block_size AS evaluated_block_size, dtype, transcripts_digest, metrics_version,
    evaluation_id
FROM (
    SELECT
        evaluation_id, slice, dataset, block_size, method, num_prompts, num_verification_steps, num_accepted_drafts,
        num_emitted_tokens, tau_pooled, tau_prompt_mean
    FROM sweep
    UNION ALL
    SELECT
        evaluation_id, slice, dataset, block_size, 'evaluated', num_prompts, num_verification_steps,
        num_accepted_drafts, num_emitted_tokens, tau_pooled, tau_prompt_mean
    FROM acceptance JOIN evaluations USING (evaluation_id)
    WHERE evaluation_id IN (SELECT evaluation_id FROM sweep)
) AS found
JOIN evaluation_conditions AS terms USING (evaluation_id)
JOIN (SELECT evaluation_id, checkpoint_id FROM evaluations) AS of_checkpoint USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
ORDER BY run, step, slice, dataset, found.block_size;

-- Tau by tree budget, beside the tau of the chain that the same drafter drafts.
CREATE OR REPLACE VIEW tree_budgets AS
SELECT
    run, step, slice, dataset, budget, trees.tau_pooled, trees.tau_prompt_mean,
    acceptance.tau_pooled AS chain_tau_pooled, trees.tau_pooled - acceptance.tau_pooled AS gain,
    trees.num_prompts, trees.num_verification_steps, trees.num_accepted_drafts, trees.num_emitted_tokens,
    conditions, target, block_size, dtype, transcripts_digest, metrics_version, evaluation_id
FROM trees
JOIN acceptance USING (evaluation_id, slice, dataset)
JOIN evaluation_conditions AS terms USING (evaluation_id)
JOIN (SELECT evaluation_id, checkpoint_id FROM evaluations) AS of_checkpoint USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
ORDER BY run, step, slice, dataset, budget;
