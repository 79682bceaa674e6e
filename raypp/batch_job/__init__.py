"""The batch job: one JSONL file in, one out, every `custom_id` answered exactly once, however often it is killed."""
