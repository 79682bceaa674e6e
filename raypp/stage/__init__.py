"""One pipeline stage: its rows, the body and the end of its steps, and their recordings."""
