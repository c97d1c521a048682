"""The flags and arguments of every command, so that a wrong one is answered before jax comes in.

`python docs/tables.py` writes them, from the options of the commands.
"""

from collections.abc import Mapping, Sequence

WORDS = """\
generate: -h --help --model --dtype --mesh --adapter --longest --weights --cache-dtype --reduce-dtype --decode
    --drafter --temperature --top-k --top-p --max-new-tokens --seed --stop --ignore-eos --sampling --chat
    --num-return-sequences --select --batch-size --shared-prefix --logprobs --prompt-logprobs prompts --suffix --input
    --output --unordered --progress --strict --verbose --json --distributed --coordinator --num-processes --process-id
    --ray --ray-workers
score: -h --help --model --dtype --mesh --adapter --weights --input --output --batch-size --strict
bench: -h --help suite --model --dtype --mesh --adapter --weights --cache-dtype --reduce-dtype --temperature --seed
    --max-new-tokens --tasks --ignore-eos --samples --answers --drafter --decode --widen --prompts --input --peer
    --repeats --batch-size --json --plot
eval: -h --help --model --dtype --mesh --adapter --longest --weights --cache-dtype --reduce-dtype --decode --drafter
    --temperature --top-k --top-p --max-new-tokens --seed --stop --ignore-eos --sampling --num-return-sequences
    --select --families --level --limit --questions --samples --infill --uncertainty --batch-size --compare --baseline
    --margin --answers --plot --json
check-head: -h --help model head prompts --max-new-tokens --batch-size --dtype --adapter --json --strict
train: -h --help --distributed --coordinator --num-processes --process-id drafter --target --adapter --data --prompts
    --max-new-tokens --features --held-out --patience --output --draft --draft-config --reference --draft-vocabulary
    --start --loss --steps --batch-size --accumulate --length --learning-rate --warmup --weight-decay --clip --clip-by
    --seed --checkpoint-every --resume --dtype --weights --compute-dtype --save-dtype --mesh --plot
capture: -h --help --distributed --coordinator --num-processes --process-id drafter --target --adapter --data
    --prompts --max-new-tokens --output --top-k --length --batch-size --rows-per-file --seed --dtype --weights
    --save-dtype --mesh
datastore: -h --help action files --model --output
convert: -h --help model output --layout --format --target --dtype --adapter --mesh
plan: -h --help --model --config --topology --mesh --batch --context --decode --drafter --dtype --weights
    --cache-dtype --rates --reduce-dtype --tokens-per-step --sampled --whole --json --plot
plan train: -h --help drafter --target --config --topology --mesh --batch-size --accumulate --length --features
    --draft-vocabulary --loss --dtype --compute-dtype --weights --rates --whole --json
drafters: -h --help --model --drafter
verifiers: -h --help
samplers: -h --help
searches: -h --help
policies: -h --help
models: -h --help
"""


def of_commands() -> Mapping[str, Sequence[str]]:
    """The words of every command: its flags, and its arguments by name."""
    lines = WORDS.replace("\n    ", " ").splitlines()
    return {name: words.split() for name, _, words in (line.partition(": ") for line in lines)}
