"""The flags and arguments of every command, so that a wrong one is answered before jax comes in.

`python docs/tables.py` writes them, from the options of the commands.
"""

from collections.abc import Mapping, Sequence

WORDS = """\
generate: -h --help prompts --chat --input --output --json --suffix --format --unordered --progress --page --metrics
    --strict --verbose --logprobs --prompt-logprobs --model --weights --mesh --dtype --adapter --longest --cache-dtype
    --reduce-dtype --decode --drafter --batch-size --draft-mesh --learn --num-return-sequences --select
    --shared-prefix --prefix-cache --prefix-cache-file --temperature --top-p --max-new-tokens --seed --stop --sampling
    --top-k --constraint --ignore-eos --distributed --coordinator --num-processes --process-id --ray --ray-workers
score: -h --help --input --output --strict --model --weights --mesh --dtype --adapter --batch-size --samples
bench: -h --help suite --drafter --decode --peer --widen --compare --kind --alone --prompts --input --tasks --samples
    --model --weights --mesh --dtype --adapter --cache-dtype --reduce-dtype --max-new-tokens --temperature
    --batch-size --repeats --seed --ignore-eos --compile-limit --text-limit --json --plot --answers --coverage
eval: -h --help --families --limit --level --questions --samples --infill --model --weights --mesh --dtype --adapter
    --longest --cache-dtype --reduce-dtype --decode --drafter --batch-size --num-return-sequences --select --compare
    --baseline --margin --trust --temperature --max-new-tokens --seed --top-k --top-p --stop --constraint
    --task-constraint --ignore-eos --sampling --answers --json --plot --uncertainty
check-head: -h --help model head prompts --max-new-tokens --batch-size --dtype --adapter --strict --json
train: -h --help drafter --target --output --draft --draft-config --reference --draft-vocabulary --start --adapter
    --data --prompts --features --held-out --max-new-tokens --length --patience --seed --steps --batch-size
    --learning-rate --resume --accumulate --warmup --weight-decay --clip --clip-by --loss --checkpoint-every --mesh
    --plot --weights --dtype --compute-dtype --save-dtype --distributed --coordinator --num-processes --process-id
train hmm: -h --help --target --states --output --weights --dtype --mesh --data --prompts --max-new-tokens --length
    --seed --rounds --tolerance --batch-size
train evopress: -h --help what --target --budget --output --legal --levels --group --cache --dtype --mesh --data
    --prompts --max-new-tokens --length --seed --generations --offspring --survivors --tokens --initial
    --initial-tokens --mutations --fitness --top-k --batch-size
capture: -h --help drafter --target --output --top-k --rows-per-file --save-dtype --adapter --data --prompts --length
    --max-new-tokens --seed --batch-size --mesh --weights --dtype --distributed --coordinator --num-processes
    --process-id
datastore: -h --help action files --output --model
convert: -h --help model output --layout --format --target --dtype --adapter --config --mesh
plan: -h --help --model --topology --mesh --weights --config --dtype --cache-dtype --reduce-dtype --rates --batch
    --context --decode --drafter --memory --accepted --tokens-per-step --sampled --whole --json --plot
plan train: -h --help drafter --target --topology --mesh --weights --config --dtype --compute-dtype --rates
    --batch-size --length --features --accumulate --draft-vocabulary --loss --whole --json
drafters: -h --help --model --drafter
verifiers: -h --help
samplers: -h --help
constraints: -h --help
searches: -h --help
policies: -h --help
models: -h --help
completion: -h --help shell
"""


def of_commands() -> Mapping[str, Sequence[str]]:
    """The words of every command: its flags, and its arguments by name."""
    lines = WORDS.replace("\n    ", " ").splitlines()
    return {name: words.split() for name, _, words in (line.partition(": ") for line in lines)}
