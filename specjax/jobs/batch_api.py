"""Lines and results of the OpenAI batch API, which other engines read and write too: `--format openai`.

A line is `{"custom_id": ..., "url": ..., "body": {...}}`, whose body is a request to the endpoint. A result has the same
`custom_id`, and the endpoint's response or an error. A job keeps records of its own until its end, so it goes on after a kill.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, BinaryIO

from specjax.jobs import jsonl
from specjax.models.on_disk import replace

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""The endpoints, and the field of a body that holds the prompt."""
_BESIDE = ("custom_id", "method", "url", "body")
_ENDS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclasses.dataclass
class BatchForm:
    """Makes lines of a job from lines of the batch API. It serves one file, in which no two lines may have the same name.

    Attributes:
      count: completions of each line.
      logprobs: whether records have log-probabilities.
      seen: the number of the line that has a name.
    """

    count: int = 1
    logprobs: bool = False
    seen: dict[str, int] = dataclasses.field(default_factory=dict)

    def __call__(self, number: int, content: dict[str, Any]) -> jsonl.Line:
        """The line of an object; a `jsonl.Form`."""
        name = content.get("custom_id")
        name = name if isinstance(name, str) else None
        if jsonl.deeper(content):
            return jsonl.Line(number, id=name, error=f"nested more than {jsonl.DEEPEST} levels deep")
        try:
            body = self._body(number, content)
        except ValueError as error:
            return jsonl.Line(number, id=name, error=str(error))
        line = jsonl.from_object(number, body | {"id": name})
        unknown = tuple(key for key in content if key not in _BESIDE)
        return dataclasses.replace(line, unknown=(*line.unknown, *unknown))

    def _body(self, number: int, content: dict[str, Any]) -> dict[str, Any]:
        """The body as an object of ours, without what the job does anyway."""
        name, body = content.get("custom_id"), content.get("body")
        if not isinstance(name, str) or not name:
            raise jsonl.LineError("with --format openai a line needs a custom_id, which is a string")
        if (first := self.seen.setdefault(name, number)) != number:
            raise jsonl.LineError(f"line {first} has the same custom_id")
        if not isinstance(body, dict):
            raise jsonl.LineError("with --format openai a line needs a body, which is an object")
        url, method = content.get("url") or _endpoint(body), content.get("method") or "POST"
        if not isinstance(url, str) or url not in ENDPOINTS or method != "POST":
            raise jsonl.LineError(f"it asks for {method} {url}; there is POST {' and '.join(ENDPOINTS)}")
        other = next(field for field in ENDPOINTS.values() if field != ENDPOINTS[url])
        if body.get(other) is not None:
            raise jsonl.LineError(f"a body for {url} has {ENDPOINTS[url]}, and this one has {other}")
        if self.count > 1 and body.get("n", self.count) != self.count:
            raise jsonl.LineError(f"it asks for n {body['n']}, and --num-return-sequences is {self.count}")
        done = {"n": body.get("n") == self.count, "logprobs": self.logprobs and body.get("logprobs") is True}
        return _constrained({key: value for key, value in body.items() if not done.get(key)})


def _endpoint(body: dict[str, Any]) -> str:
    """The endpoint of a line that names none, as some systems leave it out."""
    return next((url for url, field in ENDPOINTS.items() if body.get(field) is not None), next(iter(ENDPOINTS)))


def _constrained(body: dict[str, Any]) -> dict[str, Any]:
    """A body whose `response_format` is a constraint."""
    form = body.get("response_format")
    if form is None:
        return body
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {key: value for key, value in body.items() if key != "response_format"}
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema" and isinstance(own := form.get("json_schema"), dict) and "schema" in own:
        schema = own["schema"]
    else:
        raise jsonl.LineError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": ...}}'
        )
    if body.get("constraint") is not None:
        raise jsonl.LineError("it has response_format and constraint: leave one out")
    rest = {key: value for key, value in body.items() if key != "response_format"}
    return rest | {"constraint": {"json": schema}}


