# SPDX-License-Identifier: Apache-2.0
"""Typos and wrong files of `deepytorch train`: the seconds to the message, and the message.

    python tests/scripts/typos.py          # prints a table in Markdown; exits with 1 if one is slow

Each is a command of its own, as a user types it, in a folder with a few files. The processor's
seconds stand beside the clock's, which on a busy machine are more.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_S = 5.0
"""A message that takes longer was said by a process that had been started for nothing."""

TYPOS = [
    "lama_sft",
    "llama_sft step=10",
    "llama_sft lr=1e-4",
    "llama_sft num_train_epochs=3",
    "llama_sft per_device_train_batch_size=8",
    "llama_sft bf16=true",
    "llama_sft steps",
    "llama_sft steps=ten",
    "llama_sft precision=fp61",
    "llama_sft engine=deepsped",
    "llama_sft learning_rate=-1",
    "llama_sft data=alpcaa.jsonl",
    "llama_sft data=notes.docx",
    "llama_sft data=broken.jsonl",
    "llama_sft data=columns.csv",
    "llama_sft data=empty.jsonl",
    "llama_sft model=./Qwen3-8B",
    "llama_sft model=weights.safetensors",
    "llama_sft --config lama.yaml",
    "llama_sft output_dir=alpaca.jsonl",
    "resnet50_ddp data=alpaca.jsonl",
    "qwen_lora device=cuda",
    "llama_sft --compare engine=fsdp2",
    "llama_sft resume=runs/llama",
]


def files(folder: Path) -> None:
    """Write the files that the commands find where they are typed."""
    record = {"instruction": "Say hello.", "output": "Hello."}
    (folder / "alpaca.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "notes.docx").write_text("PK")
    (folder / "broken.jsonl").write_text(json.dumps(record) + "\n" + '{"instruction": "a",\n')
    (folder / "columns.csv").write_text("question,reply\nIs it?,Yes\n")
    (folder / "empty.jsonl").touch()
    (folder / "weights.safetensors").write_bytes(b"\0")
    (folder / "llama.yaml").write_text("steps: 5\n")


def tried(words: str, folder: Path) -> tuple[int, float, float, str]:
    """Exit status, seconds to the end, the processor's seconds, and what was said."""
    command = [sys.executable, "-m", "deepytorch.cli", "train", *words.split()]
    begun, spent = time.monotonic(), processor_s()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds, spent = time.monotonic() - begun, processor_s() - spent
    said = (done.stdout + done.stderr).replace(f"{folder}/", "").strip()
    return done.returncode, seconds, spent, said


def processor_s() -> float:
    """Return the seconds of processors that all processes took which this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Print the table; 0 if each was refused in one line and in time."""
    wrong = 0
    print("| `deepytorch train ...` | s | processor s | message |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files(folder)
        for words in TYPOS:
            status, seconds, spent, said = tried(words, folder)
            is_good = status == 2 and seconds < PATIENCE_S and len(said.splitlines()) == 1
            wrong += not is_good
            shown = said if len(said) < 300 else said[:300] + " ..."
            shown = shown.replace("\n", " / ").replace("|", "\\|")
            mark = "" if is_good else " **wrong**"
            print(f"| `{words}` | {seconds:.1f} | {spent:.1f} | {shown}{mark} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
