"""The processes of an engine as Ray actors: starting, placing, watching and ending them."""