def check(output: str | None, source: str | None, plain: bool) -> None:
    """Raises ValueError if a job cannot read its lines or write its results in this form.

    Args:
      output: the file of results; None if there is none.
      source: the file of lines.
      plain: whether the output is neither packed nor at a URL.
    """
    if source is None or output is None or not plain:
        raise ValueError(
            "--format openai reads a file of lines and writes a file of results at its end: give --input and "
            "--output FILE.jsonl, on this machine and not compressed"
        )


def journal(output: str) -> str:
    """The file of records that a job appends to until its end."""
    return f"{output}.records.jsonl"


def is_chat(line: jsonl.Line) -> bool:
    """Whether a line has messages, and not a prompt."""
    return isinstance(line.prompt, list) and bool(line.prompt) and isinstance(line.prompt[0], dict)


def _records(lines: BinaryIO, places: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The records that begin at these places of a file, the last of each three numbers."""
    found = []
    for *_, start in places:
        lines.seek(start)
        found.append(json.loads(lines.readline()))
    return found


@dataclasses.dataclass(frozen=True)
class Results:
    """Writes the results of a job that has ended.

    Attributes:
      model: its name.
      sizes: the number of a prompt's tokens, by its line.
      chats: the lines whose endpoint is that of chats.
      tokenizer: the model's; None if there is none.
    """

    model: str
    sizes: Mapping[int, int]
    chats: frozenset[int] = frozenset()
    tokenizer: Any = None

    def write(self, path: str | os.PathLike[str], records: str | os.PathLike[str]) -> None:
        """Writes a file of results from the records of a job, atomically: one line for each line of the input.

        Raises:
          OSError: if that fails.
        """
        created = int(time.time())
        with open(records, "rb") as lines:
            places, start = [], 0  # of every record: its line, its number, and where it begins
            for own in lines:
                record = json.loads(own)
                places.append((record["line"], record.get("sample") or 0, start))
                start += len(own)
            groups = (_records(lines, own) for _, own in groupby(sorted(places), key=lambda place: place[0]))
            replace(path, (f"{jsonl.dumps(self.result(own, created))}\n".encode() for own in groups))

    def result(self, records: list[dict[str, Any]], created: int) -> dict[str, Any]:
        """The result of a line from its records, completions in order."""
        first = records[0]
        line = first["line"]
        wrong = next((record["error"] for record in records if record.get("error") is not None), None)
        about = {"id": f"batch_req_{line}", "custom_id": first.get("id")}
        if wrong is not None:
            return about | {"response": None, "error": {"code": "invalid_request", "message": wrong}}
        body = self._body(records, created)
        return about | {"response": {"status_code": 200, "request_id": f"req_{line}", "body": body}, "error": None}

    def _body(self, records: list[dict[str, Any]], created: int) -> dict[str, Any]:
        line = records[0]["line"]
        chat = line in self.chats
        read, new = self.sizes[line], sum(record["new_tokens"] for record in records)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{line}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": self.model,
            "choices": [self._choice(number, record, chat) for number, record in enumerate(records)],
            "usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new},
        }

    def _choice(self, number: int, record: dict[str, Any], chat: bool) -> dict[str, Any]:
        text = {"message": {"role": "assistant", "content": record["text"]}} if chat else {"text": record["text"]}
        logprobs = None
        if record.get("logprobs") is not None:
            logprobs = self._of_chat(record) if chat else self._of_text(record)
        return {"index": number, **text, "logprobs": logprobs, "finish_reason": _ENDS[record["finish_reason"]]}

    def _of_chat(self, record: dict[str, Any]) -> dict[str, Any]:
        each = zip(self._words(record), record["logprobs"], strict=True)
        whole = lambda word: None if "\ufffd" in word else list(word.encode())  # half a character has no text
        shown = [{"token": word, "logprob": value, "bytes": whole(word), "top_logprobs": []} for word, value in each]
        return {"content": shown}

    def _of_text(self, record: dict[str, Any]) -> dict[str, Any]:
        words = list(self._words(record))
        return {"tokens": words, "token_logprobs": record["logprobs"], "top_logprobs": None}

    def _words(self, record: dict[str, Any]) -> Iterator[str]:
        """The text of every token, or its number without a tokenizer."""
        return (str(token) if self.tokenizer is None else self.tokenizer.decode([token]) for token in record["tokens"])
