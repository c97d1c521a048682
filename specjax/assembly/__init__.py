"""From words to objects: names of methods, what is loaded beside a model, and the decoder they make."""
