-- The results database, schema version 3; `migrations.py` has the steps that lead here. Every column is defined in results/README.md.
-- A missing number is NULL; NaN and infinity are refused. Times are UTC.

CREATE TABLE meta (
    schema_version INTEGER NOT NULL
);

CREATE TABLE checkpoints (
    checkpoint_id VARCHAR PRIMARY KEY,
    run VARCHAR NOT NULL,
    step BIGINT,
    url VARCHAR NOT NULL,
    layout VARCHAR,
    identity VARCHAR,
    weights_sha256 VARCHAR,
    bytes_total BIGINT CHECK (bytes_total >= 0),
    bytes_wanted BIGINT CHECK (bytes_wanted >= 0)
);

CREATE TABLE evaluations (
    evaluation_id VARCHAR PRIMARY KEY,
    checkpoint_id VARCHAR NOT NULL,
    status VARCHAR NOT NULL CHECK (status IN ('done', 'failed', 'vanished')),
    error VARCHAR,
    target VARCHAR NOT NULL,
    block_size BIGINT CHECK (block_size >= 1),
    num_drafts BIGINT CHECK (num_drafts >= 0),
    device VARCHAR,
    dtype VARCHAR,
    target_dtype VARCHAR,
    transcripts_digest VARCHAR,
    thinking BOOLEAN,
    chat_template_digest VARCHAR,
    verification_rule VARCHAR,
    counting_rule VARCHAR,
    row_alignment VARCHAR,
    metrics_version VARCHAR,
    extraction_version VARCHAR,
    packages JSON,
    spec JSON NOT NULL,
    started_at TIMESTAMP NOT NULL,
    seconds JSON NOT NULL,
    total_seconds DOUBLE NOT NULL CHECK (isfinite(total_seconds) AND total_seconds >= 0),
    bytes_read BIGINT NOT NULL CHECK (bytes_read >= 0),
    cached JSON NOT NULL,
    CHECK ((status = 'done') = (error IS NULL))
);

CREATE TABLE prompts (
    transcripts_digest VARCHAR NOT NULL,
    prompt_id VARCHAR NOT NULL,
    dataset VARCHAR NOT NULL,
    prompt_group VARCHAR,
    num_prompt_tokens BIGINT NOT NULL,
    num_response_tokens BIGINT NOT NULL,
    stop_reason VARCHAR NOT NULL,
    prompt_text VARCHAR NOT NULL,
    response_text VARCHAR NOT NULL,
    PRIMARY KEY (transcripts_digest, prompt_id)
);

-- No primary key: an index over millions of rows would cost more than it guards. Rows of one
-- evaluation are checked before they are written and replaced as a whole.
CREATE TABLE blocks (
    evaluation_id VARCHAR NOT NULL,
    prompt_id VARCHAR NOT NULL,
    anchor_index BIGINT NOT NULL CHECK (anchor_index >= 0),
    walk_step BIGINT CHECK (walk_step >= 0),
    is_on_walk BOOLEAN NOT NULL,
    num_drafted BIGINT NOT NULL,
    num_available BIGINT NOT NULL CHECK (num_available BETWEEN 0 AND num_drafted),
    num_accepted_drafts BIGINT NOT NULL CHECK (num_accepted_drafts BETWEEN 0 AND num_available),
    num_emitted_tokens BIGINT NOT NULL CHECK (num_emitted_tokens BETWEEN 1 AND num_accepted_drafts + 1),
    is_near_tie BOOLEAN,
    miss_rank BIGINT CHECK (miss_rank >= 1),
    CHECK (is_on_walk = (walk_step IS NOT NULL))
);

