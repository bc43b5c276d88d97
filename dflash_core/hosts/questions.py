"""What a host is asked: one script for a POSIX shell, one answer, one round trip.

The script needs `sh`, `sed` and what every Linux has (dash or busybox will do); Python, a GPU and
`nvidia-smi` may be absent. It writes nothing. Its answer is a list of sections: a line `@name`, then
that section's lines, each with a leading `|`, so that a file's text can never look like a section.

    @begin
    @memory
    |MemTotal:       16384 kB
    @model
    |asked /data/models
    |path /data/models/a b
    |file 1234 model.safetensors
    @config
    |{"hidden_size": 64}
    @end
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

LARGEST_CONFIG_BYTES = 2**20
LARGEST_INDEX_BYTES = 32 * 2**20
LARGEST_FOLDER_FILES = 2000
LARGEST_FOLDER_MODELS = 50

# Finds torch without importing it: an import takes seconds and may open the GPU. Runs on Python 3.4 and later.
_PYTHON_QUESTION = r"""
import os, re, sys
print("python %d.%d.%d" % sys.version_info[:3])
try:
    import importlib.util
    spec = importlib.util.find_spec("torch")
    folder = list(spec.submodule_search_locations)[0] if spec else None
    if folder:
        text = open(os.path.join(folder, "version.py")).read()
        for name in ("__version__", "cuda"):
            found = re.search(r"^%s\b[^=\n]*= *['\"]([^'\"]+)['\"]" % name, text, re.M)
            if found:
                print("torch%s %s" % ("" if name == "__version__" else "_cuda", found.group(1)))
except Exception as error:
    print("note torch cannot be read: %s" % type(error).__name__)
"""

_SCRIPT = r"""
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/nvidia/bin:/usr/lib/wsl/lib"; export PATH
section() { printf '\n@%s\n' "$1"; }
quoted() { sed 's/^/|/'; }
within() { if timeout 1 true 2>/dev/null; then timeout "$limit_s" "$@"; else "$@"; fi; }
size_of() { set -f; set -- $(ls -ldnL -- "$1" 2>/dev/null); set +f; printf '%s' "$5"; }
at_home() { case $1 in "~" | "~/"*) printf '%s' "$HOME${1#?}";; *) printf '%s' "$1";; esac; }
count_threads() { nproc || getconf _NPROCESSORS_ONLN || grep -c '^processor' /proc/cpuinfo; }

send_file() { # section name, file, largest size
    [ -f "$2" ] || return 0
    size=$(size_of "$2")
    if [ ! -r "$2" ]; then section "$1_problem"; echo "cannot be read: permission denied" | quoted
    elif [ "${size:-0}" -gt "$3" ]; then section "$1_problem"; echo "is too large: $size bytes" | quoted
    else section "$1"; quoted <"$2"; fi
}

ask_disk() {
    section disk
    place=$(at_home "$1")
    [ -e "$place" ] && kind=present || kind=absent
    while [ ! -e "$place" ]; do
        up=$(dirname -- "$place"); [ "$up" = "$place" ] && break
        place=$up
    done
    { printf 'path %s\nkind %s\n' "$1" "$kind"; df -P -k -- "$place" 2>&1; } | quoted
}

list_files() { # folder
    num=0
    for file in "$1"/* "$1"/.[!.]*; do
        if [ -f "$file" ]; then
            printf 'file %s %s\n' "$(size_of "$file")" "${file##*/}"
        elif [ -L "$file" ] && [ ! -e "$file" ]; then
            printf 'broken %s\n' "${file##*/}"
        else continue; fi
        num=$((num + 1)); [ "$num" -ge "$max_files" ] && { echo "cut"; break; }
    done
}

