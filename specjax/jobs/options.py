"""The options of `specjax generate`: one frozen value that passes from the command line to the workers of a cluster."""

import dataclasses

from specjax.serve.options import DecodeOptions, ModelOptions, PromptOptions, RunOptions, option

PIPE = "-"
"""The name of standard input for `--input`, and of standard output for `--output`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of a job on a Ray cluster.

    Attributes:
      ray: the cluster's address, `auto`, `local`, or None: no cluster.
      ray_workers: the number of engines; None: as many as fit.
    """

    ray: str | None = option(
        None, "map --input over a Ray cluster: its address, auto, or local for this machine", metavar="ADDRESS"
    )
    ray_workers: int | None = option(
        None, "engines on the Ray cluster, each with its own --mesh (default: as many as fit)", metavar="N"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of a job that several processes do together.

    Attributes:
      distributed: whether the cluster names the processes.
      coordinator: the address at which process 0 listens.
      num_processes: the number of processes; None: the cluster knows.
      process_id: the number of this process; None: the cluster knows.
      words: the command line from which the options come.
    """

    distributed: bool = option(False, "share the job among the processes of a TPU pod, GKE or Slurm")
    coordinator: str | None = option(
        None, "share the job among many processes; process 0 listens at this address", metavar="HOST:PORT"
    )
    num_processes: int | None = option(None, "number of processes (default: from the cluster)", metavar="N")
    process_id: int | None = option(None, "number of this process, from 0 (default: from the cluster)", metavar="I")
    words: tuple[str, ...] = option((), "", hidden=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The source of prompts and the destination of records.

    Attributes:
      prompts: given as words.
      suffix: for a diffusion model: the text after the new text; `max_new_tokens` tokens are filled in before it.
      input: a file of prompts, or `-`.
      output: a file for records, or `-`.
      learn: a folder for a draft model that learns while the job runs.
      draft_mesh: the drafter's own mesh.
      prefix_cache_file: a file with which the prefix cache begins, if it exists, and to which it is written at the end.
      unordered: whether records are written as they finish.
      format: the form of lines and records; None: the package's own.
      progress: whether to report progress on stderr now and then.
      page: a file for a page that shows how far the job is.
      metrics: a file to which its measures are appended, or `otel` for OpenTelemetry.
      strict: whether a bad line ends the job.
      verbose: whether stderr describes how the loaded files are read.
      json: whether records are printed as JSON.
    """

    prompts: tuple[str, ...] = option(
        (), "text to complete (default: what is piped in)", metavar="PROMPT", nargs="*", positional=True
    )
    suffix: str | None = option(
        None, "text after the gap: a diffusion model fills --max-new-tokens tokens before it", metavar="TEXT"
    )
    input: str | None = option(
        None,
        "lines of {prompt or messages, optionally id, suffix, stop and options}, or - for stdin; also .jsonl.gz, .parquet or "
        ".tar, a folder or pattern of them, a URL",
        metavar="FILE.jsonl",
    )
    output: str | None = option(
        None,
        "append records to this file (or .jsonl.gz, .parquet, .tar, a URL); the same command resumes a killed run; "
        "- prints them",
        metavar="FILE.jsonl",
    )
    learn: str | None = option(
        None,
        "the draft model of --drafter learns from the target's corrections; the folder keeps it, and goes on",
        metavar="FOLDER",
    )
    draft_mesh: str | None = option(
        None,
        "the drafter has devices of its own, those that follow --mesh's, and drafts there while the target reads",
        metavar="AXIS=N,...",
    )
    prefix_cache_file: str | None = option(
        None, "begin --prefix-cache with what this file has of read prompts, and write it at the end", metavar="FILE"
    )
    unordered: bool = option(False, "write records as they finish, not in the order of --input")
    format: str | None = option(
        None,
        "openai: lines are requests of the OpenAI batch API (custom_id, body), and --output gets its results when all are done",
        choices=("openai",),
    )
    progress: bool = option(False, "report progress every ten seconds if stderr is not a terminal")
    page: str | None = option(
        None, "keep a page of one file up to date, which shows in a browser how far the job is", metavar="FILE.html"
    )
    metrics: str | None = option(
        None,
        "append records, tokens, speed and time left to this file every two seconds, as JSON lines; otel: send them to "
        "OpenTelemetry",
        metavar="FILE.jsonl",
    )
    strict: bool = option(False, "stop at the first bad line of --input, before any work")
    verbose: bool = option(
        False, "report on stderr how models and heads are read, such as the layers that a published head taps"
    )
    json: bool = option(False, "print records as JSON, one per line")

    @property
    def file(self) -> str | None:
        """The output if it is a file."""
        return None if self.output == PIPE else self.output

    @property
    def prints_json(self) -> bool:
        """Whether records go to stdout as JSON."""
        return self.json or self.output == PIPE

    @property
    def ends_softly(self) -> bool:
        """Whether a first Ctrl-C lets the running call finish: if records are kept or counted."""
        return self.input is not None or self.output is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(RayOptions, HostOptions, FileOptions, RunOptions, PromptOptions, DecodeOptions, ModelOptions):
    """All options of `specjax generate`."""
