"""The layout of `specjax COMMAND --help`: options by topic, and examples. Names after a `|` need `--help all`."""

from specjax.terminal import Help

_MODEL = "model weights mesh | dtype adapter longest cache_dtype reduce_dtype"
_HOSTS = "| distributed coordinator num_processes process_id ray ray_workers"
_QUESTION = '--chat "Sort the words: pear apple fig"'
_TEXT = '"[ hen, dog, hen,"'

HELPS: dict[str, Help] = {
    "generate": Help(
        {
            "prompts and records": "prompts chat input output json | suffix format unordered progress page metrics strict "
            "verbose logprobs prompt_logprobs",
            "the model": _MODEL,
            "how to decode": "decode drafter batch_size | draft_mesh learn num_return_sequences select "
            "shared_prefix prefix_cache prefix_cache_file",
            "how a prompt is completed": "temperature top_p max_new_tokens seed stop sampling | top_k constraint ignore_eos",
            "many processes": _HOSTS,
        },
        (
            f"specjax generate --drafter draft --temperature 0.8 {_QUESTION}",
            "specjax generate --model FOLDER --input prompts.jsonl --output out.jsonl",
        ),
    ),
    "score": Help(
        {
            "texts and scores": "input output | strict",
            "the model": _MODEL,
            "how texts are read": "batch_size samples",
        },
        (
            "specjax score --input pairs.jsonl",
            "specjax score --model FOLDER --input pairs.jsonl --output scores.jsonl",
        ),
    ),
    "bench": Help(
        {
            "what is compared": "suite drafter decode peer | beside widen compare kind alone",
            "on which prompts": "prompts input tasks | samples",
            "the model": _MODEL,
            "how they are completed": "max_new_tokens temperature batch_size repeats | seed ignore_eos compile_limit "
            "text_limit",
            "what is written": "json plot | answers coverage",
        },
        (
            "specjax bench --drafter draft,eagle3 --prompts 10",
            "specjax bench --model tiny-diffusion --decode threshold:cache=dual --plot speed.png",
        ),
    ),
    "eval": Help(
        {
            "questions": "families limit level questions | samples infill",
            "the model": "model weights | mesh dtype adapter longest cache_dtype reduce_dtype",
            "how to decode": "decode drafter batch_size | num_return_sequences select",
            "comparisons": "compare | baseline margin trust",
            "how a question is answered": "temperature max_new_tokens seed | top_k top_p stop constraint task_constraint "
            "ignore_eos sampling",
            "what is written": "answers json plot | uncertainty",
        },
        (
            "specjax eval --families math,lists --limit 20 --compare drafter=none",
            "specjax eval --model FOLDER --questions own.jsonl --trust --compare weights=int8",
        ),
    ),
    "check-head": Help(
        {
            "what is checked": "model head prompts",
            "how": "max_new_tokens batch_size dtype adapter strict",
            "what is written": "json",
        },
        (
            "specjax check-head tiny tiny-eagle3",
            "specjax check-head TARGET 'eagle3:model=HEAD,taps=1 15 28' prompts.jsonl",
        ),
    ),
    "train": Help(
        {
            "what is trained": "drafter target output | draft draft_config reference draft_vocabulary start adapter",
            "on what text": "data prompts features held_out | max_new_tokens length patience seed",
            "how long": "steps batch_size learning_rate resume | accumulate warmup weight_decay clip clip_by loss "
            "checkpoint_every",
            "where": "mesh plot | weights dtype compute_dtype save_dtype",
            "many processes": _HOSTS,
        },
        (
            "specjax train eagle3 --target FOLDER --data texts.jsonl --output head",
            "specjax train distill --draft tiny-draft --prompts prompts.jsonl --output draft",
        ),
    ),
    "train hmm": Help(
        {
            "what is learned": "target states output | weights dtype mesh",
            "on what text": "data prompts | max_new_tokens length seed",
            "how long": "rounds | tolerance batch_size",
        },
        (
            "specjax train hmm --prompts prompts.jsonl --states 64 --output hmm",
            "specjax train hmm --target FOLDER --data answers.jsonl --output hmm",
        ),
    ),
    "train evopress": Help(
        {
            "what is searched": "what target budget output | legal levels group cache dtype mesh",
            "on what text": "data prompts | max_new_tokens length seed",
            "how it is searched": "generations offspring survivors tokens | initial initial_tokens mutations fitness top_k "
            "batch_size",
        },
        (
            "specjax train evopress drops --target FOLDER --data texts.jsonl --output drops.txt",
            "specjax train evopress bits --target FOLDER --data texts.jsonl --budget 6 --output bits.txt",
        ),
    ),
    "capture": Help(
        {
            "what is captured": "drafter target output top_k | rows_per_file save_dtype adapter",
            "on what text": "data prompts length | max_new_tokens seed",
            "how it is read": "batch_size mesh | weights dtype",
            "many processes": _HOSTS,
        },
        (
            "specjax capture eagle3 --target FOLDER --data texts.jsonl --output features",
            "specjax capture eagle3 --prompts prompts.jsonl --output features --top-k 64",
        ),
    ),
    "datastore": Help(
        {"what is built": "action files output model"},
        (
            "specjax datastore build docs --output store",
            "specjax datastore build answers.txt notes.txt --model FOLDER --output store",
        ),
    ),
    "convert": Help(
        {"what is written": "model output layout format target", "how it is loaded": "dtype adapter config mesh"},
        (
            "specjax convert FOLDER checkpoint",
            "specjax convert tiny-eagle3 head --format eagle3",
        ),
    ),
    "plan": Help(
        {
            "the model and the chips": "model topology mesh weights | config dtype cache_dtype reduce_dtype rates",
            "a step": "batch context decode drafter memory on_host | accepted tokens_per_step sampled whole",
            "what is written": "json plot",
        },
        (
            "specjax plan --model meta-llama/Llama-3.1-8B --topology v5e:2x2",
            "specjax plan --model meta-llama/Llama-3.1-8B --topology h100:8 --batch 1,8,32",
        ),
    ),
    "plan train": Help(
        {
            "the head, its target and the chips": "drafter target topology mesh weights | config dtype compute_dtype rates",
            "an update": "batch_size length features | accumulate draft_vocabulary loss whole",
            "what is written": "json",
        },
        (
            "specjax plan train eagle3 --target meta-llama/Llama-3.1-8B --topology v5e:4x4",
            "specjax plan train medusa --target meta-llama/Llama-3.1-8B --topology h100:8 --features",
        ),
    ),
    "drafters": Help(
        {"one drafter": "model drafter"},
        (
            "specjax drafters",
            "specjax drafters --model tiny --drafter eagle3:model=tiny-eagle3",
        ),
    ),
    "verifiers": Help({}, ("specjax verifiers", f"specjax generate --drafter draft:verifier=typical {_QUESTION}")),
    "samplers": Help({}, ("specjax samplers", f"specjax generate --temperature 1 --sampling top_h=0.4 {_TEXT}")),
    "constraints": Help({}, ("specjax constraints", f'specjax generate --constraint "choice:yes|no" {_QUESTION}')),
    "searches": Help({}, ("specjax searches", f"specjax generate --decode beam:num_beams=4 {_QUESTION}")),
    "policies": Help(
        {}, ("specjax policies", f"specjax generate --model tiny-diffusion --decode threshold:cache=dual {_QUESTION}")
    ),
    "models": Help({}, ("specjax models", f"specjax generate --model tiny-diffusion {_QUESTION}")),
    "completion": Help(
        {"the shell": "shell"},
        (
            "specjax completion bash > ~/.local/share/bash-completion/completions/specjax",
            "specjax completion zsh > ~/.zfunc/_specjax",
        ),
    ),
}