CREATE TABLE acceptance (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    num_prompts BIGINT NOT NULL,
    num_verification_steps BIGINT NOT NULL,
    num_drafted_tokens BIGINT NOT NULL,
    num_accepted_drafts BIGINT NOT NULL,
    num_emitted_tokens BIGINT NOT NULL,
    num_full_blocks BIGINT NOT NULL,
    num_near_ties BIGINT,
    num_anchors BIGINT NOT NULL,
    tau_pooled DOUBLE CHECK (isfinite(tau_pooled)),
    ci_low DOUBLE CHECK (isfinite(ci_low)),
    ci_high DOUBLE CHECK (isfinite(ci_high)),
    tau_prompt_mean DOUBLE CHECK (isfinite(tau_prompt_mean)),
    tau_all_anchors DOUBLE CHECK (isfinite(tau_all_anchors)),
    num_prompts_without_near_ties BIGINT,
    num_emitted_without_near_ties BIGINT,
    tau_without_near_ties DOUBLE CHECK (isfinite(tau_without_near_ties)),
    tau_prompt_mean_without_near_ties DOUBLE CHECK (isfinite(tau_prompt_mean_without_near_ties)),
    acceptance_rate DOUBLE CHECK (isfinite(acceptance_rate)),
    share_full_blocks DOUBLE CHECK (isfinite(share_full_blocks)),
    PRIMARY KEY (evaluation_id, slice, dataset)
);

CREATE TABLE survival (
    evaluation_id VARCHAR NOT NULL,
    slice VARCHAR NOT NULL CHECK (slice IN ('all', 'dataset', 'group')),
    dataset VARCHAR NOT NULL,
    draft_position BIGINT NOT NULL CHECK (draft_position >= 1),
    num_blocks BIGINT NOT NULL,
    num_available BIGINT NOT NULL,
    num_survived BIGINT NOT NULL,
    survival DOUBLE CHECK (isfinite(survival)),
    conditional_acceptance DOUBLE CHECK (isfinite(conditional_acceptance)),
    PRIMARY KEY (evaluation_id, slice, dataset, draft_position)
);

-- The four below hold rows only where they were asked for (`drafter.extras`).
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

CREATE TABLE hosts (
    name VARCHAR PRIMARY KEY,
    url VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    problem VARCHAR,
    probed_at TIMESTAMP NOT NULL,
    facts JSON
);

-- Per prompt: what the serving walk did there.
CREATE VIEW prompt_acceptance AS
SELECT
    walk.evaluation_id, checkpoints.run, checkpoints.step, walk.prompt_id, prompts.dataset, prompts.prompt_group,
    walk.num_verification_steps, walk.num_accepted_drafts, walk.num_emitted_tokens, walk.num_near_ties,
    walk.num_emitted_tokens / walk.num_verification_steps AS tau,
    evaluations.target, evaluations.block_size, evaluations.dtype, evaluations.metrics_version,
    evaluations.transcripts_digest
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
JOIN prompts ON prompts.transcripts_digest = evaluations.transcripts_digest AND prompts.prompt_id = walk.prompt_id;

-- Best first. `place` counts only among evaluations that may be compared.
CREATE VIEW leaderboard AS
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

-- Tau against step. Of several evaluations of one checkpoint under the same conditions the latest.
CREATE VIEW learning_curve AS
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

-- Every ordered pair of evaluations that may be compared, prompt by prompt.
CREATE VIEW paired AS
SELECT
    a.evaluation_id AS evaluation_a, a.run AS run_a, a.step AS step_a,
    b.evaluation_id AS evaluation_b, b.run AS run_b, b.step AS step_b,
    a.prompt_id, a.dataset, a.prompt_group,
    a.num_verification_steps AS num_verification_steps_a, a.num_emitted_tokens AS num_emitted_tokens_a,
    b.num_verification_steps AS num_verification_steps_b, b.num_emitted_tokens AS num_emitted_tokens_b,
    a.tau AS tau_a, b.tau AS tau_b, b.tau - a.tau AS difference,
    a.target, a.block_size, a.transcripts_digest, a.metrics_version
FROM prompt_acceptance AS a
JOIN prompt_acceptance AS b
    ON a.prompt_id = b.prompt_id
    AND a.transcripts_digest = b.transcripts_digest
    AND a.target = b.target
    AND a.block_size = b.block_size
    AND a.metrics_version IS NOT DISTINCT FROM b.metrics_version
    AND a.evaluation_id <> b.evaluation_id;

-- Tau by block size: the evaluation's own block and the shorter ones of the sweep.
CREATE VIEW block_sizes AS
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

-- Tau by tree budget, beside the tau of the chain that the same drafter drafts.
CREATE VIEW tree_budgets AS
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