send_model() { # path as asked, path found
    section model
    if [ -d "$2" ] && [ -r "$2" ] && [ -x "$2" ]; then kind=folder
    elif [ -d "$2" ]; then kind=denied
    elif [ -f "$2" ]; then kind=file
    else kind=absent; fi
    {
        printf 'asked %s\npath %s\nkind %s\n' "$1" "$2" "$kind"
        case $kind in folder) list_files "$2";; file) printf 'file %s %s\n' "$(size_of "$2")" "${2##*/}";; esac
    } | quoted
    [ "$kind" = folder ] || return 0
    send_file config "$2/config.json" "$max_config"
    for index in model.safetensors.index.json pytorch_model.bin.index.json; do
        [ -f "$2/$index" ] && { send_file index "$2/$index" "$max_index"; break; }
    done
}

ask_models() { # a model's own folder or file, or a folder that holds models, one or two levels or a hub cache deep
    place=$(at_home "$1")
    for own in "$place"/config.json "$place"/*.safetensors "$place"/*.bin "$place"/*.gguf; do
        [ -e "$own" ] && { send_model "$1" "$place"; return 0; }
    done
    found=0
    for inner in "$place"/*/config.json "$place"/*/*/config.json "$place"/*/snapshots/*/config.json; do
        [ -e "$inner" ] || continue
        send_model "$1" "${inner%/config.json}"
        found=$((found + 1)); [ "$found" -ge "$max_models" ] && break
    done
    [ "$found" -gt 0 ] || send_model "$1" "$place"
}

ask_memory() {
    section memory; cat /proc/meminfo 2>/dev/null | quoted
    section cgroup
    for folder in /sys/fs/cgroup /sys/fs/cgroup/memory; do
        for file in memory.max memory.current memory.limit_in_bytes memory.usage_in_bytes; do
            [ -r "$folder/$file" ] && printf '%s %s\n' "$file" "$(cat "$folder/$file" 2>/dev/null)" | quoted
        done
        grep -E '^(in)?active_file ' "$folder/memory.stat" 2>/dev/null | quoted
    done
}

ask_gpus() {
    section gpus
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    fields=index,name,memory.total,memory.used,driver_version
    answer=$(within nvidia-smi --query-gpu="$fields,compute_cap" --format=csv,noheader,nounits 2>&1)
    case $? in
        0) ;;
        124) answer="no answer within $limit_s s" ;;
        *) answer=$(within nvidia-smi --query-gpu="$fields" --format=csv,noheader,nounits 2>&1) ;;
    esac
    printf '%s\n' "$answer" | quoted
}

ask() {
    section begin
    section system; uname -srm 2>&1 | quoted
    section load; cat /proc/loadavg 2>/dev/null | quoted
    ask_memory
    section cpu; sed '/^$/q' /proc/cpuinfo 2>/dev/null | quoted
    section threads; count_threads 2>/dev/null | quoted
    section python; (cd / && within "$python" -c "$python_question" 2>/dev/null) | quoted
    ask_gpus
    ask_places
    section end
}
"""


def probe_script(
    *, models: Sequence[str] = (), disks: Sequence[str] = ("/",), python: str = "python3", limit_s: int = 10
) -> str:
    """Return the script that asks one host everything.

    Args:
        models: folders of models; a leading `~/` is the home folder on the host that is asked.
        disks: folders whose disks are of interest.
        python: the interpreter to ask for its version and for torch.
        limit_s: seconds that `nvidia-smi` and Python may take each, where the host has `timeout`.
    """
    settings = {
        "python": python,
        "python_question": _PYTHON_QUESTION,
        "limit_s": str(limit_s),
        "max_config": str(LARGEST_CONFIG_BYTES),
        "max_index": str(LARGEST_INDEX_BYTES),
        "max_files": str(LARGEST_FOLDER_FILES),
        "max_models": str(LARGEST_FOLDER_MODELS),
    }
    head = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    places = [f"ask_disk {shlex.quote(path)}" for path in disks]
    places += [f"ask_models {shlex.quote(path)}" for path in models]
    body = "".join(f"    {line}\n" for line in [*places, ":"])
    # The shell reads this script from its standard input: no command in it may read from there, and
    # nothing runs before all of it has arrived.
    return f"{head}{_SCRIPT}\nask_places() {{\n{body}}}\n\nask </dev/null\n"
