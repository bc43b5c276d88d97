"""Every error this project raises on purpose, in one tree.

    DFlashEvalError
    ├── InputError                what the user typed or wrote is wrong (exit status 2)
    │   ├── ConfigError           the YAML file: unknown key, wrong type, impossible value
    │   ├── PromptError           the prompt file: empty, malformed, too long for the target
    │   ├── TargetError           the target folder: missing, incomplete, of an unknown kind
    │   ├── DraftConfigError      the draft config: a fact is missing, or two of them contradict
    │   ├── QueryError            a SQL statement that is not a read, or does not run
    │   └── CheckpointError       the checkpoint cannot be scored
    │       ├── CheckpointNotFound     nothing at that address, or no checkpoint in that folder
    │       ├── CheckpointNotReady     still being written
    │       ├── CheckpointCorrupt      cut off, or its bytes contradict its own index
    │       ├── CheckpointChanged      replaced while it was read
    │       ├── CheckpointVanished     deleted, renamed or rotated away after it was found (exit status 1)
    │       ├── UnsupportedCheckpoint  readable, but of a kind we refuse by name
    │       └── CheckpointMismatch     made for another target, or against its own config
    ├── HostError                 a machine could not be used (exit status 2)
    │   ├── HostUnreachable       no answer, refused, or too slow
    │   └── HostKeyUnknown        its host key is not in known_hosts
    ├── ServerError               a server of the target gave no answer, or not a whole one (exit status 2)
    │   └── ServerMismatch        it serves another model, or has another tokenizer or template
    ├── NotDelivered              a webhook did not take a notification (exit status 2)
    ├── DoesNotFit                the job needs more memory or disk than there is (exit status 2)
    ├── PreparationFailed         the target's part of the work, handed to another machine, did not come
    ├── ShapeMismatch             two tensors that belong together have different shapes
    ├── ArtifactDamaged           something in the store is not what its manifest says
    └── ResultsError              the results database cannot be read or written
        └── NoResults                 there is none yet (exit status 2)

A message says what is wrong with its value, what was expected, where, and what to do next; it
starts in lower case and fits one line. `exit_status` is what `dflash-eval` ends with, `status` what the
results say of a checkpoint that was not scored for it.
"""


class DFlashEvalError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_status = 1
    status = "failed"


class InputError(DFlashEvalError, ValueError):
    """Raised when what the user gave is wrong and nothing was done."""

    exit_status = 2


class ConfigError(InputError):
    """Raised when the configuration file is missing, malformed or holds an impossible value."""


class PromptError(InputError):
    """Raised when the prompt file is missing, empty, malformed or does not fit the target."""


class TargetError(InputError):
    """Raised when the target model is missing, incomplete or of a kind that cannot be read."""


class DraftConfigError(InputError):
    """Raised when a fact about the drafter is missing or two sources of it contradict."""


class QueryError(InputError):
    """Raised when a SQL statement is not a plain read or does not run."""


class CheckpointError(InputError):
    """Base of the reasons why one checkpoint cannot be scored."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """Raised when nothing lies at the address, or the folder holds no checkpoint."""


class CheckpointNotReady(CheckpointError):
    """Raised when the checkpoint is still being written."""


class CheckpointCorrupt(CheckpointError):
    """Raised when the file is cut off or its bytes contradict its own index."""


class CheckpointChanged(CheckpointError):
    """Raised when the checkpoint was replaced while it was being read."""


class CheckpointVanished(CheckpointError):
    """Raised when a checkpoint that was found is gone before all of it was read: rotated away, or renamed."""

    exit_status = 1
    status = "vanished"


class UnsupportedCheckpoint(CheckpointError):
    """Raised when the checkpoint can be read but is of a kind that is refused by name."""


class CheckpointMismatch(CheckpointError):
    """Raised when the drafter was made for another target or contradicts its own config."""


class HostError(DFlashEvalError, ConnectionError):
    """Base of the reasons why a machine could not be used."""

    exit_status = 2


class HostUnreachable(HostError):
    """Raised when a host gives no answer, refuses the connection or the login, or is too slow."""


class HostKeyUnknown(HostError):
    """Raised when a host's key is not in its known_hosts file."""


class ServerError(DFlashEvalError, ConnectionError):
    """Raised when a server of the target gives no answer, refuses, or answers with less than a whole completion."""

    exit_status = 2


class ServerMismatch(ServerError):
    """Raised when a server serves another model than the target, or reads prompts differently: tokenizer, template."""


class NotDelivered(DFlashEvalError, ConnectionError):
    """Raised when a webhook gives no answer to a notification, or refuses it; its address is never in the message."""

    exit_status = 2


class DoesNotFit(DFlashEvalError, MemoryError):
    """Raised when a job needs more memory or disk than the machine has; nothing was loaded."""

    exit_status = 2


class PreparationFailed(DFlashEvalError):
    """Raised when the target's part was handed to a deployment whose run failed, or that no worker takes."""


class ShapeMismatch(DFlashEvalError, ValueError):
    """Raised when tensors that belong together do not have the same shape."""


class ArtifactDamaged(DFlashEvalError):
    """Raised when an artifact in the store is not what its manifest says."""


class ResultsError(DFlashEvalError):
    """Raised when the results database cannot be read or written."""


class NoResults(ResultsError, FileNotFoundError):
    """Raised when there is no results database yet, or nothing was ever written to it."""

    exit_status = 2


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line, with its type when the message is empty."""
    text = " ".join(str(error).split())
    return text or type(error).__name__
