-- What the step from schema version 2 to 3 adds: tables of extras, and views with more columns.

CREATE TABLE sweep (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    block_size BIGINT NOT NULL CHECK (block_size >= 1),
    method VARCHAR NOT NULL CHECK (method IN ('prefix', 'redrafted')),
    num_prompts BIGINT NOT NULL,
    num_verification_steps BIGINT NOT NULL,
    num_accepted_drafts BIGINT NOT NULL,
    num_emitted_tokens BIGINT NOT NULL,
    tau_pooled DOUBLE CHECK (isfinite(tau_pooled)),
    tau_prompt_mean DOUBLE CHECK (isfinite(tau_prompt_mean)),
    PRIMARY KEY (evaluation_id, slice, dataset, block_size)
);

CREATE TABLE recall (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    draft_position BIGINT NOT NULL CHECK (draft_position >= 1),
    k BIGINT NOT NULL CHECK (k >= 1),
    num_blocks BIGINT NOT NULL,
    num_recalled BIGINT NOT NULL,
    num_reached BIGINT NOT NULL,
    num_reached_recalled BIGINT NOT NULL,
    recall_teacher_forced DOUBLE CHECK (isfinite(recall_teacher_forced)),
    recall_conditional DOUBLE CHECK (isfinite(recall_conditional)),
    PRIMARY KEY (evaluation_id, slice, dataset, draft_position, k)
);

CREATE TABLE trees (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    budget BIGINT NOT NULL CHECK (budget >= 1),
    num_prompts BIGINT NOT NULL,
    num_verification_steps BIGINT NOT NULL,
    num_accepted_drafts BIGINT NOT NULL,
    num_emitted_tokens BIGINT NOT NULL,
    tau_pooled DOUBLE CHECK (isfinite(tau_pooled)),
    tau_prompt_mean DOUBLE CHECK (isfinite(tau_prompt_mean)),
    PRIMARY KEY (evaluation_id, slice, dataset, budget)
);

CREATE TABLE sampled (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    temperature DOUBLE NOT NULL CHECK (isfinite(temperature) AND temperature > 0),
    rule VARCHAR NOT NULL CHECK (rule IN ('one_hot', 'sampled')),
    num_blocks BIGINT NOT NULL,
    num_judged_drafts BIGINT NOT NULL,
    num_with_drafts BIGINT NOT NULL,
    sum_first_acceptance DOUBLE NOT NULL CHECK (isfinite(sum_first_acceptance)),
    sum_expected_accepted DOUBLE NOT NULL CHECK (isfinite(sum_expected_accepted)),
    sum_accepted_on_transcript DOUBLE NOT NULL CHECK (isfinite(sum_accepted_on_transcript)),
    first_acceptance DOUBLE CHECK (isfinite(first_acceptance)),
    expected_accepted_teacher_forced DOUBLE CHECK (isfinite(expected_accepted_teacher_forced)),
    expected_accepted_at_least DOUBLE CHECK (isfinite(expected_accepted_at_least)),
    PRIMARY KEY (evaluation_id, slice, dataset, temperature, rule)
);

CREATE OR REPLACE VIEW leaderboard AS
SELECT
    rank() OVER (
        PARTITION BY target, transcripts_digest, block_size, metrics_version ORDER BY tau_pooled DESC NULLS LAST
    ) AS place,
    run, step, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_near_ties, tau_without_near_ties,
    tau_prompt_mean_without_near_ties, share_full_blocks, num_prompts, num_verification_steps,
    target, block_size, dtype, target_dtype, device, thinking, chat_template_digest, transcripts_digest,
    verification_rule, counting_rule, row_alignment, metrics_version, url, checkpoint_id, evaluation_id, started_at
FROM acceptance
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
WHERE status = 'done' AND slice = 'all'
ORDER BY tau_pooled DESC NULLS LAST, run, step, evaluation_id;

CREATE OR REPLACE VIEW learning_curve AS
WITH latest AS (
    SELECT *
    FROM evaluations
    JOIN checkpoints USING (checkpoint_id)
    WHERE status = 'done'
    QUALIFY row_number() OVER (
        PARTITION BY checkpoint_id, target, transcripts_digest, block_size, dtype
        ORDER BY started_at DESC, evaluation_id
    ) = 1
),
ranked AS (
    SELECT
        *,
        step IS NULL OR row_number() OVER (
            PARTITION BY run, step, target, transcripts_digest, block_size, dtype
            ORDER BY started_at DESC, evaluation_id
        ) = 1 AS is_newest_of_step
    FROM latest
)
SELECT
    run, step, slice, dataset, tau_pooled, ci_low, ci_high, tau_prompt_mean, num_near_ties, tau_without_near_ties,
    tau_prompt_mean_without_near_ties, num_prompts, num_verification_steps,
    bytes_read, bytes_wanted, bytes_total, total_seconds, seconds, is_newest_of_step,
    target, block_size, dtype, device, transcripts_digest, metrics_version, checkpoint_id, evaluation_id, started_at
FROM ranked
JOIN acceptance USING (evaluation_id)
ORDER BY run, step, slice, dataset, started_at;

CREATE OR REPLACE VIEW block_sizes AS
SELECT
    run, step, slice, dataset, found.block_size, method, tau_pooled, tau_prompt_mean, num_prompts,
    num_verification_steps, num_accepted_drafts, num_emitted_tokens,
    target, evaluations.block_size AS evaluated_block_size, dtype, transcripts_digest, metrics_version, evaluation_id
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
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
ORDER BY run, step, slice, dataset, found.block_size;

CREATE OR REPLACE VIEW tree_budgets AS
SELECT
    run, step, slice, dataset, budget, trees.tau_pooled, trees.tau_prompt_mean,
    acceptance.tau_pooled AS chain_tau_pooled, trees.tau_pooled - acceptance.tau_pooled AS gain,
    trees.num_prompts, trees.num_verification_steps, trees.num_accepted_drafts, trees.num_emitted_tokens,
    target, block_size, dtype, transcripts_digest, metrics_version, evaluation_id
FROM trees
JOIN acceptance USING (evaluation_id, slice, dataset)
JOIN evaluations USING (evaluation_id)
JOIN checkpoints USING (checkpoint_id)
ORDER BY run, step, slice, dataset, budget;
